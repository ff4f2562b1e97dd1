"""The engine model of ``../engine.py`` at the speed of a what-if: the same times, without a step for each token.

Theory of operation. Output is reserved at admission, so nothing is ever preempted, and only two things change what
a step is: a prefill that ends, and a generation that ends. Between them all steps are equal and are taken in one go:
full chunks of one long prompt, which leave no budget to admit anybody, or decoding alone. Only the latter can be cut
short, when a request arrives: it joins at the next step. At most one prompt is prefilled in part at any time, for
prefill is first come, first served. Decoding costs nothing per token: ``_ticks`` counts decode steps, and a heap says
at which tick a generation ends. A request that found too few free blocks is tried again only when some are given
back. ``tests/routing/replay/test_fast_engine.py`` holds it against the model of single steps.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Protocol

from routing.replay.block_runs import Run, RunPool, Segment


@dataclass(frozen=True)
class FastEngineConfig:
    """One replica. Defaults are those of the reference results.

    Of ``EngineConfig`` what a what-if may vary; a class of its own, because this module may be native code.
    """

    blocks: int  # usable KV blocks
    block_tokens: int = 512
    prefill_rate: float = 8000.0  # tokens/s
    step_s: float = 0.010  # of any step
    decode_s: float = 0.0002  # more for each decoding sequence
    chunk_tokens: int = 2048  # prefill tokens a step may carry
    max_running: int = 256  # sequences


class ModelledRequest:
    """One request on its way through an engine."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "first_token_s",
        "held",
        "index",
        "note",
        "output_tokens",
        "path",
        "prompt_tokens",
        "recompute",
    )

    def __init__(self, index: int, arrived_s: float, prompt_tokens: int, output_tokens: int) -> None:
        self.index = index  # in the trace
        self.arrived_s = arrived_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.path: tuple[Run, ...] = ()  # runs that its prompt has in common with others
        self.recompute = False  # the last of them is not looked up: it is the end of a prompt of whole blocks
        self.cached_tokens = 0  # known from admission on
        self.first_token_s = 0.0
        self.held: list[Segment] = []
        self.note: Any = None  # what the one who placed it remembers


class Watcher(Protocol):
    """Who is told what happens to requests, in the order of time over all engines."""

    def first_token(self, request: ModelledRequest, now_s: float) -> None:
        """The first token of a request is out."""
        ...

    def ended(self, request: ModelledRequest, now_s: float) -> None:
        """A request has all its tokens."""
        ...


class FastEngine:
    """One replica. ``end_s`` is when its present steps end; infinite while it is idle."""

    __slots__ = (
        "_blocked",
        "_ends",
        "_left",
        "_partial",
        "_prefilled",
        "_serial",
        "_step_s",
        "_steps",
        "_ticks",
        "_watcher",
        "config",
        "decoding",
        "end_s",
        "pool",
        "running",
        "start_s",
        "waiting",
    )

    def __init__(self, config: FastEngineConfig, watcher: Watcher) -> None:
        self.config = config
        self.pool = RunPool(config.blocks)
        self.waiting: deque[ModelledRequest] = deque()
        self.running = 0  # admitted and not ended
        self.decoding = 0
        self.start_s = 0.0
        self.end_s = math.inf
        self._watcher = watcher
        self._step_s = 0.0  # length of each of the present steps
        self._steps = 0  # how many
        self._prefilled: list[ModelledRequest] = []  # whose prefill ends with them
        self._partial: ModelledRequest | None = None  # prefilled in part
        self._left = 0  # tokens of it beyond the present steps
        self._ticks = 0
        self._ends: list[tuple[int, int, ModelledRequest]] = []  # heap of (tick, serial, request)
        self._serial = 0
        self._blocked = False  # the first one waiting found too few free blocks

    def submit(self, request: ModelledRequest, now_s: float) -> bool:
        """Queue a request that fits into an empty cache; True if ``end_s`` is another now."""
        self.waiting.append(request)
        if self.end_s == math.inf:
            self._begin(now_s)
            return True
        if self._steps == 1 or not self._is_cut_short():
            return False
        steps = self._step_at(now_s)
        if steps >= self._steps:
            return False
        self._steps = steps
        self.end_s = self.start_s + self._step_s * steps
        return True

    @property
    def left_tokens(self) -> int:
        """Tokens to prefill, beyond the present steps, of the prompt that is prefilled in part."""
        return self._left if self._partial is not None else 0

    def next_step_s(self, now_s: float) -> float:
        """When the next step begins that a request arriving now could be part of."""
        if self.end_s == math.inf:
            return now_s
        if self._is_cut_short():
            return self.start_s + self._step_s * self._step_at(now_s)
        return self.end_s

    def go_on(self) -> None:
        """Take the results of the steps that end now, and plan the next ones."""
        now_s = self.end_s
        if self.decoding:
            self._ticks += self._steps
            ends = self._ends
            while ends and ends[0][0] <= self._ticks:
                self._end(heappop(ends)[2], now_s)
                self.decoding -= 1
        if self._prefilled:
            for request in self._prefilled:
                self._first_token(request, now_s)
            self._prefilled.clear()
        self._begin(now_s)

    # --- planning --------------------------------------------------------------------------------------

    def _begin(self, now_s: float) -> None:
        """Plan the next steps, or idle."""
        config, steps, tokens = self.config, 1, 0
        if self._partial is not None and self._left > config.chunk_tokens:
            steps, tokens = self._full_chunks(), config.chunk_tokens
        else:
            if self._partial is not None:
                tokens = self._left
                self._prefilled.append(self._partial)
                self._partial = None
            if self.waiting and not self._blocked:
                tokens = self._admit(tokens)
            if not tokens:
                if not self.decoding:
                    self.end_s = math.inf
                    return
                steps = self._ends[0][0] - self._ticks
        self._steps = steps
        self._step_s = step_s = config.step_s + config.decode_s * self.decoding + tokens / config.prefill_rate
        self.start_s = now_s
        self.end_s = now_s + step_s * steps

    def _is_cut_short(self) -> bool:
        """Whether the present steps end earlier when a request arrives: while all that runs is decoding."""
        return not (self._prefilled or self._partial or self._blocked)

    def _step_at(self, now_s: float) -> int:
        """Which of the present steps is in progress, counted from 1."""
        return int((now_s - self.start_s) / self._step_s) + 1

    def _full_chunks(self) -> int:
        """How many equal steps the prompt that is prefilled in part fills."""
        chunk = self.config.chunk_tokens
        steps = (self._left - 1) // chunk
        if self.decoding:
            steps = min(steps, self._ends[0][0] - self._ticks)
        self._left -= steps * chunk
        return steps

    def _admit(self, tokens: int) -> int:
        """Admit waiting requests in order, as far as budget, slots and blocks go; the step's prefill tokens."""
        config, waiting = self.config, self.waiting
        chunk, block_tokens = config.chunk_tokens, config.block_tokens
        while waiting and tokens < chunk:
            request = waiting[0]
            total = request.prompt_tokens + request.output_tokens
            admitted = (
                self.pool.admit(request.path, -(-total // block_tokens), recompute=request.recompute)
                if self.running < config.max_running
                else None
            )
            if admitted is None:
                self._blocked = True
                return tokens
            waiting.popleft()
            self.running += 1
            hits, request.held = admitted
            request.cached_tokens = hits * block_tokens
            tokens += request.prompt_tokens - request.cached_tokens
            if tokens <= chunk:
                self._prefilled.append(request)
            else:
                self._partial = request
                self._left = tokens - chunk
                tokens = chunk
        return tokens

    # --- results ---------------------------------------------------------------------------------------

    def _first_token(self, request: ModelledRequest, now_s: float) -> None:
        request.first_token_s = now_s
        self._watcher.first_token(request, now_s)
        if request.output_tokens == 1:
            self._end(request, now_s)
            return
        self.decoding += 1
        self._serial += 1
        heappush(self._ends, (self._ticks + request.output_tokens - 1, self._serial, request))

    def _end(self, request: ModelledRequest, now_s: float) -> None:
        self.running -= 1
        self._blocked = False
        self.pool.release(request.held)
        self._watcher.ended(request, now_s)
