"""thinrank folders in transformers: logits, the way back, adapters, and the engine on the same parameters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import thinrank.integrations.transformers  # noqa: F401 (registers)
from conftest import CHECKPOINTS
from engine_matrix import thinrank_tokens, transformers_tokens
from thinrank import LLM, SamplingParams
from thinrank.checkpoint.format import read_config
from thinrank.engine.engine import Engine
from thinrank.errors import CheckpointError, OutputError, UnsupportedModelError
from thinrank.integrations.takeover import move_into_arena, take_over
from thinrank.model.batch import ForwardBatch
from tiny_low_rank_models import MODELS, write_low_rank
from tiny_models import low_rank, random_tensors, tiny_config, write_folder

LOW_RANK = [name for name in CHECKPOINTS if not name.startswith("base-")]
SHARED = "basis_sharing-share2-20"
IDS = torch.tensor([[5, 9, 77, 31, 40, 2, 8]])
#: Sums in another order; logits are about 12, those of the tiny model about 3.
CLOSE = {"atol": 1e-4, "rtol": 0}


def load(folder: Path, **options) -> PreTrainedModel:
    """Any complaint of transformers about a tensor is an error."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values())
    return model


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits.float()


@torch.no_grad()
def decoded(decoder):
    return decoder(ForwardBatch.whole_sequences(list(IDS.to(decoder.device)), decoder.device))[None]


def same_tensors(before: Path, after: Path) -> dict[str, torch.Tensor]:
    """The tensors of both folders, equal in every bit."""
    tensors, others = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype and torch.equal(tensor, others[name])
    return tensors


def section(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def write_biased(folder: Path, **changes) -> Path:
    """Biases, modules that stay dense, an embedding in 16 bits, and a factor_in that two layers share; of sizes that
    GPUs take."""
    config = tiny_config(
        "qwen2", hidden_size=128, intermediate_size=192, head_dim=64, num_attention_heads=4, **changes
    )
    shared = "model.layers.{}.self_attn.q_proj"
    ranks = {shared.format(0): 33, shared.format(1): 33, "model.layers.1.mlp.up_proj": 7}
    tensors, factors = low_rank(random_tensors(config), ranks)
    for module, (factor_in, factor_out) in factors.items():
        tensors |= {f"{module}.factor_in.weight": factor_in, f"{module}.factor_out.weight": factor_out}
        tensors[f"{module}.weight"] = torch.empty(0)
        if f"{module}.bias" in tensors:
            tensors[f"{module}.factor_out.bias"] = tensors.pop(f"{module}.bias")
    ties = {f"{shared.format(1)}.factor_in.weight": f"{shared.format(0)}.factor_in.weight"}
    for name in ties:
        del tensors[name]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
    config["dtype"] = "float32"
    config["quantization_config"] = {
        "quant_method": "thinrank",
        "format_version": 1,
        "modules": {module: {"rank": rank} for module, rank in ranks.items()},
        "tied_factors": ties,
        "source": {"family": "test"},
    }
    return write_folder(folder, config, tensors)


@pytest.fixture(scope="module")
def biased(tmp_path_factory) -> Path:
    return write_biased(tmp_path_factory.mktemp("biased") / "model")


@pytest.fixture(params=["genuine", "biased"])
def shared(request, converted, biased) -> Path:
    """Folders whose modules share a factor_in."""
    return converted(SHARED) if request.param == "genuine" else biased


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_the_references(name, converted):
    reference = LLM(converted(name), device="cpu", dtype="float32").logits(IDS)
    torch.testing.assert_close(logits(load(converted(name), dtype="float32")), reference, **CLOSE)


def test_biases_and_dense_modules(biased):
    torch.testing.assert_close(logits(load(biased)), LLM(biased, device="cpu").logits(IDS), **CLOSE)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_family_generates_what_the_engine_does(name, converted):
    assert transformers_tokens(converted(name)) == thinrank_tokens(converted(name))


@pytest.mark.parametrize("name", MODELS)
def test_every_structure_generates_what_the_engine_does(name, tmp_path):
    folder = write_low_rank(tmp_path / "model", name)
    assert transformers_tokens(folder) == thinrank_tokens(folder)


@pytest.mark.parametrize("name", LOW_RANK)
def test_the_way_back_changes_nothing(name, converted, tmp_path):
    model = load(converted(name))
    model.save_pretrained(tmp_path)
    assert section(tmp_path) == section(converted(name))
    tensors = same_tensors(converted(name), tmp_path)
    assert model.num_parameters() == sum(tensor.numel() for tensor in tensors.values())


def test_the_way_back_in_shards(shared, tmp_path):
    model = load(shared)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    torch.testing.assert_close(LLM(tmp_path, device="cpu").logits(IDS), logits(model), **CLOSE)


def test_a_trained_tensor_is_not_rounded(converted, tmp_path):
    """This folder stores its norms in 16 bits and its factors in 32."""
    model = load(converted("svdllm_v1-whitening_only-0.8"))
    with torch.no_grad():
        model.model.norm.weight.mul_(1 + 2**-20)
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path).model.norm.weight, model.model.norm.weight)


def test_a_shared_factor_is_one_parameter(shared):
    model = load(shared)
    for tied, holder in section(shared)["tied_factors"].items():
        assert model.get_parameter(tied) is model.get_parameter(holder)


def test_without_our_import_transformers_refuses(converted):
    program = (
        "import sys, thinrank\nfrom transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    )
    folder = converted("svdllm_v2-hetero-0.6")
    result = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True)
    assert result.returncode == 1 and "MISMATCH" in result.stderr


def test_damaged_folders_and_other_heads_are_refused(biased, tmp_path):
    tensors = load_file(biased / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.factor_out.weight"]
    write_folder(tmp_path / "damaged", json.loads((biased / "config.json").read_text()), tensors)
    with pytest.raises(CheckpointError, match=r"lacks tensor model.layers.1.mlp.up_proj.factor_out.weight"):
        load(tmp_path / "damaged")
    with pytest.raises(UnsupportedModelError, match="load it with AutoModelForCausalLM"):
        AutoModel.from_pretrained(biased)


def lora(model, **options):
    """The model with a random adapter around every factor, one optimizer's step away from its start."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=["factor_in", "factor_out"], init_lora_weights=False, **options
    )
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(2):
        loss = adapted(IDS, labels=IDS).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
    return adapted


def test_a_merged_adapter_is_written_in_the_format(shared, tmp_path):
    """Where modules shared a factor_in, each has its own now."""
    adapted = lora(load(shared))
    expected = logits(adapted)
    with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        take_over(adapted)
    with pytest.raises(OutputError, match="merge_and_unload"):
        adapted.base_model.model.save_pretrained(tmp_path / "wrapped")
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, **CLOSE)
    torch.testing.assert_close(decoded(take_over(merged)), expected, **CLOSE)
    merged.save_pretrained(tmp_path / "merged")
    assert section(tmp_path / "merged") == {**section(shared), "tied_factors": {}}
    torch.testing.assert_close(LLM(tmp_path / "merged", device="cpu").logits(IDS), expected, **CLOSE)


def test_an_unloaded_adapter_leaves_the_ties(shared, tmp_path):
    adapted = lora(load(shared))
    adapted.save_pretrained(tmp_path / "adapter")
    expected = logits(adapted)
    adapted.unload().save_pretrained(tmp_path / "model")
    assert section(tmp_path / "model") == section(shared)
    again = load(tmp_path / "model")
    again.load_adapter(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(again), expected, **CLOSE)


def test_the_engine_runs_on_the_models_own_memory(shared):
    model = load(shared)
    decoder = take_over(model)
    name = "model.layers.1.self_attn.q_proj.factor_out"
    assert decoder.layers[1].q_proj.factor_out.data_ptr() == model.get_parameter(f"{name}.weight").data_ptr()
    with torch.no_grad():  # an optimizer's step
        for parameter in model.parameters():
            parameter.mul_(1.01)
    torch.testing.assert_close(decoded(decoder), logits(model), **CLOSE)
    engine = Engine(decoder)
    engine.add(IDS[0].tolist(), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    tokens = [token.token_id for _ in range(3) for token in engine.step()]
    ids = model.generate(IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert tokens == ids[0, IDS.shape[1] :].tolist()


@pytest.mark.parametrize("tied", [False, True], ids=["own lm_head", "tied lm_head"])
def test_the_arena_holds_the_models_matrices(tied, tmp_path):
    """What `take_over` does on a GPU, on whatever there is: ranks 33 and 7 are padded, and views all the same."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(write_biased(tmp_path / "model", tie_word_embeddings=tied))
    expected = logits(model)
    decoder = move_into_arena(model, read_config(model.config.to_dict())[0], device)
    memory = decoder.arena.untyped_storage().data_ptr()
    matrices = {name: tensor for name, tensor in model.named_parameters() if tensor.dim() == 2}
    outside = [name for name, tensor in matrices.items() if tensor.untyped_storage().data_ptr() != memory]
    assert outside == ([] if tied else ["model.embed_tokens.weight"])  # looked up, never multiplied
    assert decoder.embed_tokens.data_ptr() == matrices["model.embed_tokens.weight"].data_ptr()

    ids = IDS.to(device)
    torch.testing.assert_close(logits(model, ids).cpu(), expected, **CLOSE)
    model.save_pretrained(tmp_path / "saved")
    same_tensors(tmp_path / "model", tmp_path / "saved")

    model.requires_grad_(False)
    for tensor in matrices.values():
        tensor.requires_grad_()
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(matrices.values(), lr=0.5).step()
    trained = logits(model, ids)
    assert (trained.cpu() - expected).abs().max() > 0.1
    torch.testing.assert_close(decoded(decoder), trained, **CLOSE)


@pytest.mark.gpu
def test_the_engine_on_a_gpu(biased):
    """bfloat16 throughout; the engine keeps its residual stream in float32, transformers does not."""
    model = load(biased, dtype="bfloat16")
    decoder = take_over(model, "cuda")
    expected = logits(model, IDS.cuda())
    torch.testing.assert_close(decoded(decoder), expected, atol=0.1, rtol=0)
    engine = Engine(decoder)
    engine.add(IDS[0].tolist(), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len([token for _ in range(3) for token in engine.step()]) == 3
