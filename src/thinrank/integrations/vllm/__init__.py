"""Low-rank checkpoints in vLLM: a plugin that vLLM finds by its entry point, once thinrank is installed beside it.

vLLM chooses a loader by `quant_method` in the config. Nothing is quantised here: the layers that vLLM builds keep what
they are, and multiply by two factors instead of one matrix. vLLM is not a dependency: it is imported in `register`.
"""


def register() -> None:
    """Make `quant_method: "thinrank"` known. vLLM calls this in every one of its processes."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from ...checkpoint.format import QUANT_METHOD
    from .config import ThinrankConfig

    if QUANT_METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(QUANT_METHOD)(ThinrankConfig)
