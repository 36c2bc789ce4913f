"""Steps an engine and notes how long its decode steps take."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from ..engine.engine import Engine
from ..engine.sequence import TokenOutput


class DecodeTime(NamedTuple):
    """Steps that processed no prompt, and the seconds that they took together."""

    steps: int
    seconds: float


class Pace:
    """Belongs to the thread that steps the engine; any other may read `decode`.

    A step counts from the end of the one before it, as a stream has it, so that what the host does in between is part
    of it; a step after idleness, which has none before it, does not count.
    """

    def __init__(self, engine: Engine):
        self.decode = DecodeTime(0, 0.0)  # replaced, never changed, so that a reader gets both of one moment
        self._engine = engine
        self._ended: float | None = None

    def step(self) -> list[TokenOutput]:
        """`Engine.step`."""
        scheduler = self._engine.scheduler
        only_decodes = not scheduler.waiting and all(
            sequence.num_pending == 1 for sequence in scheduler.running
        )
        started, self._ended = self._ended, None
        tokens = self._engine.step()
        ended = perf_counter()
        if only_decodes and started is not None:
            steps, seconds = self.decode
            self.decode = DecodeTime(steps + 1, seconds + ended - started)
        if self._engine.has_unfinished:
            self._ended = ended
        return tokens
