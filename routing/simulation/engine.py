"""Continuous batching as in vLLM's scheduler, without I/O; its driver supplies the time.

Theory of operation. A driver submits sequences, calls ``plan_step``, and calls ``finish`` at the step's ``end_s``;
virtual and real time do not differ otherwise. A step has ``b`` decoding sequences, which get one token each, and up to
``chunk_tokens`` of prefill, first come, first served. It takes
``step_s + decode_s * b + chunk / prefill_rate``. Waiting sequences are admitted in order while the step has prefill
budget, a running slot is free and their blocks fit. Their prompt is looked up in the cache then, at most
``floor((n - 1) / block)`` blocks of it, because the last token is always computed.

A decoding sequence takes a block whenever it crosses a block's end. If none is free, the newest running sequence is
preempted: its blocks are released, it returns to the head of the queue and later computes prompt and output again.
With ``reserve_output`` the whole output is reserved at admission and nothing is preempted; that is the model of the
reference results in the traces' notes.

A driver in virtual time may take several equal decode steps at once (``Step.repeat``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum

from routing.simulation.blocks import BlockKey, BlockPool, BlockResidency
from routing.simulation.statistics import Statistics


class State(Enum):
    """State of a sequence."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True)
class Siblings:
    """The ``n`` sequences of one request, some of whose statistics are counted once."""

    size: int = 1
    ended: int = 0
    longest: int = 0  # generated tokens

    def add(self, generated_tokens: int) -> bool:
        """Count a sequence that ended; True if it was the last."""
        self.ended += 1
        self.longest = max(self.longest, generated_tokens)
        return self.ended == self.size


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Full blocks of one prompt that were cached."""

    keys: SequenceOf[BlockKey]
    parent: BlockKey  # key of the block before the first
    first: int  # number of the first block in the prompt
    data: bytes  # the sequence's
    salt: str


class CacheCleared:
    """The whole cache was emptied."""


CacheChange = StoredBlocks | CacheCleared | object  # an int is the key of an evicted block; others have no key


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and the tokens generated from it, whose number is fixed when the sequence is created."""

    keys: SequenceOf[BlockKey]  # of the full blocks of prompt + output, in order; missing ones match nothing
    prompt_tokens: int  # >= 1
    output_tokens: int  # >= 1
    arrived_s: float
    finish_reason: str = "length"  # reported at its end: "length" or "stop"
    max_tokens: int | None = None  # of the request
    data: bytes = b""  # tokens of prompt and output, for ``Engine.changes`` only
    salt: str = ""
    reads_cache: bool = True  # whether cached blocks are used for it; it stores blocks in any case
    external_tokens: int = 0  # of the prompt, whose KV blocks came from another engine
    siblings: Siblings = field(default_factory=Siblings)
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    target_tokens: int = 0  # tokens to prefill: the prompt, and after a preemption also the generated ones
    computed_tokens: int = 0  # of them, those that are in the KV cache
    keyed_blocks: int = 0  # full blocks whose key is cached
    generated_tokens: int = 0
    cached_tokens: int | None = None  # hits at first admission, external tokens included; None before
    external_hit_tokens: int = 0  # of them, external ones
    admitted_s: float | None = None  # first admission
    first_token_s: float | None = None
    finished_s: float | None = None
    last_token_s: float = 0.0
    preemptions: int = 0
    uncounted_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Parameters of one replica.

    Defaults are those of the reference results, except for the block size and ``reserve_output``.
    """

    blocks: int | None = None  # usable KV blocks; None: no limit
    block_tokens: int = 16
    prefill_rate: float = 8000.0  # tokens/s
    step_s: float = 0.010  # of each step
    decode_s: float = 0.0002  # additional for each decoding sequence
    chunk_tokens: int = 2048  # prefill tokens per step, at most
    max_running: int = 256  # sequences
    max_model_len: int = 131_072  # tokens
    reserve_output: bool = False
    block_sample_ratio: float = 0.0  # share of the blocks whose lifetime is observed, 0 to 1
    caches_prefixes: bool = True  # whether blocks are reused at all


@dataclass(slots=True)
class Step:
    """One planned step, or ``repeat`` equal ones in a row."""

    start_s: float
    end_s: float  # of the last of them
    decoding: int  # sequences that get a token
    prefill_tokens: int = 0
    prefilled: list[Sequence] = field(default_factory=list)  # sequences whose prefill ends with this step
    repeat: int = 1


@dataclass(slots=True)
class StepResult:
    """Results of a finished step."""

    first: list[Sequence]  # sequences with their first token since they were (re)admitted
    finished: list[Sequence]


class Engine:
    """Scheduler, blocks and statistics of one replica."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.residency = BlockResidency(config.block_sample_ratio) if config.block_sample_ratio else None
        self.pool = BlockPool(config.blocks, self.residency)
        self.statistics = Statistics(config.max_model_len)
        self.slowdown = 1.0  # factor on the duration of every step: a fault that a driver may inject
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.decoding: dict[Sequence, None] = {}  # of them, in the order of their first tokens
        self._prefilling: deque[Sequence] = deque()
        self.changes: list[CacheChange] | None = None  # a list collects what is cached and evicted

    # --- called by drivers ---

    @property
    def outstanding(self) -> int:
        """Sequences submitted and not ended."""
        return len(self.waiting) + len(self.running)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Its prompt and output must fit into the blocks of the engine."""
        sequence.target_tokens = sequence.prompt_tokens
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence whose client disconnected. It is not counted; its blocks stay cached."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._stop(sequence)
        else:
            return
        sequence.state = State.ABORTED

    def plan_step(self, now_s: float, until_s: float = 0.0) -> Step | None:
        """Plan the next step, or None if there is nothing to do.

        Equal decode steps are taken at once as long as the one before the last ends before ``until_s``.
        """
        if self.residency is not None:
            self.residency.now_s = now_s
        preempted = self._allocate_decode_blocks()
        step = Step(now_s, now_s, len(self.decoding))
        budget = self.config.chunk_tokens
        while self._prefilling and budget:
            budget -= self._prefill(step, self._prefilling[0], budget)
        if not preempted:
            self._admit(step, budget, now_s)
        if not step.decoding and not step.prefill_tokens:
            return None
        config = self.config
        duration_s = config.step_s + config.decode_s * step.decoding + step.prefill_tokens / config.prefill_rate
        duration_s *= self.slowdown
        if not step.prefill_tokens:
            step.repeat = self._equal_steps(until_s - now_s, duration_s)
        step.end_s = now_s + duration_s * step.repeat
        self.update_gauges()
        return step

    def finish(self, step: Step) -> StepResult:
        """Take the tokens of a step that has ended."""
        decoded, statistics = len(self.decoding), self.statistics  # some may have been aborted since ``plan_step``
        if decoded:
            for sequence in self.decoding:
                sequence.generated_tokens += step.repeat
                sequence.last_token_s = step.end_s
            statistics.inter_token.observe((step.end_s - step.start_s) / step.repeat, decoded * step.repeat)
            statistics.generation_tokens += decoded * step.repeat
        finished = [sequence for sequence in self.decoding if sequence.generated_tokens >= sequence.output_tokens]
        for sequence in finished:
            self._end(sequence, step.end_s)
        first = [sequence for sequence in step.prefilled if sequence.state is State.PREFILLING]
        computed = sum(self._start_decoding(sequence, step.end_s) for sequence in first)
        finished += [sequence for sequence in first if sequence.state is State.FINISHED]
        statistics.iteration_tokens.observe(decoded + computed + len(first), step.repeat)
        self.update_gauges()
        return StepResult(first, finished)

    def record_changes(self) -> None:
        """Collect changes of the cache in ``changes`` from now on."""
        self.changes = self.pool.evicted = []

    def take_changes(self) -> list[CacheChange]:
        """The changes since the last call, in order."""
        changes = self.changes or []
        if changes:
            self.record_changes()
        return changes

    def clear_cache(self) -> bool:
        """Empty the cache; False if requests are running."""
        is_cleared = self.pool.reset()
        if is_cleared and self.changes is not None:
            self.changes.append(CacheCleared())
        return is_cleared

    def stop_all(self, now_s: float) -> list[Sequence]:
        """End every sequence with the reason "abort", as an engine does when it is shut down."""
        stopped = [*self.running, *self.waiting]
        for sequence in stopped:
            self.abort(sequence)
            sequence.finished_s = now_s
            self.statistics.finished["abort"] += 1
        self.update_gauges()
        return stopped

    def update_gauges(self) -> None:
        """Publish the scheduler's state. Every step does; between steps the driver may."""
        self.statistics.running = len(self.running)
        self.statistics.waiting = len(self.waiting)
        self.statistics.kv_usage_ratio = self.pool.usage_ratio

    # --- blocks ---

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)

    def _cache_full_blocks(self, sequence: Sequence, tokens: int) -> None:
        """Cache the keys of the blocks that ``tokens`` computed tokens fill."""
        full = tokens // self.config.block_tokens
        keys, blocks, cache = sequence.keys, sequence.blocks, self.pool.cache
        if not self.config.caches_prefixes:
            keys = ()
        for index in range(sequence.keyed_blocks, full):
            cache(blocks[index], keys[index] if index < len(keys) else None)
        if self.changes is not None and (stored := keys[sequence.keyed_blocks : full]):
            parent = keys[sequence.keyed_blocks - 1] if sequence.keyed_blocks else None
            self.changes.append(StoredBlocks(stored, parent, sequence.keyed_blocks, sequence.data, sequence.salt))
        sequence.keyed_blocks = max(sequence.keyed_blocks, full)

    def _free_slots(self, sequence: Sequence) -> int:
        """Tokens that still fit into a decoding sequence's blocks; its newest token is not stored yet."""
        stored = sequence.prompt_tokens + sequence.generated_tokens - 1
        return len(sequence.blocks) * self.config.block_tokens - stored

    def _allocate_decode_blocks(self) -> bool:
        """Give decoding sequences the block that their next token needs; True if any was preempted for it."""
        preempted = False
        if self.config.reserve_output:
            return preempted
        for sequence in list(self.decoding):
            if sequence not in self.decoding or self._free_slots(sequence):
                continue
            while sequence in self.decoding and self.pool.available == 0:
                self._preempt(next(reversed(self.running)))
                preempted = True
            if sequence in self.decoding:
                self._cache_full_blocks(sequence, sequence.prompt_tokens + sequence.generated_tokens - 1)
                sequence.blocks += self.pool.take(1)
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back at the head of the queue, without its blocks."""
        self._stop(sequence)
        sequence.state = State.WAITING
        sequence.target_tokens = sequence.prompt_tokens + sequence.generated_tokens
        sequence.preemptions += 1
        sequence.uncounted_preemptions += 1
        self.waiting.appendleft(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Remove a sequence from the running ones and release its blocks."""
        if sequence in self.decoding:
            del self.decoding[sequence]
            self._cache_full_blocks(sequence, sequence.prompt_tokens + sequence.generated_tokens - 1)
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
        del self.running[sequence]
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.keyed_blocks = 0
        sequence.computed_tokens = 0

    # --- planning ---

    def _prefill(self, step: Step, sequence: Sequence, budget: int) -> int:
        """Add a part of a prompt to the step; returns how many tokens were added."""
        tokens = min(budget, sequence.target_tokens - sequence.computed_tokens)
        sequence.computed_tokens += tokens
        self._cache_full_blocks(sequence, sequence.computed_tokens)
        step.prefill_tokens += tokens
        if sequence.computed_tokens == sequence.target_tokens:
            step.prefilled.append(sequence)
            self._prefilling.popleft()
        return tokens

    def _admit(self, step: Step, budget: int, now_s: float) -> None:
        """Admit waiting sequences in order, as far as prefill budget, running slots and blocks allow."""
        while self.waiting and budget and len(self.running) < self.config.max_running:
            sequence = self.waiting[0]
            if not self._hold_blocks(sequence):
                return
            self.waiting.popleft()
            self.running[sequence] = None
            if sequence.admitted_s is None:
                self.statistics.hits += sequence.computed_tokens
                self._receive(sequence)
                sequence.admitted_s = max(now_s, sequence.arrived_s)
                sequence.cached_tokens = sequence.computed_tokens
                self.statistics.queries += sequence.prompt_tokens * self._reads_cache(sequence)
            sequence.state = State.PREFILLING
            self._prefilling.append(sequence)
            budget -= self._prefill(step, sequence, budget)

    def _reads_cache(self, sequence: Sequence) -> bool:
        return sequence.reads_cache and self.config.caches_prefixes

    def _hold_blocks(self, sequence: Sequence) -> bool:
        """Hold the blocks of a sequence's tokens, cached ones first; False if too few are free."""
        tokens = sequence.target_tokens
        limit = (tokens - 1) // self.config.block_tokens if self._reads_cache(sequence) else 0
        hits = self.pool.lookup(sequence.keys, limit)
        if self.config.reserve_output:
            tokens = sequence.prompt_tokens + sequence.output_tokens
        fresh = self._blocks_for(tokens) - len(hits)
        if not self.pool.fits(hits, fresh):
            return False
        self.pool.hold(hits)
        sequence.blocks = hits + self.pool.take(fresh)
        sequence.keyed_blocks = len(hits)
        sequence.computed_tokens = len(hits) * self.config.block_tokens
        return True

    def _receive(self, sequence: Sequence) -> None:
        """Take a prompt's external blocks, beyond those that are cached here. The last token is always computed."""
        if not sequence.external_tokens:
            return
        hit_tokens = sequence.computed_tokens
        sequence.computed_tokens = max(hit_tokens, min(sequence.external_tokens, sequence.prompt_tokens - 1))
        sequence.external_hit_tokens = sequence.computed_tokens - hit_tokens
        self.statistics.external_queries += sequence.prompt_tokens - hit_tokens
        self.statistics.external_hits += sequence.external_hit_tokens
        self._cache_full_blocks(sequence, sequence.computed_tokens)

    def _equal_steps(self, left_s: float, duration_s: float) -> int:
        """Decode steps until a sequence ends, needs a block or ``left_s`` is over; at least 1."""
        if left_s <= duration_s:
            return 1
        steps = min(sequence.output_tokens - sequence.generated_tokens for sequence in self.decoding)
        if not self.config.reserve_output:
            steps = min(steps, *map(self._free_slots, self.decoding))
        return steps if left_s >= duration_s * steps else math.ceil(left_s / duration_s)

    # --- results ---

    def _start_decoding(self, sequence: Sequence, now_s: float) -> int:
        """Count the token with which a prefill ends, and start to decode; returns the prompt tokens computed for it."""
        statistics = self.statistics
        statistics.generation_tokens += 1
        computed = 0
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            cached = sequence.cached_tokens or 0
            computed = sequence.prompt_tokens - cached
            statistics.prompt_tokens += sequence.prompt_tokens
            statistics.prompt_cached += cached
            statistics.prompt_external += sequence.external_hit_tokens
            statistics.time_to_first_token.observe(max(0.0, now_s - sequence.arrived_s))
        else:
            statistics.inter_token.observe(now_s - sequence.last_token_s)
        statistics.preemptions += sequence.uncounted_preemptions
        sequence.uncounted_preemptions = 0
        sequence.generated_tokens += 1
        sequence.last_token_s = now_s
        sequence.state = State.DECODING
        self.decoding[sequence] = None
        if sequence.generated_tokens >= sequence.output_tokens:
            self._end(sequence, now_s)
        return computed

    def _end(self, sequence: Sequence, now_s: float) -> None:
        """Finish a sequence and count it."""
        self._stop(sequence)
        sequence.state = State.FINISHED
        sequence.finished_s = now_s
        self.statistics.count_end(sequence, now_s)
