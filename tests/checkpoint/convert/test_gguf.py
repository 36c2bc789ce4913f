"""GGUF files made here with `gguf.GGUFWriter`: tensors, config, tokenizers and damage."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from thinrank.checkpoint.convert import gguf as adapter
from thinrank.checkpoint.convert.gguf_file import is_gguf
from thinrank.checkpoint.convert.gguf_tokenizer import _SPLITTINGS
from thinrank.errors import CheckpointError, ThinrankError, UnsupportedModelError

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 256, 512, 4, 2, 64, 2, 320
CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "In 1984 there were 12345 of them; today: 67.\n\n    return x + 1",
    "Ångström, naïve café, 你好世界, привет мир!",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A byte-level BPE tokenizer that splits text as SmolLM's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def sentencepiece_model() -> Any:
    """A SentencePiece BPE model as Llama 2's: byte fallback, a prefix space, no normalisation."""
    sentencepiece = pytest.importorskip("sentencepiece")
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS[:2] * 4),
        model_writer=stream,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())


def add_byte_level(writer: Any, tokenizer: Tokenizer, pre: str | None = "smollm") -> None:
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_sentencepiece(writer: Any, processor: Any) -> None:
    ids = range(processor.vocab_size())
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([processor.id_to_piece(i) for i in ids])
    writer.add_token_scores([processor.get_score(i) for i in ids])

    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return 2
        if processor.is_control(i):
            return 3
        if processor.is_byte(i):
            return 6
        return 4 if processor.id_to_piece(i) == "<tool>" else 1

    writer.add_token_types([kind(i) for i in ids])


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key projections of the llama architecture."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def random_tensors(
    vocab_size: int = VOCAB, *, tied: bool = False, bias: bool = False
) -> dict[str, np.ndarray]:
    """A llama model under its GGUF names, with rows in Hugging Face's order."""
    generator = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape) * 0.05).astype(np.float32)

    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {"token_embd.weight": matrix(vocab_size, HIDDEN), "output_norm.weight": 1 + matrix(HIDDEN)}
    if not tied:
        tensors["output.weight"] = matrix(vocab_size, HIDDEN)
    for layer in range(LAYERS):
        block = {
            "attn_norm": 1 + matrix(HIDDEN),
            "attn_q": matrix(q, HIDDEN),
            "attn_k": matrix(kv, HIDDEN),
            "attn_v": matrix(kv, HIDDEN),
            "attn_output": matrix(HIDDEN, q),
            "ffn_norm": 1 + matrix(HIDDEN),
            "ffn_gate": matrix(MLP, HIDDEN),
            "ffn_up": matrix(MLP, HIDDEN),
            "ffn_down": matrix(HIDDEN, MLP),
        }
        tensors |= {f"blk.{layer}.{name}.weight": value for name, value in block.items()}
        if bias:
            tensors[f"blk.{layer}.attn_q.bias"] = matrix(q)
            tensors[f"blk.{layer}.attn_k.bias"] = matrix(kv)
            tensors[f"blk.{layer}.attn_v.bias"] = matrix(kv)
    return tensors


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    types: Callable[[str], Any] = lambda _name: Type.F32,
    extra: Callable[[Any], None] = lambda _writer: None,
    arch: str = "llama",
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    extra(writer)
    for name, value in (random_tensors() if tensors is None else tensors).items():
        if ".attn_q." in name:
            value = permuted(value, HEADS)
        elif ".attn_k." in name:
            value = permuted(value, KV_HEADS)
        kind = Type.F32 if value.ndim == 1 else types(name)
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(model: adapter.GGUFModel, folder: Path) -> Path:
    """A Hugging Face folder of the model."""
    folder.mkdir()
    for name, content in model.tokenizer_files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(model.config))
    tensors = {name: tensor.read() for name, tensor in model.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load_tokenizer(model: adapter.GGUFModel) -> Tokenizer:
    return Tokenizer.from_str(model.tokenizer_files["tokenizer.json"].decode())


# --- tensors and config ------------------------------------------------------------------------------


def test_is_gguf(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"GGU")
    assert is_gguf(write_gguf(tmp_path / "m.gguf"))
    assert not any(is_gguf(path) for path in (tmp_path, tmp_path / "other", tmp_path / "none"))


def test_f32_tensors_come_back_exactly(tmp_path: Path) -> None:
    tensors = random_tensors()
    model = adapter.read(write_gguf(tmp_path / "m.gguf", tensors))
    assert len(model.tensors) == len(tensors) and not model.dropped
    for ours, theirs in (
        ("model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"),
        ("model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.1.post_attention_layernorm.weight", "blk.1.ffn_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ):
        read = model.tensors[ours].read()
        assert read.is_contiguous() and torch.equal(read, torch.from_numpy(tensors[theirs])), ours


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_types(tmp_path: Path, kind: str) -> None:
    tensors = random_tensors()
    model = adapter.read(write_gguf(tmp_path / "m.gguf", tensors, types=lambda _name: Type[kind]))
    weight = model.tensors["model.layers.0.self_attn.q_proj.weight"]
    expected = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert weight.dtype == weight.read().dtype == expected
    assert model.config["torch_dtype"] == str(expected).removeprefix("torch.")
    assert model.tensors["model.norm.weight"].dtype == torch.float32
    # Blocks run along a row, so the order of the rows does not change their values.
    original = tensors["blk.0.attn_q.weight"]
    rounded = gguf.quants.dequantize(gguf.quants.quantize(original, Type[kind]), Type[kind])
    assert torch.equal(weight.read().float(), torch.from_numpy(rounded))


def test_k_quants(tmp_path: Path) -> None:
    """Q6_K, which `gguf` cannot write: random quants with a finite scale."""
    generator = np.random.default_rng(1)
    blocks = generator.integers(0, 256, (HIDDEN, MLP // 256, 210), dtype=np.uint8)
    blocks[..., 208:] = np.array([0.01], np.float16).view(np.uint8)
    packed = blocks.reshape(HIDDEN, -1)
    tensors = random_tensors()
    del tensors["blk.0.ffn_down.weight"]

    def add(writer: Any) -> None:
        writer.add_tensor("blk.0.ffn_down.weight", packed, raw_dtype=Type.Q6_K)

    model = adapter.read(write_gguf(tmp_path / "m.gguf", tensors, extra=add))
    weight = model.tensors["model.layers.0.mlp.down_proj.weight"]
    assert weight.shape == (HIDDEN, MLP) and weight.dtype == torch.float32
    assert torch.equal(weight.read(), torch.from_numpy(gguf.quants.dequantize(packed, Type.Q6_K)))


def test_config(tmp_path: Path, byte_level: Tokenizer) -> None:
    path = write_gguf(tmp_path / "m.gguf", extra=lambda writer: add_byte_level(writer, byte_level))
    assert adapter.read(path).config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_tied_embedding_and_missing_output_bias(tmp_path: Path) -> None:
    tensors = random_tensors(tied=True, bias=True)
    model = adapter.read(write_gguf(tmp_path / "m.gguf", tensors))
    assert model.config["tie_word_embeddings"] and model.config["attention_bias"]
    assert "lm_head.weight" not in model.tensors
    q_bias = model.tensors["model.layers.0.self_attn.q_proj.bias"].read()
    assert torch.equal(q_bias, torch.from_numpy(tensors["blk.0.attn_q.bias"]))
    assert not model.tensors["model.layers.0.self_attn.o_proj.bias"].read().any()


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_logits_agree_with_transformers(tmp_path: Path, byte_level: Tokenizer, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers reads GGUF files with accelerate only")
    path = write_gguf(
        tmp_path / "m.gguf",
        types=lambda _name: Type[kind],
        extra=lambda writer: add_byte_level(writer, byte_level),
    )
    folder = write_folder(adapter.read(path), tmp_path / "out")
    auto = transformers.AutoModelForCausalLM
    ours = auto.from_pretrained(folder, dtype=torch.float32)
    theirs = auto.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ids = torch.tensor([byte_level.encode(" ".join(CORPUS)).ids[:120]])
    with torch.no_grad():
        assert (ours(ids).logits - theirs(ids).logits).abs().max() < 1e-5


# --- RoPE --------------------------------------------------------------------------------------------


def llama3_divisors(factor: float, theta: float = 10000.0, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """As llama.cpp's converter writes them."""
    divisors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * theta ** (i / HEAD_DIM)
        if wavelength < 8192 / high:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recognised(tmp_path: Path, factor: float) -> None:
    tensors = random_tensors() | {"rope_freqs.weight": llama3_divisors(factor)}
    model = adapter.read(write_gguf(tmp_path / "m.gguf", tensors))
    assert model.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in model.tensors)


def test_llama3_divisors_are_those_of_transformers() -> None:
    """The fixture above is right: transformers' frequencies are the plain ones over these divisors."""
    transformers = pytest.importorskip("transformers")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, rope_theta=10000.0, rope_scaling=scaling
    )
    rope = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    plain = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    torch.testing.assert_close(plain / rope.inv_freq, torch.from_numpy(llama3_divisors(8.0)))


def test_neutral_rope_divisors_are_dropped(tmp_path: Path) -> None:
    tensors = random_tensors() | {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    model = adapter.read(write_gguf(tmp_path / "m.gguf", tensors))
    assert model.config["rope_scaling"] is None


def test_other_rope_divisors_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors() | {"rope_freqs.weight": llama3_divisors(8.0, high=3.0)}
    with pytest.raises(UnsupportedModelError, match="llama3 rule"):
        adapter.read(write_gguf(tmp_path / "m.gguf", tensors))


def test_rope_scaling_from_metadata(tmp_path: Path) -> None:
    def linear(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_yarn_beta_fast(16.0)

    def longrope(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

    config = adapter.read(write_gguf(tmp_path / "a.gguf", extra=linear)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    config = adapter.read(write_gguf(tmp_path / "b.gguf", extra=yarn)).config
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
    }
    with pytest.raises(UnsupportedModelError, match="longrope"):
        adapter.read(write_gguf(tmp_path / "c.gguf", extra=longrope))


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda w: w.add_expert_count(8), "mixture of 8 experts"),
        (lambda w: w.add_key_length(32), "rope.dimension_count to 64 with heads of 32"),
        (lambda w: w.add_value_length(32), "value_length to 32"),
        (lambda w: w.add_clamp_kqv(8.0), "clamp_kqv to 8.0"),
        (lambda w: w.add_logit_scale(0.5), "logit_scale to 0.5"),
        (lambda w: w.add_uint32("llama.new_trick", 1), "llama.new_trick to 1"),
        (lambda w: w.add_uint16("split.count", 3), "3 GGUF files"),
        (lambda w: w.add_type("adapter"), "holds a adapter"),
        (lambda w: w.add_array("llama.feed_forward_length_x", [1, 2]), "feed_forward_length_x"),
        (lambda w: w.add_tensor("blk.0.attn_q_norm.weight", np.ones(64, np.float32)), "attn_q_norm"),
        (lambda w: w.add_tensor("blk.7.attn_norm.weight", np.ones(HIDDEN, np.float32)), "blk.7.attn_norm"),
        (lambda w: w.add_tensor("ints", np.ones(4, np.int32)), "ints is stored as GGML type 26"),
        (lambda w: w.add_tokenizer_model("bert"), "tokenizer 'bert'"),
    ],
)
def test_unsupported_files_are_refused_by_name(
    tmp_path: Path, extra: Callable[[Any], None], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        adapter.read(write_gguf(tmp_path / "m.gguf", extra=extra))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'qwen3moe' is not implemented"):
        adapter.read(write_gguf(tmp_path / "m.gguf", arch="qwen3moe"))


def test_unknown_splitting_rule_is_refused_by_name(tmp_path: Path, byte_level: Tokenizer) -> None:
    path = write_gguf(tmp_path / "m.gguf", extra=lambda w: add_byte_level(w, byte_level, "grok-9"))
    with pytest.raises(UnsupportedModelError, match=r"'grok-9'.*llama-bpe.*smollm"):
        adapter.read(path)


def test_missing_or_misshapen_tensors(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        adapter.read(write_gguf(tmp_path / "a.gguf", tensors))
    tensors = random_tensors() | {"blk.1.ffn_up.weight": np.zeros((MLP, 32), np.float32)}
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight has the shape \[512, 32\]"):
        adapter.read(write_gguf(tmp_path / "b.gguf", tensors))


def test_gguf_package_is_needed_for_quantised_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_gguf(tmp_path / "a.gguf", types=lambda _name: Type.F16)
    quantised = write_gguf(tmp_path / "b.gguf", types=lambda _name: Type.Q8_0)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert adapter.read(plain).tensors["lm_head.weight"].read().dtype == torch.float16
    with pytest.raises(ThinrankError, match=r"pip install 'thinrank\[gguf\]'"):
        adapter.read(quantised)


# --- damage ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory, byte_level: Tokenizer) -> tuple[bytes, int]:
    """Bytes of a file, and the length of its header."""
    path = write_gguf(
        tmp_path_factory.mktemp("gguf") / "m.gguf",
        types=lambda _name: Type.Q4_1,
        extra=lambda writer: add_byte_level(writer, byte_level),
    )
    return path.read_bytes(), min(tensor.data_offset for tensor in gguf.GGUFReader(path).tensors)


def read_all(path: Path) -> None:
    for tensor in adapter.read(path).tensors.values():
        assert tensor.read().shape == tensor.shape


def test_truncated_files(tmp_path: Path, small_file: tuple[bytes, int]) -> None:
    content, header = small_file
    path = tmp_path / "m.gguf"
    cuts = [*range(0, 64), *range(64, header, 97), *range(header, len(content) - 32, 20011)]
    for cut in cuts:
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError) as caught:
            read_all(path)
        assert "\n" not in str(caught.value)


def test_flipped_bytes(tmp_path: Path, small_file: tuple[bytes, int]) -> None:
    """A damaged header is an error or, where only a name or a number changed, another model."""
    content, header = small_file
    path = tmp_path / "m.gguf"
    generator = random.Random(0)
    refused = 0
    for attempt in range(300):
        damaged = bytearray(content)
        # Most of the header is vocabulary; every other flip hits the structure around it.
        end = 700 if attempt % 2 else header
        for _ in range(generator.choice([1, 1, 4])):
            damaged[generator.randrange(end)] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            adapter.read(path)
        except ThinrankError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 100


def test_absurd_counts_cost_nothing(tmp_path: Path, small_file: tuple[bytes, int]) -> None:
    content, _header = small_file
    path = tmp_path / "m.gguf"
    for position in (8, 16, 24):  # tensor count, key count, length of the first key
        damaged = bytearray(content)
        damaged[position : position + 8] = (2**62).to_bytes(8, "little")
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            adapter.read(path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda w: w.add_vocab_size(17), "vocab_size is 17"),
        (lambda w: w.add_bos_token_id(VOCAB), "bos_token_id is 320"),
        (lambda w: w.add_uint32("general.alignment", 0), "alignment is 0"),
        (lambda w: w.add_string("llama.rope.scaling.factor", "x"), "holds a str, not a float"),
    ],
)
def test_inconsistent_metadata(tmp_path: Path, extra: Callable[[Any], None], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        adapter.read(write_gguf(tmp_path / "m.gguf", extra=extra))


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ({"tokens": ["a", "a"]}, "a token twice"),
        ({"tokens": ["a"], "merges": ["a b"]}, "joins 'a' and 'b'"),
        ({"tokens": ["a"], "merges": ["a"]}, "joins 'a' and ''"),
        ({"tokens": [str(i) for i in range(VOCAB + 1)]}, "321 tokens, the embedding 320 rows"),
        ({"tokens": ["a", "b"], "types": [1]}, "1 entries for 2 tokens"),
        ({"tokens": ["a", "b"], "model": "llama"}, "scores is missing"),
        ({"tokens": ["a", "b"], "model": "llama", "scores": [0.0, math.nan]}, "has no score"),
        ({"tokens": ["a", "b" * 1000], "model": "llama", "scores": [0.0, 0.0]}, "longer than 512"),
    ],
)
def test_inconsistent_vocabulary(tmp_path: Path, vocabulary: dict[str, Any], message: str) -> None:
    def add(writer: Any) -> None:
        writer.add_tokenizer_model(vocabulary.get("model", "gpt2"))
        writer.add_token_list(vocabulary["tokens"])
        if "merges" in vocabulary:
            writer.add_token_merges(vocabulary["merges"])
        if "types" in vocabulary:
            writer.add_token_types(vocabulary["types"])
        if "scores" in vocabulary:
            writer.add_token_scores(vocabulary["scores"])

    with pytest.raises(CheckpointError, match=message):
        adapter.read(write_gguf(tmp_path / "m.gguf", extra=add))


# --- tokenizers --------------------------------------------------------------------------------------


def test_byte_level_tokenizer(tmp_path: Path, byte_level: Tokenizer) -> None:
    path = write_gguf(tmp_path / "m.gguf", extra=lambda writer: add_byte_level(writer, byte_level))
    model = adapter.read(path)
    tokenizer = load_tokenizer(model)
    for text in [*CORPUS[:3], "  two  spaces 12 \t\n", "<|im_start|>user\nhi<|im_end|>", "\U0001f600\u0301"]:
        encoded = tokenizer.encode(text)
        assert encoded.ids == byte_level.encode(text).ids
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_start|>a").ids[0] == 1
    assert json.loads(model.tokenizer_files["generation_config.json"]) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_transformers_loads_the_tokenizer(tmp_path: Path, byte_level: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    path = write_gguf(tmp_path / "m.gguf", extra=lambda writer: add_byte_level(writer, byte_level))
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_folder(adapter.read(path), tmp_path / "out"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer(CORPUS[1]).input_ids == byte_level.encode(CORPUS[1]).ids
    messages = [{"role": "user", "content": "Hi 12"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nHi 12<|im_end|>\n"


def test_begin_and_end_of_text(tmp_path: Path, byte_level: Tokenizer) -> None:
    def add(writer: Any) -> None:
        add_byte_level(writer, byte_level)
        writer.kv_data[0].pop("tokenizer.ggml.add_bos_token")
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)
        writer.add_eot_token_id(0)

    model = adapter.read(write_gguf(tmp_path / "m.gguf", extra=add))
    plain = byte_level.encode("fox").ids
    assert load_tokenizer(model).encode("fox").ids == [1, *plain, 2]
    assert load_tokenizer(model).encode("fox", add_special_tokens=False).ids == plain
    assert model.config["eos_token_id"] == [2, 0]
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_folder(model, tmp_path / "out"))
    assert tokenizer("fox").input_ids == [1, *plain, 2]


def test_missing_splitting_rule_is_reported(tmp_path: Path, byte_level: Tokenizer) -> None:
    path = write_gguf(tmp_path / "m.gguf", extra=lambda w: add_byte_level(w, byte_level, None))
    assert "tokenizer.ggml.pre is missing" in adapter.read(path).dropped[0]


@pytest.mark.parametrize("pre", sorted(_SPLITTINGS))
def test_every_splitting_rule_loses_nothing(tmp_path: Path, byte_level: Tokenizer, pre: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", extra=lambda w: add_byte_level(w, byte_level, pre))
    tokenizer = load_tokenizer(adapter.read(path))
    for text in [*CORPUS[:3], "  two  spaces 12345 \t\n\r\n x", "DON'T don't HTMLParser\u0300"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def pieces(tmp_path: Path, byte_level: Tokenizer, pre: str, text: str) -> list[str]:
    path = write_gguf(tmp_path / "m.gguf", extra=lambda w: add_byte_level(w, byte_level, pre))
    pre_tokenizer = load_tokenizer(adapter.read(path)).pre_tokenizer
    assert pre_tokenizer is not None
    return [text[start:end] for _piece, (start, end) in pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'", "S", "  ", " 12345", " HTMLParser", ".", "\n", "\n", "x"]),
        ("smollm", ["It", "'", "S", "   ", "1", "2", "3", "4", "5", " HTMLParser", ".", "\n", "\n", "x"]),
        ("llama-bpe", ["It", "'S", "  ", " ", "123", "45", " HTMLParser", ".\n\n", "x"]),
        ("qwen2", ["It", "'S", "  ", " ", "1", "2", "3", "4", "5", " HTMLParser", ".\n\n", "x"]),
        ("tekken", ["It", "'S", "  ", " ", "1", "2", "3", "4", "5", " HTMLParser", ".\n\n", "x"]),
        ("gpt-4o", ["It'S", "  ", " ", "123", "45", " HTMLParser", ".\n\n", "x"]),
        ("default", ["It", "'", "S", "  ", " ", "123", "45", " HTMLParser", ".", "\n", "\n", "x"]),
    ],
)
def test_splitting_rules(tmp_path: Path, byte_level: Tokenizer, pre: str, expected: list[str]) -> None:
    assert pieces(tmp_path, byte_level, pre, "It'S   12345 HTMLParser.\n\nx") == expected


def test_sentencepiece_tokenizer(tmp_path: Path, sentencepiece_model: Any) -> None:
    path = write_gguf(tmp_path / "m.gguf", extra=lambda w: add_sentencepiece(w, sentencepiece_model))
    model = adapter.read(path)
    tokenizer = load_tokenizer(model)
    texts = [*CORPUS[:3], "the the fox", " leading", "a  b   c", "tabs\tand\nlines \u00e9\U0001f600"]
    for text in texts:
        ids = sentencepiece_model.encode(text)
        assert tokenizer.encode(text).ids == [1, *ids]
        assert tokenizer.decode(ids) == sentencepiece_model.decode(ids) == text
    # As llama.cpp: special tokens are one id, and the text after one starts with a space again.
    assert tokenizer.encode("</s>fox", add_special_tokens=False).ids == [
        2,
        *sentencepiece_model.encode("fox"),
    ]
    assert sentencepiece_model.piece_to_id("<tool>") in tokenizer.encode("fox<tool>fox").ids
    assert json.loads(model.tokenizer_files["tokenizer_config.json"])["bos_token"] == "<s>"


def test_sentencepiece_without_prefix_space(tmp_path: Path, sentencepiece_model: Any) -> None:
    def add(writer: Any) -> None:
        add_sentencepiece(writer, sentencepiece_model)
        writer.add_add_space_prefix(False)

    tokenizer = load_tokenizer(adapter.read(write_gguf(tmp_path / "m.gguf", extra=add)))
    ids = tokenizer.encode(" fox", add_special_tokens=False).ids
    assert ids == sentencepiece_model.encode("fox") and tokenizer.decode(ids) == " fox"


# --- the real thing ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2(smollm2_gguf: Path) -> None:
    model = adapter.read(smollm2_gguf)
    assert model.config["num_hidden_layers"] == 30
    assert len(model.tensors) == 272
    assert all(torch.isfinite(tensor.read()).all() for tensor in model.tensors.values())
    tokenizer = load_tokenizer(model)
    assert tokenizer.encode("<|im_start|>user\nIn 1984").ids == [1, 4093, 198, 788, 216, 33, 41, 40, 36]
