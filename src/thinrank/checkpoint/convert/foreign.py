"""Opens whatever a user points at: a folder, a weight file, a pickled module, a GGUF file, a hub id.

What it finds is kept as it is (`ForeignCheckpoint`); which family it is, and what its names mean, is the
adapters' business. Nothing is decided by the path's own name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from ...errors import CheckpointError, UnsupportedModelError
from ..folder import read_json, read_shards, tokenizer_files, weight_files
from ..format import CONFIG_NAME, QUANT_METHOD
from ..pickle_reader import is_torch_checkpoint, read_pickle
from ..safetensors_reader import read_safetensors
from ..tensors import LazyTensor
from . import gguf
from .gguf_file import is_gguf
from .pickled_module import find_module, unpack_module

#: Dobi-SVD's 8-bit factors; pytorch_model.bin beside it has the dense rest.
REMAPPING_NAME = "remapping_weight.pt"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint as found. weights: the files with the parameters.

    config: config.json or its equivalent, None where there is none. tensors: the state dict. remapped:
    content of Dobi-SVD's `remapping_weight.pt`. family: set where the file type says it ("gguf",
    "dobi-svd"), else None. tokenizer_files: file name -> content. dropped: one line for each thing that
    reading the file left out.
    """

    path: Path
    weights: tuple[Path, ...]
    config: dict[str, Any] | None
    tensors: Mapping[str, LazyTensor]
    tokenizer_files: Mapping[str, bytes]
    remapped: Mapping[str, Any] | None = None
    family: str | None = None
    dropped: tuple[str, ...] = ()


def locate(source: str | Path) -> Path:
    """The local path of a source: itself, or the snapshot of a hub id ("org/name").

    A hub id is looked up in the local Hugging Face cache and downloaded if it is not there.

    Raises CheckpointError when neither a path nor a hub model is found.
    """
    path = Path(source)
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(str(source)):
        raise CheckpointError(f"{source} does not exist", "check the path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(source), local_files_only=True))
    except HFValidationError as error:
        raise CheckpointError(f"{source} does not exist, and is no hub id", "check the path") from error
    except LocalEntryNotFoundError:
        return _download(str(source))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.gguf", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{hub_id} is no local path, is not in the Hugging Face cache and cannot be downloaded"
            f" ({str(error).splitlines()[0]})",
            "check the name and the network, or download the model elsewhere and name its folder",
        ) from error


def open_foreign(path: Path) -> ForeignCheckpoint:
    """Open a file or folder without reading tensor data.

    Raises CheckpointError when nothing in it is a model, UnsupportedModelError when its config says that
    the weights are quantised by some other tool.
    """
    return _open_folder(path) if path.is_dir() else _open_file(path)


def _open_folder(folder: Path) -> ForeignCheckpoint:
    config = _read_config(folder)
    tokenizer = tokenizer_files(folder)
    files = weight_files(folder, "model", "safetensors") or weight_files(folder, "pytorch_model", "bin")
    if not files:
        return _open_lone_file(folder, config, tokenizer)
    tensors = read_shards(files, read_safetensors if files[0].suffix == ".safetensors" else _read_state_dict)
    remapping = folder / REMAPPING_NAME
    if not remapping.is_file():
        return ForeignCheckpoint(folder, tuple(files), config, tensors, tokenizer)
    remapped = read_pickle(remapping)
    if not isinstance(remapped, dict):
        raise CheckpointError(f"{remapping} holds no remapped weights", "copy the file again")
    return ForeignCheckpoint(folder, (*files, remapping), config, tensors, tokenizer, remapped, "dobi-svd")


def _open_lone_file(
    folder: Path, config: dict[str, Any] | None, tokenizer: Mapping[str, bytes]
) -> ForeignCheckpoint:
    """A folder whose weights are one pickled model or one GGUF file under a name of its own."""
    candidates = [path for path in sorted(folder.iterdir()) if path.is_file() and _may_hold_model(path)]
    if not candidates:
        raise CheckpointError(
            f"{folder} holds no model (no model.safetensors, pytorch_model.bin, pickled model or GGUF file)",
            "name the folder or file that holds the weights",
        )
    if len(candidates) > 1:
        names = ", ".join(path.name for path in candidates)
        raise CheckpointError(f"{folder} holds several models ({names})", "name one of the files")
    only = _open_file(candidates[0])
    return replace(only, config=config or only.config, tokenizer_files=tokenizer or only.tokenizer_files)


def _may_hold_model(path: Path) -> bool:
    """GGUF, a pickled module or a state dict; not, say, SVD-LLM's profiling matrices."""
    if is_gguf(path):
        return True
    if not is_torch_checkpoint(path):
        return False
    root = read_pickle(path)
    return find_module(root) is not None or _is_state_dict(root)


def _open_file(path: Path) -> ForeignCheckpoint:
    if not path.is_file():
        raise CheckpointError(f"{path} is no file or folder", "name a file or folder with weights")
    if is_gguf(path):
        return _open_gguf(path)
    if path.name == REMAPPING_NAME:
        return _open_folder(path.parent)
    if is_torch_checkpoint(path):
        root = read_pickle(path)
        module = find_module(root)
        if module is not None:
            config, tensors, tokenizer = unpack_module(module, root)
            return ForeignCheckpoint(path, (path,), config, tensors, tokenizer)
        if _is_state_dict(root):
            return _beside_config(path, _state_dict(root))
        raise CheckpointError(f"{path} holds no model", "name the file that holds the weights")
    if path.suffix == ".safetensors":
        return _beside_config(path, read_safetensors(path))
    raise CheckpointError(
        f"{path} is neither safetensors, a PyTorch checkpoint nor GGUF", "name a file or folder with weights"
    )


def _open_gguf(path: Path) -> ForeignCheckpoint:
    model = gguf.read(path)
    config = model.config | ({"_name_or_path": model.base_model} if model.base_model else {})
    return ForeignCheckpoint(
        path, (path,), config, model.tensors, model.tokenizer_files, None, "gguf", tuple(model.dropped)
    )


def _beside_config(path: Path, tensors: dict[str, LazyTensor]) -> ForeignCheckpoint:
    """A weight file named directly: config and tokenizer are taken from the folder it lies in."""
    return ForeignCheckpoint(path, (path,), _read_config(path.parent), tensors, tokenizer_files(path.parent))


def _is_state_dict(root: object) -> TypeGuard[dict[object, object]]:
    return isinstance(root, dict) and any(isinstance(value, LazyTensor) for value in root.values())


def _read_state_dict(path: Path) -> dict[str, LazyTensor]:
    root = read_pickle(path)
    if not isinstance(root, dict):
        raise CheckpointError(f"{path} holds no state dict", "name the file or folder that holds the weights")
    return _state_dict(root)


def _state_dict(root: dict[object, object]) -> dict[str, LazyTensor]:
    return {str(name): tensor for name, tensor in root.items() if isinstance(tensor, LazyTensor)}


def _read_config(folder: Path) -> dict[str, Any] | None:
    path = folder / CONFIG_NAME
    if not path.is_file():
        return None
    config = read_json(path)
    _refuse_quantised(folder, config)
    return config


def _refuse_quantised(path: Path, config: Mapping[str, Any]) -> None:
    section = config.get("quantization_config")
    if section is None:
        return
    method = section.get("quant_method") if isinstance(section, Mapping) else section
    if method == QUANT_METHOD:
        raise CheckpointError(f"{path} is a thinrank checkpoint already", "use it as it is")
    raise UnsupportedModelError(
        f"{path} is quantised with {method!r}", "convert the 16-bit model that it was made from"
    )
