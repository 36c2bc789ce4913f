"""What one of N processes keeps, reads and sends when vLLM runs a model tensor parallel.

Matrices are divided as in Megatron-LM (Shoeybi et al., arXiv 1909.08053): q, k, v, gate and up by their outputs, o and
down by their inputs, embedding and `lm_head` by the vocabulary. Of two factors, one of each module can be divided that
way without any further exchange; that is what thinrank's vLLM plugin does. `Layout` says what could be divided beyond.

Computed from the config alone. tests/vllm_plugin compares it with the parameters and exchanges of a running vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod

from ..config import LinearShape, ModelConfig
from ..errors import OptionError
from .cost import Quantization

#: Ranks in memory are multiples of this, filled up with zeros: matrices of 16-bit numbers need rows of a multiple of 16
#: bytes to reach a GPU's matrix units.
RANK_MULTIPLE = 8
#: vLLM's DEFAULT_VOCAB_PADDING_SIZE.
VOCAB_MULTIPLE = 64

#: Projections that vLLM fuses into one layer.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
#: Projections whose inputs are divided.
_ROW_PARALLEL = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Layout:
    """How the factors are divided beyond what the other layers' division gives.

    divided_latents: of q, k, v, gate, up (and `lm_head`), factor_in is divided by rank as well, and processes gather
    the latents. divided_outputs: of o and down, factor_out is divided by outputs as well, and processes gather those.
    """

    divided_latents: bool = False
    divided_outputs: bool = False


#: factor_in of q, k, v, gate, up and factor_out of o, down are whole in every process. thinrank's plugin.
WHOLE = Layout()


@dataclass(frozen=True)
class Share:
    """One process's part.

    weight_bytes: of all its parameters. step_bytes: of the parameters that a decode step reads, which are all but the
    embedding table unless that is the `lm_head` too; a factor that layers share is read by each. sent_bytes: what the
    process sends for each token where exchanges go around a ring, the least that any algorithm needs: 2 (N - 1) / N of
    what is added up, (N - 1) / N of what is gathered. exchanges: operations of a step in which processes wait for each
    other.
    """

    weight_bytes: int
    step_bytes: int
    sent_bytes: float
    exchanges: int


def share(
    config: ModelConfig,
    size: int,
    itemsize: int,
    layout: Layout = WHOLE,
    quantization: Quantization | None = None,
) -> Share:
    """The part of one of `size` processes, at `itemsize` bytes a number, exchanged ones included.

    quantization: of the projections of a dense model, `lm_head` included, as in `cost.quantized_weight_bytes`.
    Raises OptionError for a size that vLLM cannot divide the model by.
    """
    require_divisible(config, size)

    def matrix_bytes(matrix: tuple[int, int]) -> int:
        return prod(matrix) * itemsize if quantization is None else quantization.matrix_bytes(*matrix)

    vocab = _vocab_rows(config, size)
    embedding = vocab * config.hidden_size * itemsize
    norms = sum(prod(shape) for name, shape in config.other_tensors().items() if "embed_tokens" not in name)
    read = norms * itemsize
    kept = read + embedding
    if config.tie_word_embeddings:
        head = embedding if quantization is None else matrix_bytes((vocab, config.hidden_size))
        read += head
        kept += 0 if quantization is None else head  # beside the table, of which rows are looked up
    in_memory: set[tuple[tuple[str, str], ...]] = set()
    for modules in _layers(config):
        factors_in = 0
        for module in modules:
            factor_in, matrix = _matrices(config, module, size, layout)
            bias = _bias(config, module, size) * itemsize
            read += matrix_bytes(matrix) + bias
            kept += matrix_bytes(matrix) + bias
            if factor_in is not None:
                factors_in += prod(factor_in) * itemsize
                kept += bias  # once as it was loaded, once in the layer that adds it
        read += factors_in
        if (key := _factor_ins(config, modules)) not in in_memory:
            in_memory.add(key)
            kept += factors_in
    added, gathered = _exchanged(config, size, layout)
    ring = (size - 1) / size
    return Share(
        weight_bytes=kept,
        step_bytes=read,
        sent_bytes=ring * (2 * sum(added) + sum(gathered)) * itemsize,
        exchanges=len(added) + len(gathered),
    )


def local_kv_heads(config: ModelConfig, size: int) -> int:
    """Key-value heads of a process. Where there are more processes than heads, several have the same one."""
    return max(1, config.num_key_value_heads // size)


def require_divisible(config: ModelConfig, size: int) -> None:
    """Raises OptionError, listing the sizes that vLLM accepts, for any other."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0
        and (kv_heads % n == 0 or n % kv_heads == 0)
        and config.intermediate_size % n == 0
        and padded(config.vocab_size, VOCAB_MULTIPLE) % n == 0
    ]
    if size not in sizes:
        raise OptionError(
            f"tensor_parallel_size is {size}",
            f"heads and widths of this model can be divided by {', '.join(map(str, sizes))}",
        )


def _layers(config: ModelConfig) -> Iterator[list[str]]:
    """The projections of each of vLLM's layers, in the order of execution."""

    def layer(module: str) -> str:
        parent, _, name = module.rpartition(".")
        return f"{parent}.{_FUSED.get(name, name)}"

    for _, modules in groupby(config.linears(), layer):
        yield list(modules)


def _matrices(
    config: ModelConfig, module: str, size: int, layout: Layout
) -> tuple[tuple[int, int] | None, tuple[int, int]]:
    """What a process multiplies by: factor_in, None where the module is dense; and factor_out or the dense weight."""
    shape, rank = config.linears()[module], config.ranks.get(module)
    if _row_parallel(module):
        columns = shape.in_features // size
        if rank is None:
            return None, (shape.out_features, columns)
        rows = -(-shape.out_features // size) if layout.divided_outputs else shape.out_features
        return (_latent(rank, 1), columns), (rows, _latent(rank, 1))
    rows = _column_parallel_rows(config, module, shape, size)
    if rank is None:
        return None, (rows, shape.in_features)
    parts = size if layout.divided_latents else 1
    return (_latent(rank, parts) // parts, shape.in_features), (rows, _latent(rank, parts))


def _bias(config: ModelConfig, module: str, size: int) -> int:
    """Numbers of a bias in a process: those of its outputs."""
    shape = config.linears()[module]
    if not shape.bias:
        return 0
    if _row_parallel(module):
        return shape.out_features
    return _column_parallel_rows(config, module, shape, size)


def _column_parallel_rows(config: ModelConfig, module: str, shape: LinearShape, size: int) -> int:
    if module == "lm_head":
        return _vocab_rows(config, size)
    if module.endswith((".k_proj", ".v_proj")):
        return local_kv_heads(config, size) * config.head_dim
    return shape.out_features // size


def _exchanged(config: ModelConfig, size: int, layout: Layout) -> tuple[list[int], list[int]]:
    """Numbers of a token in each exchange of a step: those that are added up, those that are gathered."""
    if size == 1:
        return [], []
    added, gathered = [config.hidden_size], [_vocab_rows(config, size) * size]  # embedding; logits
    for modules in _layers(config):
        ranks = [config.ranks[module] for module in modules if module in config.ranks]
        if _row_parallel(modules[0]):
            outputs = config.linears()[modules[0]].out_features
            added.append(_latent(ranks[0], 1) if ranks else outputs)
            if ranks and layout.divided_outputs:
                gathered.append(outputs)
        elif ranks and layout.divided_latents:
            gathered.append(sum(_latent(rank, size) for rank in ranks))
    return added, gathered


def _factor_ins(config: ModelConfig, modules: list[str]) -> tuple[tuple[str, str], ...]:
    """Which factor_in each projection of a layer has. Layers in which all are equal have them in memory once."""
    names = [(module, f"{module}.factor_in.weight") for module in modules if module in config.ranks]
    return tuple((module.rpartition(".")[2], config.tied_factors.get(name, name)) for module, name in names)


def _row_parallel(module: str) -> bool:
    return module.endswith(_ROW_PARALLEL)


def _latent(rank: int, parts: int) -> int:
    """Width of a latent whose `parts` equal parts are each padded."""
    return padded(-(-rank // parts), RANK_MULTIPLE) * parts


def _vocab_rows(config: ModelConfig, size: int) -> int:
    return padded(config.vocab_size, VOCAB_MULTIPLE) // size


def padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
