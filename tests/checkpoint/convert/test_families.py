"""Layouts of the families that the genuine checkpoints do not cover, built from a known dense model.

Each test writes a checkpoint as the public code lays it out, converts it, and compares logits with
transformers running the dense model W = factor_out @ factor_in.
"""

import json
import sys
import types

import pytest
import torch
from safetensors.torch import save_file

from thinrank import LLM, ThinrankError, convert
from thinrank.config import ModelConfig
from thinrank.model.registry import parse_config
from tiny_models import low_rank, random_tensors, tiny_config, transformers_logits, write_folder
from tiny_tokenizers import save_byte_level

TOKENS = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(7))


def modules_of(config, *projections, layers=None):
    parsed: ModelConfig = parse_config(config)
    return [
        module
        for module in parsed.linears()
        if module.rpartition(".")[2] in projections
        and (layers is None or module == "lm_head" or int(module.split(".")[2]) in layers)
    ]


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check(source, config, dense, tmp_path, *, family, ranks, **options):
    """Convert and compare with transformers; `ranks` are the modules that must stay low-rank."""
    report = convert(source, tmp_path / "converted", progress=False, **options)
    assert report.family == family
    assert report.ranks == ranks
    logits = LLM(tmp_path / "converted", device="cpu", dtype="float32").logits(TOKENS)
    torch.testing.assert_close(logits, transformers_logits(config, dense, TOKENS), atol=1e-4, rtol=1e-4)
    return report


def without(tensors, modules):
    return {name: t for name, t in tensors.items() if name.removesuffix(".weight") not in modules}


# SVD-LLM: pickled modules


def svd_llm_module(config, dense, factors, class_module, monkeypatch):
    """A pickled model as SVD-LLM saves it, with classes of a package that the reader does not have."""
    module_class = type("SVD_LlamaAttention", (torch.nn.Module,), {"__module__": class_module})
    config_class = type(
        "LlamaConfig", (), {"__module__": f"transformers.models.{config['model_type']}.configuration"}
    )
    for made_class in (module_class, config_class):
        path = made_class.__module__.split(".")
        for depth in range(1, len(path) + 1):
            name = ".".join(path[:depth])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setattr(
            sys.modules[made_class.__module__], made_class.__name__, made_class, raising=False
        )

    root = module_class()
    state = without(dense, factors)
    for module, (factor_in, factor_out) in factors.items():
        parent, _, name = module.rpartition(".")
        letter = name.removesuffix("_proj")
        state[f"{parent}.{letter}_v_proj.weight"] = factor_in
        state[f"{parent}.{letter}_u_proj.weight"] = factor_out
    for layer in range(config["num_hidden_layers"]):
        state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.full((4,), float("nan"))
    for name, tensor in state.items():
        *path, leaf = name.split(".")
        node = root
        for part in path:
            if part not in node._modules:
                node.add_module(part, module_class())
            node = node._modules[part]
        if leaf == "inv_freq":
            node.register_buffer(leaf, tensor)
        else:
            node.register_parameter(leaf, torch.nn.Parameter(tensor))
    root.config = config_class()
    vars(root.config).update({k: v for k, v in config.items() if k not in ("model_type", "architectures")})
    return root


@pytest.mark.parametrize(
    ("class_module", "wrap"),
    [
        ("component.svd_llama", lambda model: {"model": model, "tokenizer": None}),
        ("flashsvd_component.svd_llama", lambda model: {"model": model}),
        ("models.llama", lambda model: model),  # LowRankArena: the module alone
    ],
)
def test_svd_llm_pickled_module(class_module, wrap, monkeypatch, tmp_path):
    config = tiny_config()  # grouped-query attention, which the public LLaMA class cannot run itself
    ranks = {module: 5 + i % 7 for i, module in enumerate(modules_of(config, *ALL))}
    dense, factors = low_rank(random_tensors(config), ranks)
    torch.save(wrap(svd_llm_module(config, dense, factors, class_module, monkeypatch)), tmp_path / "model.pt")
    monkeypatch.undo()  # reading must do without the classes
    report = check(tmp_path / "model.pt", config, dense, tmp_path, family="svd-llm", ranks=ranks)
    assert any("rotary" in line for line in report.dropped)


def test_svd_llm_state_dict_needs_a_base(tmp_path):
    config = tiny_config("mistral", sliding_window=None)
    ranks = dict.fromkeys(modules_of(config, *ALL, layers=[1]), 6)
    dense, factors = low_rank(random_tensors(config), ranks)
    base = save_byte_level(write_folder(tmp_path / "base", config, random_tensors(config)))
    state = {}
    for module, (factor_in, factor_out) in factors.items():
        letter = module.removesuffix("_proj")
        state |= {f"{letter}_v_proj.weight": factor_in, f"{letter}_u_proj.weight": factor_out}
    torch.save(state, tmp_path / "only_factors.pt")
    with pytest.raises(ThinrankError, match="--base"):
        convert(tmp_path / "only_factors.pt", tmp_path / "converted", progress=False)
    report = check(
        tmp_path / "only_factors.pt", config, dense, tmp_path, family="svd-llm", ranks=ranks, base=base
    )
    assert "model.embed_tokens.weight" in report.from_base
    assert report.tokenizer and (tmp_path / "converted" / "tokenizer.json").is_file()


def test_base_of_another_shape_is_an_error(tmp_path):
    config = tiny_config()
    ranks = dict.fromkeys(modules_of(config, "down_proj"), 6)
    _, factors = low_rank(random_tensors(config), ranks)
    other = tiny_config(intermediate_size=96)
    base = write_folder(tmp_path / "base", other, random_tensors(other))
    state = {}
    for module, (factor_in, factor_out) in factors.items():
        letter = module.removesuffix("_proj")
        state |= {f"{letter}_v_proj.weight": factor_in, f"{letter}_u_proj.weight": factor_out}
    torch.save(state, tmp_path / "factors.pt")
    with pytest.raises(ThinrankError, match=r"down_proj.*do not multiply"):
        convert(tmp_path / "factors.pt", tmp_path / "converted", base=base, progress=False)


# Basis Sharing


def basis_sharing(config, groups):
    """Dense tensors, and the state dict in which each group of layers shares one basis per projection."""
    tensors = random_tensors(config)
    state, ranks = {}, {}
    for letter, layer_groups in groups.items():
        for group in layer_groups:
            basis = None
            for layer in group:
                module = next(m for m in modules_of(config, f"{letter}_proj", layers=[layer]))
                one, factors = low_rank(tensors, {module: 9})
                factor_in, factor_out = factors[module]
                basis = factor_in if basis is None else basis
                tensors[f"{module}.weight"] = factor_out @ basis
                ranks[module] = 9
                state[f"{module}.weight"] = factor_out
                state[f"model.{letter}_basis.{layer}.weight"] = basis
                del one
    return tensors, tensors | state, ranks


def layer_level_names(state):
    """The LLaMA layout registers each basis inside its layers too."""
    parents = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}
    extra = {}
    for name, tensor in state.items():
        if "_basis." in name:
            letter, layer = name.split(".")[1].removesuffix("_basis"), name.split(".")[2]
            extra[f"model.layers.{layer}.{parents.get(letter, 'mlp')}.{letter}_basis.weight"] = tensor
    return state | extra


@pytest.mark.parametrize("layout", ["llama", "mistral"])
def test_basis_sharing_groups(layout, tmp_path):
    config = tiny_config(layout, num_hidden_layers=4)
    pairs, last_short, single = [[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0], [1], [2], [3]]
    groups = {"q": last_short, "gate": pairs, "up": pairs, "down": single, "o": single}
    if layout == "llama":  # the Mistral layout leaves k and v dense
        groups |= {"k": pairs, "v": last_short}
    dense, state, ranks = basis_sharing(config, groups)
    keys = {f"{letter}_groups": value for letter, value in groups.items()}
    keys |= {f"num_basis_{letter}": 9 for letter in groups}
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(config | keys | {"architectures": ["ShareLlamaForCausalLM"], "use_cache": False})
    )
    torch.save(layer_level_names(state) if layout == "llama" else state, folder / "pytorch_model.bin")
    # Of the narrow k and v, a pair of rank 9 in the short last group saves nothing only if it is alone.
    report = check(folder, config, dense, tmp_path, family="basis-sharing", ranks=ranks)
    shared = sum(len(group) - 1 for layer_groups in groups.values() for group in layer_groups)
    assert report.tied_factors == shared
    written = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert not any(key.startswith("num_basis") or key.endswith("_groups") for key in written)


def test_basis_sharing_shards_repeat_the_basis(tmp_path):
    config = tiny_config(num_hidden_layers=2)
    dense, state, ranks = basis_sharing(config, {"q": [[0, 1]], "up": [[0, 1]]})
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            config | {"num_basis_q": 9, "q_groups": [[0, 1]], "num_basis_up": 9, "up_groups": [[0, 1]]}
        )
    )
    write_shards(folder, layer_level_names({name: t.clone() for name, t in state.items()}), "bin")
    assert check(folder, config, dense, tmp_path, family="basis-sharing", ranks=ranks).tied_factors == 2

    state["model.q_basis.1.weight"] = state["model.q_basis.1.weight"] + 1e-3
    write_shards(folder, layer_level_names(state), "bin")
    with pytest.raises(ThinrankError, match="differs from the basis of its group"):
        convert(folder, tmp_path / "damaged", progress=False)


def write_shards(folder, state, kind):
    """Two shards with an index, split in the middle."""
    names = list(state)
    stem = "model" if kind == "safetensors" else "pytorch_model"
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"{stem}-{number:05d}-of-00002.{kind}"
        tensors = {name: state[name].clone() for name in part}
        if kind == "safetensors":
            save_file(tensors, folder / file)
        else:
            torch.save(tensors, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# ALinear / BLinear in both orders


def ab_state(dense, factors, order):
    """order: the names of (factor_in, factor_out)."""
    state = without(dense, factors)
    for module, pair in factors.items():
        for name, factor in zip(order, pair, strict=True):
            state[f"{module}.{name}.weight"] = factor
        if f"{module}.bias" in state:
            state[f"{module}.{order[1]}.bias"] = state.pop(f"{module}.bias")
    return state


ASVD_ORDER, DOBI_ORDER = ("BLinear", "ALinear"), ("ALinear", "BLinear")


@pytest.mark.parametrize("tied", [False, True])
def test_asvd_with_a_factored_lm_head(tied, tmp_path):
    config = tiny_config(tie_word_embeddings=tied, attention_bias=True)
    untied = config | {"tie_word_embeddings": False}
    ranks = dict.fromkeys(modules_of(config, "q_proj", "down_proj", layers=[0]), 8) | {"lm_head": 20}
    dense, factors = low_rank(random_tensors(untied), ranks)
    keys = {
        "truncation_ranks": ranks,
        "architectures": ["ASVDLlamaForCausalLM"],
        "auto_map": {"AutoConfig": "x.y"},
    }
    folder = write_folder(tmp_path / "source", config | keys, ab_state(dense, factors, ASVD_ORDER))
    check(folder, untied, dense, tmp_path, family="asvd", ranks=ranks)
    assert "auto_map" not in json.loads((tmp_path / "converted" / "config.json").read_text())


def test_asvd_square_factors_are_taken_in_its_own_order(tmp_path):
    """At full rank of a square matrix shapes cannot tell the order. The product is stored dense."""
    config = tiny_config()
    module = "model.layers.0.self_attn.q_proj"
    dense, factors = low_rank(random_tensors(config), {module: 48, "model.layers.1.mlp.up_proj": 9})
    folder = write_folder(
        tmp_path / "source", config | {"truncation_ranks": {module: 48}}, ab_state(dense, factors, ASVD_ORDER)
    )
    report = check(folder, config, dense, tmp_path, family="asvd", ranks={"model.layers.1.mlp.up_proj": 9})
    assert report.densified == {module: 48}


@pytest.mark.parametrize("order", [ASVD_ORDER, DOBI_ORDER])
def test_lowrank_arena_ab_export(order, tmp_path):
    """Biased architecture, mixed dtypes, wrong ranks in the config, rotary buffers left over."""
    config = tiny_config("qwen2")
    ranks = dict.fromkeys(modules_of(config, *ALL, layers=[1]), 7)
    dense, factors = low_rank(random_tensors(config), ranks)
    keys = {
        "model_type": "lowrank_qwen2",
        "architectures": ["LowRankQwen2ForCausalLM"],
        "low_rank_format_version": 1,
        "low_rank_schema": "ABLinear",
        "low_rank_modules": dict.fromkeys(ranks, 999),
    }
    folder = write_folder(tmp_path / "source", config | keys, ab_state(dense, factors, order))
    check(folder, config, dense, tmp_path, family="lowrank-arena", ranks=ranks)
    written = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("qwen2", ["Qwen2ForCausalLM"])


def test_lowrank_arena_dobi_export(tmp_path):
    config = tiny_config("qwen3")
    ranks = dict.fromkeys(modules_of(config, "o_proj", "gate_proj"), 7)
    dense, factors = low_rank(random_tensors(config), ranks)
    keys = {"architectures": ["DobiSVDLlamaForCausalLM"], "dobi_target_modules": ranks}
    folder = write_folder(tmp_path / "source", config | keys, ab_state(dense, factors, DOBI_ORDER))
    check(folder, config, dense, tmp_path, family="dobi-svd", ranks=ranks)


def test_lowrank_arena_svd_llm_export(tmp_path):
    config = tiny_config()
    ranks = dict.fromkeys(modules_of(config, *ALL), 7)
    dense, factors = low_rank(random_tensors(config), ranks)
    state = without(dense, factors)
    for module, (factor_in, factor_out) in factors.items():
        state |= {f"{module}.v_proj.weight": factor_in, f"{module}.u_proj.weight": factor_out}
    folder = tmp_path / "source"
    folder.mkdir()
    keys = {"model_type": "svdllm-llama", "svd_ranks": ranks, "architectures": ["SVDLlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | keys))
    write_shards(folder, state, "bin")
    check(folder, config, dense, tmp_path, family="lowrank-arena", ranks=ranks)


def test_bias_on_the_wrong_factor_is_refused(tmp_path):
    """Dobi-SVD puts a bias on the factor applied first and loses the trained one."""
    config = tiny_config("qwen2")
    ranks = {"model.layers.0.self_attn.q_proj": 7}
    dense, factors = low_rank(random_tensors(config), ranks)
    state = ab_state(dense, factors, DOBI_ORDER)
    module = "model.layers.0.self_attn.q_proj"
    state[f"{module}.ALinear.bias"] = state.pop(f"{module}.BLinear.bias")
    folder = write_folder(tmp_path / "source", config | {"dobi_target_modules": ranks}, state)
    with pytest.raises(ThinrankError, match="bias on the factor that is applied first"):
        convert(folder, tmp_path / "converted", progress=False)


# Dense


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_dense_folders(kind, sharded, tied, tmp_path):
    config = tiny_config(tie_word_embeddings=tied)
    tensors = random_tensors(config)
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    stored = tensors | ({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()} if tied else {})
    if sharded:
        write_shards(folder, stored, kind)
    elif kind == "bin":
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors")
    check(folder, config, tensors, tmp_path, family="hf-dense", ranks={})


@pytest.mark.parametrize("method", ["gptq", "fp8", "awq", "compressed-tensors"])
def test_foreign_quantisation_is_refused_by_name(method, tmp_path):
    config = tiny_config(quantization_config={"quant_method": method})
    folder = write_folder(tmp_path / "source", config, random_tensors(tiny_config()))
    with pytest.raises(ThinrankError, match=method):
        convert(folder, tmp_path / "converted", progress=False)


@pytest.mark.parametrize("model_type", ["opt", "gpt2", "gemma3_text", "mixtral"])
def test_other_architectures_are_refused_by_name(model_type, tmp_path):
    folder = write_folder(tmp_path / "source", tiny_config(model_type), {"x": torch.zeros(1)})
    with pytest.raises(ThinrankError, match=f"'{model_type}' is not implemented"):
        convert(folder, tmp_path / "converted", progress=False)
