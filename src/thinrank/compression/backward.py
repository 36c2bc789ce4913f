"""The gradient of the model's loss with one decoder layer in memory: forward to the end, then back.

The residual streams before all layers lie on disk. Each layer leaves a file when the pass has gone back
through it, and a killed pass goes on there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from ..checkpoint.load import OpenCheckpoint
from ..model.layers import DecoderLayer
from .quality import check_predictions, head_of
from .statistics import batch_of, batches, embed, weights_of
from .store import HiddenStates, write_tensors

#: Tokens that go backward through a layer together: autograd keeps about 40 activations of each.
BATCH_TOKENS = 2048


def gradient_path(folder: Path, index: int) -> Path:
    """Where `backpropagate` leaves what a layer has collected."""
    return folder / f"gradients-{index:05d}.safetensors"


def is_complete(folder: Path, layers: int) -> bool:
    return all(gradient_path(folder, index).is_file() for index in range(layers))


def backpropagate(
    checkpoint: OpenCheckpoint,
    sequences: Tensor,
    folder: Path,
    device: torch.device,
    build: Callable[[int], DecoderLayer],
    collect: Callable[[DecoderLayer], Mapping[str, Tensor]],
    bar: tqdm[Any],
) -> None:
    """Run what is missing of a pass over `sequences`, int64 [samples, length], and write its files to `folder`, in
    which no other process works.

    build: makes layer i, once on the way forward and once on the way back. Projections of it may hook what they
    compute, and tensors in it may require gradients: both see the gradient of the next-token loss, summed over
    all tokens. collect: what to keep of a layer after that. bar: moves by one a layer, twice.

    Raises OptionError for sequences of a single token, which predict nothing.
    """
    check_predictions(sequences)
    config, layers = checkpoint.config, checkpoint.config.num_hidden_layers
    if is_complete(folder, layers):
        bar.update(2 * layers)
        return
    shape = (sequences.numel(), config.hidden_size)
    forward = HiddenStates(folder, "forward", shape, keep=True)
    # Stage s of the backward stream is the gradient by the input of layer `layers - s`.
    backward = HiddenStates(folder, "backward", shape)
    if forward.stage is None:
        embed(checkpoint, sequences, forward)
    bar.update((forward.stage or 0) + (backward.stage or 0))
    for index in range(forward.stage or 0, layers):
        layer = build(index)
        source, target = forward.read(index), forward.new()
        for start, ids in batches(sequences):
            rows = slice(start, start + ids.numel())
            target[rows] = layer(source[rows].to(device), batch_of(ids, device)).to(target.device)
        forward.commit(index + 1)
        bar.update()
    if backward.stage is None:
        loss = _start(checkpoint, sequences, forward.read(layers), backward, device)
        bar.set_postfix(loss=f"{loss:.3f}")
    for stage in range(backward.stage or 0, layers):
        index = layers - 1 - stage
        layer = build(index)
        _go_back(layer, forward.read(index), backward, stage, sequences, device)
        write_tensors(gradient_path(folder, index), collect(layer))
        backward.commit(stage + 1)
        bar.update()
    forward.remove()
    backward.remove()


def _start(
    checkpoint: OpenCheckpoint, sequences: Tensor, last: Tensor, backward: HiddenStates, device: torch.device
) -> float:
    """Write the gradient of the summed loss by the stream after the last layer; the loss in nats a token."""
    head = head_of(checkpoint.config, weights_of(checkpoint, device))
    target, total = backward.new(), 0.0
    for start, ids in batches(sequences, 1):
        rows = slice(start, start + ids.numel())
        with torch.enable_grad():
            hidden = last[rows].to(device).requires_grad_()
            loss = cross_entropy(head.head(hidden[:-1]), ids.flatten()[1:].to(device), reduction="sum")
        target[rows] = torch.autograd.grad(loss, hidden)[0].to(target.device)
        total += loss.item()
    backward.commit(0)
    return total / (sequences.numel() - len(sequences))


def _go_back(
    layer: DecoderLayer,
    inputs: Tensor,
    backward: HiddenStates,
    stage: int,
    sequences: Tensor,
    device: torch.device,
) -> None:
    """Write the gradient by the layer's inputs into the next stage, which is not committed yet."""
    source, target = backward.read(stage), backward.new()
    for start, ids in batches(sequences, BATCH_TOKENS):
        rows = slice(start, start + ids.numel())
        with torch.enable_grad():
            hidden = inputs[rows].to(device).clone().requires_grad_()
            output = layer(hidden, batch_of(ids, device))
        output.backward(source[rows].to(device))
        assert hidden.grad is not None
        target[rows] = hidden.grad.to(target.device)
