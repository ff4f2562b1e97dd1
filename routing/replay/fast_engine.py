"""Fast version of the engine model in ``routing/simulation``: the same times, without simulating each decode step.

Theory of operation. Output blocks are reserved at admission, so there are no preemptions, and a step changes only when
a prefill or a generation ends. All steps between two such events are equal and are processed as one: full chunks of one
long prompt, which leave no budget to admit other requests, or decoding alone. Only decoding steps are shortened, when a
request arrives and joins at the next step. At most one prompt is partly prefilled at a time, because prefill is first
come, first served. Decoding costs nothing per token: ``_ticks`` counts decode steps, and a heap holds the tick at which
each generation ends. A request for which too few blocks were free is retried only after blocks are released.
``tests/routing/replay/test_fast_engine.py`` compares this model with the model of single steps.

Theory of operation, cache tiers (``tiers.py``). An admitted request whose blocks are fetched, or
shared with a request that fetches them, waits in the heap ``_fetching`` and holds its blocks. When the fetch ends it is
prefilled before requests that are still waiting. Decode steps end there, and an idle engine has ``end_s`` there.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Protocol

from routing.replay.block_runs import Evicted, Run, RunPool, Segment
from routing.replay.tiers import KV_BYTES_PER_TOKEN, LowerTiers, TierConfig


@dataclass(frozen=True)
class FastEngineConfig:
    """Parameters of one replica; the defaults are those of the reference results.

    Separate from ``EngineConfig`` because this module may be compiled.
    """

    blocks: int  # usable KV blocks
    block_tokens: int = 512
    prefill_rate: float = 8000.0  # tokens/s
    step_s: float = 0.010  # of any step
    decode_s: float = 0.0002  # additional for each decoding sequence
    chunk_tokens: int = 2048  # prefill tokens per step, at most
    max_running: int = 256  # sequences
    tiers: tuple[TierConfig, ...] = ()  # below the GPU cache
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN


class ModelledRequest:
    """One request in an engine."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "fetched_blocks",
        "first_token_s",
        "index",
        "output_tokens",
        "path",
        "placer_data",
        "prompt_runs",
        "prompt_tokens",
        "recompute",
        "segments",
    )

    def __init__(self, index: int, arrived_s: float, prompt_tokens: int, output_tokens: int) -> None:
        self.index = index  # in the trace
        self.arrived_s = arrived_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.path: tuple[Run, ...] = ()  # runs of its prompt and output that other prompts share
        self.prompt_runs = 0  # of these, those of its prompt
        self.recompute = False  # the last run is computed even if cached: the prompt ends at a block boundary
        self.cached_tokens = 0  # known from admission on; fetched tokens included
        self.fetched_blocks: dict[str, int] | None = None  # by cache tier; None without tiers
        self.first_token_s = 0.0
        self.segments: list[Segment] = []
        self.placer_data: Any = None  # stored by the placer for this request


class EngineListener(Protocol):
    """Receives events of requests, in order of time over all engines."""

    def on_first_token(self, request: ModelledRequest, now_s: float) -> None:
        """A request's first token was generated."""
        ...

    def on_ended(self, request: ModelledRequest, now_s: float) -> None:
        """A request has all its output tokens."""
        ...


class FastEngine:
    """One replica. ``end_s`` is the end of its current steps; while idle that of its next fetch, or infinite.

    ``ids``: the ids of the trace, which name blocks in ``tiers``.
    """

    __slots__ = (
        "_blocked",
        "_ends",
        "_fetched",
        "_fetching",
        "_ids",
        "_listener",
        "_partial",
        "_partial_tokens_left",
        "_prefilled",
        "_serial",
        "_step_s",
        "_steps",
        "_ticks",
        "_tiers",
        "config",
        "decoding",
        "end_s",
        "pool",
        "running",
        "start_s",
        "waiting",
    )

    def __init__(
        self,
        config: FastEngineConfig,
        listener: EngineListener,
        tiers: LowerTiers | None = None,
        ids: array[int] | None = None,
    ) -> None:
        self.config = config
        self.pool = RunPool(config.blocks)
        self._tiers = tiers
        self._ids = array("Q") if ids is None else ids
        if tiers is not None:
            self.pool.evicted_parts = []
        self.waiting: deque[ModelledRequest] = deque()
        self.running = 0  # admitted requests
        self.decoding = 0
        self.start_s = 0.0
        self.end_s = math.inf
        self._listener = listener
        self._step_s = 0.0  # duration of each current step
        self._steps = 0  # number of current steps; 0 while idle
        self._prefilled: list[ModelledRequest] = []  # requests whose prefill ends with the current steps
        self._partial: ModelledRequest | None = None  # request that is partly prefilled
        self._partial_tokens_left = 0  # tokens of ``_partial`` that remain after the current steps
        self._ticks = 0
        self._ends: list[tuple[int, int, ModelledRequest]] = []  # heap of (tick, serial, request)
        self._serial = 0
        self._fetching: list[tuple[float, int, ModelledRequest]] = []  # heap of (end of the fetch, serial, request)
        self._fetched: deque[ModelledRequest] = deque()  # requests whose fetch has ended, before their prefill
        self._blocked = False  # too few free blocks for the first waiting request

    def submit(self, request: ModelledRequest, now_s: float) -> bool:
        """Queue a request that fits into an empty cache; True if ``end_s`` changed."""
        self.waiting.append(request)
        if not self._steps:
            self._plan_steps(now_s)
            return True
        if self._steps == 1 or not self._ends_on_arrival():
            return False
        steps = self._step_at(now_s)
        if steps >= self._steps:
            return False
        self._steps = steps
        self.end_s = self.start_s + self._step_s * steps
        return True

    @property
    def partial_tokens_left(self) -> int:
        """Tokens of the partly prefilled prompt that remain after the current steps."""
        return self._partial_tokens_left if self._partial is not None else 0

    def next_step_s(self, now_s: float) -> float:
        """Start of the next step that a request arriving now could join."""
        if not self._steps:
            return now_s
        if self._ends_on_arrival():
            return self.start_s + self._step_s * self._step_at(now_s)
        return self.end_s

    def advance(self) -> None:
        """Finish the current steps and plan the next ones."""
        now_s = self.end_s
        if self.decoding:
            self._ticks += self._steps
            ends = self._ends
            while ends and ends[0][0] <= self._ticks:
                self._end(heappop(ends)[2], now_s)
                self.decoding -= 1
        if self._prefilled:
            for request in self._prefilled:
                self._record_first_token(request, now_s)
            self._prefilled.clear()
        self._plan_steps(now_s)

    # --- planning --------------------------------------------------------------------------------------

    def _plan_steps(self, now_s: float) -> None:
        """Plan the next steps, or become idle."""
        config, steps, tokens = self.config, 1, 0
        while self._fetching and self._fetching[0][0] <= now_s:
            self._fetched.append(heappop(self._fetching)[2])
        if self._partial is not None and self._partial_tokens_left > config.chunk_tokens:
            steps, tokens = self._full_chunks(), config.chunk_tokens
        else:
            if self._partial is not None:
                tokens = self._partial_tokens_left
                self._prefilled.append(self._partial)
                self._partial = None
            while self._fetched and tokens < config.chunk_tokens:
                tokens = self._prefill(self._fetched.popleft(), tokens)
            if self.waiting and not self._blocked:
                tokens = self._admit(tokens, now_s)
            if not tokens:
                if not self.decoding:
                    self._steps = 0
                    self.end_s = self._fetching[0][0] if self._fetching else math.inf
                    return
                steps = self._decode_steps(now_s)
        self._steps = steps
        self._step_s = step_s = config.step_s + config.decode_s * self.decoding + tokens / config.prefill_rate
        self.start_s = now_s
        self.end_s = now_s + step_s * steps

    def _ends_on_arrival(self) -> bool:
        """Whether an arriving request ends the current steps early: while the engine only decodes."""
        return not (self._prefilled or self._partial or self._blocked)

    def _step_at(self, now_s: float) -> int:
        """Number of the current step in progress, from 1."""
        return int((now_s - self.start_s) / self._step_s) + 1

    def _decode_steps(self, now_s: float) -> int:
        """Number of equal steps until a generation or a fetch ends."""
        steps = self._ends[0][0] - self._ticks
        if self._fetching:
            step_s = self.config.step_s + self.config.decode_s * self.decoding
            left_s = self._fetching[0][0] - now_s
            if left_s < step_s * steps:
                steps = math.ceil(left_s / step_s)
        return steps

    def _full_chunks(self) -> int:
        """Number of equal steps that the partly prefilled prompt fills."""
        chunk = self.config.chunk_tokens
        steps = (self._partial_tokens_left - 1) // chunk
        if self.decoding:
            steps = min(steps, self._ends[0][0] - self._ticks)
        self._partial_tokens_left -= steps * chunk
        return steps

    def _admit(self, tokens: int, now_s: float) -> int:
        """Admit waiting requests in order, within token budget, slots and blocks; returns the step's prefill tokens."""
        config, waiting = self.config, self.waiting
        chunk, block_tokens = config.chunk_tokens, config.block_tokens
        while waiting and tokens < chunk:
            request = waiting[0]
            total = request.prompt_tokens + request.output_tokens
            admitted = (
                self.pool.admit(
                    request.path,
                    -(-total // block_tokens),
                    prompt_runs=request.prompt_runs,
                    recompute=request.recompute,
                )
                if self.running < config.max_running
                else None
            )
            if admitted is None:
                self._blocked = True
                return tokens
            waiting.popleft()
            self.running += 1
            hits, request.segments = admitted
            request.cached_tokens = hits * block_tokens
            if self._tiers is None or not self._fetch(request, self._tiers, hits, now_s):
                tokens = self._prefill(request, tokens)
        return tokens

    def _prefill(self, request: ModelledRequest, tokens: int) -> int:
        """Add an admitted request to a step with ``tokens`` prefill tokens; returns the step's prefill tokens."""
        chunk = self.config.chunk_tokens
        tokens += request.prompt_tokens - request.cached_tokens
        if tokens <= chunk:
            self._prefilled.append(request)
            return tokens
        self._partial = request
        self._partial_tokens_left = tokens - chunk
        return chunk

    # --- cache tiers -----------------------------------------------------------------------------------

    def _fetch(self, request: ModelledRequest, tiers: LowerTiers, hits: int, now_s: float) -> bool:
        """Fetch blocks after the GPU cache's ``hits``; True if the request must wait for them or another's fetch."""
        runs = request.path[: request.prompt_runs - request.recompute]
        keys = [key for run in runs for key in self._ids[run.start : run.start + run.length]]
        fetch = tiers.fetch(keys[hits:], now_s)
        self._demote(tiers)
        request.fetched_blocks = fetch.blocks
        request.cached_tokens += sum(fetch.blocks.values()) * self.config.block_tokens
        ready_s = max(fetch.ready_s, max((segment.ready_s for segment in request.segments), default=0.0))
        if ready_s <= now_s:
            return False
        position = 0
        for segment in request.segments:
            position += segment.blocks
            if position > hits:
                segment.ready_s = ready_s
        self._serial += 1
        heappush(self._fetching, (ready_s, self._serial, request))
        return True

    def _demote(self, tiers: LowerTiers) -> None:
        """Move the blocks that the GPU cache has evicted to the tiers; blocks that no prompt can match get new keys."""
        parts = self.pool.evicted_parts
        if parts:
            tiers.demote([key for part in parts for key in self._keys_of(part)])
            parts.clear()

    def _keys_of(self, part: Evicted) -> Sequence[object]:
        """Keys of evicted blocks, in the order of their eviction."""
        run, start, end = part
        if run is None:
            return [object() for _ in range(start, end)]
        return self._ids[run.start + start : run.start + end][::-1]

    # --- results ---------------------------------------------------------------------------------------

    def _record_first_token(self, request: ModelledRequest, now_s: float) -> None:
        request.first_token_s = now_s
        self._listener.on_first_token(request, now_s)
        if request.output_tokens == 1:
            self._end(request, now_s)
            return
        self.decoding += 1
        self._serial += 1
        heappush(self._ends, (self._ticks + request.output_tokens - 1, self._serial, request))

    def _end(self, request: ModelledRequest, now_s: float) -> None:
        self.running -= 1
        self._blocked = False
        self.pool.release(request.segments)
        self._listener.on_ended(request, now_s)
