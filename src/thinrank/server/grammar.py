"""Keeps output in a form, through xgrammar (an extra).

`Grammars` compiles what requests ask for; the engine asks a `Constraint` which tokens may come next.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..text import Tokenizer
from .errors import ApiError, bad_request
from .forms import GrammarSource

if TYPE_CHECKING:
    import xgrammar

#: Seconds that a grammar may take to compile, and how many are compiled at a time.
COMPILE_TIMEOUT = 20.0
_MAX_COMPILING = 2
_CACHE_BYTES = 2**27
#: Between two elements of JSON: where any amount is allowed, small models write newlines until max_tokens.
_MAX_WHITESPACE = 2
#: In the strings of JSON there are none; xgrammar lets all but line ends pass.
_CONTROL_CHARACTER = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")


@dataclass(frozen=True)
class Grammar:
    """A compiled form. preferred: int32 [ceil(vocab_size / 32)], as bits the only tokens to use where that leaves any;
    None: all. eos_token_ids: the model's."""

    compiled: xgrammar.CompiledGrammar
    preferred: Tensor | None
    eos_token_ids: tuple[int, ...]


class Constraint:
    """One continuation's way through a grammar; the engine's `TokenConstraint`.

    A grammar may lead to where no token fits, such as one that never ends. The output then ends there.
    """

    def __init__(self, grammar: Grammar):
        import xgrammar

        self._grammar = grammar
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._is_stuck = False

    @property
    def finished(self) -> bool:
        return self._is_stuck or bool(self._matcher.is_terminated())

    def fill_mask(self, mask: Tensor) -> None:
        if not self._matcher.fill_next_token_bitmask(mask.unsqueeze(0)):
            mask.fill_(-1)  # everything is allowed
        if self._grammar.preferred is not None:
            preferred = mask & self._grammar.preferred
            if preferred.any():
                mask.copy_(preferred)
        if not mask.any():
            self._is_stuck = True
            mask |= _bits(self._grammar.eos_token_ids, len(mask))

    def accept(self, token_id: int) -> None:
        accepted = self._is_stuck or self._matcher.accept_token(token_id)
        assert accepted, f"token {token_id} was masked"


class Grammars:
    """Compiles grammars for one model; equal ones once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted(each for each in eos_token_ids if each < vocab_size))
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._json_tokens: Tensor | None = None
        self._compiling = asyncio.Semaphore(_MAX_COMPILING)

    async def compile(self, source: GrammarSource) -> Grammar:
        """Raises ApiError for what is no valid grammar, when others take too long, and when xgrammar is missing."""
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT):
                await self._compiling.acquire()
        except TimeoutError:
            raise ApiError(
                429,
                f"{_MAX_COMPILING} other forms have been compiling for {COMPILE_TIMEOUT:.0f} s: try again later",
                param=source.param,
                code="too_many_requests",
                headers={"retry-after": f"{COMPILE_TIMEOUT:.0f}"},
            ) from None
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT):
                return await self._compile_in_thread(source)
        except TimeoutError:
            raise bad_request(
                f"{source.param} takes longer than {COMPILE_TIMEOUT:.0f} s to compile", source.param
            ) from None
        except (RuntimeError, UnicodeError) as error:
            # "[time] file:line: message", perhaps with more lines; the message may be cut amid a character
            message = re.sub(r"^\[[^\]]*\] \S+: ", "", str(error)).strip().partition("\n")[0]
            raise bad_request(f"{source.param} cannot be used: {message}", source.param) from error

    async def _compile_in_thread(self, source: GrammarSource) -> Grammar:
        """A thread of its own, which nobody waits for: nothing stops a compilation that has begun. Releases
        `_compiling` when it ends."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Grammar] = loop.create_future()

        def finish(outcome: Grammar | Exception) -> None:
            self._compiling.release()
            if future.done():  # too late
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        def run() -> None:
            outcome: Grammar | Exception
            try:
                outcome = self._compile(source)
            except Exception as error:  # noqa: BLE001 (the request that waits raises it)
                outcome = error
            with suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
                loop.call_soon_threadsafe(finish, outcome)

        threading.Thread(target=run, name="grammar", daemon=True).start()
        return await future

    def _compile(self, source: GrammarSource) -> Grammar:
        compiler = self._compiler or self._make_compiler(source.param)
        preferred = None
        if source.kind == "regex":
            compiled = compiler.compile_regex(source.text)
        elif source.kind == "ebnf":
            compiled = compiler.compile_grammar(source.text)
        else:
            preferred = self._json_tokens
            compiled = compiler.compile_json_schema(
                source.text,
                strict_mode=source.kind == "schema",  # no properties but the schema's
                max_whitespace_cnt=_MAX_WHITESPACE,
            )
        grammar = Grammar(compiled, preferred, self._eos_token_ids)
        start = Constraint(grammar)
        start.fill_mask(torch.zeros(-(-self._vocab_size // 32), dtype=torch.int32))
        if start.finished:
            raise bad_request(f"{source.param} allows no output at all", source.param)
        return grammar

    def _make_compiler(self, param: str) -> xgrammar.GrammarCompiler:
        try:
            import xgrammar
        except ImportError as error:
            raise bad_request(
                f"{param} needs the package xgrammar, which this server lacks: pip install 'thinrank[grammar]'",
                param,
            ) from error
        if not self._eos_token_ids:
            raise bad_request(f"{param} needs an end-of-text token, and this model has none", param)
        info = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer.huggingface, vocab_size=self._vocab_size, stop_token_ids=list(self._eos_token_ids)
        )
        harmless = (
            number
            for number, token in enumerate(info.decoded_vocab)
            if _CONTROL_CHARACTER.search(token) is None
        )
        self._json_tokens = _bits(harmless, -(-self._vocab_size // 32))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
        return self._compiler


def _bits(numbers: Iterable[int], size: int) -> Tensor:
    """int32 [size]; bit i of element j says whether 32 * j + i is among the numbers."""
    flags = torch.zeros(size * 32, dtype=torch.int64)
    flags[torch.tensor(list(numbers), dtype=torch.int64)] = 1
    return (flags.view(size, 32) << torch.arange(32)).sum(1).to(torch.int32)
