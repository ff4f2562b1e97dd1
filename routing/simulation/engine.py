"""Continuous batching as vLLM's scheduler does it: pure, synchronous, and told the time by its driver.

Theory of operation. A driver submits sequences, calls ``begin`` to plan a step and, when the step's ``end_s`` has
come, ``finish`` to take its results; virtual and real time differ in nothing else. A step has ``b`` decoding
sequences, which get one token each, and up to ``chunk_tokens`` of prefill, first come first served. It takes
``step_s + decode_s * b + chunk / prefill_rate``. Waiting sequences are admitted in order while there is prefill
budget left, a running slot and room for their blocks: their prompt is looked up then, at most
``floor((n - 1) / block)`` blocks of it, because the last token is always computed.

A decoding sequence takes a block whenever it crosses a block's end. If none is free, the newest running sequence is
preempted: its blocks go back, it returns to the head of the queue and later computes prompt and output again. With
``reserve_output`` the whole output is reserved at admission instead and nothing is ever preempted; that is the model
of the reference results in the traces' notes.

Decoding costs nothing per token here (``sequence.py``), so a driver in virtual time may take many equal steps at once
(``Step.repeat``).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from routing.simulation.blocks import BlockPool, BlockResidency
from routing.simulation.sequence import Decoding, Sequence, State
from routing.simulation.statistics import Statistics


class TooLongError(ValueError):
    """A sequence that this engine could never hold."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The model of one replica.

    Defaults are those of the reference results, but for the block size and ``reserve_output``.
    """

    blocks: int | None = None  # usable KV blocks; None: no limit
    block_tokens: int = 16
    prefill_rate: float = 8000.0  # tokens/s
    step_s: float = 0.010  # of any step
    decode_s: float = 0.0002  # more for each decoding sequence
    chunk_tokens: int = 2048  # prefill tokens a step may carry
    max_running: int = 256  # sequences
    max_model_len: int = 131_072  # tokens
    reserve_output: bool = False
    block_sample_ratio: float = 0.0  # share of the blocks whose life is observed, 0 to 1


@dataclass(slots=True)
class Step:
    """One planned step, or ``repeat`` equal ones in a row."""

    start_s: float
    end_s: float  # of the last
    decoding: int  # sequences that get a token
    prefill_tokens: int
    prefilled: list[Sequence] = field(default_factory=list)  # whose prefill ends with this step
    repeat: int = 1


@dataclass(slots=True)
class StepResult:
    """What a finished step brought."""

    first: list[Sequence]  # sequences with their first token since they were (re)admitted
    finished: list[Sequence]


class Engine:
    """One replica's scheduler, its blocks and its counters."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.residency = BlockResidency(config.block_sample_ratio) if config.block_sample_ratio else None
        self.pool = BlockPool(config.blocks, self.residency)
        self.statistics = Statistics(config.max_model_len)
        self.slowdown = 1.0  # factor on every step's time: a fault that a driver may inject
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.decoding = Decoding()
        self._prefilling: deque[Sequence] = deque()
        self._last_token_s = 0.0  # when all decoding sequences got their last token

    # --- what a driver calls ---------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Sequences submitted and not ended."""
        return len(self.waiting) + len(self.running)

    def generated(self, sequence: Sequence) -> int:
        """Tokens that a sequence has generated so far."""
        return self.decoding.generated(sequence)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; TooLongError if it could never run."""
        tokens = sequence.prompt_tokens + sequence.output_tokens
        capacity = self.pool.capacity
        if capacity is not None and self._blocks_for(tokens) > capacity:
            raise TooLongError(f"{tokens} tokens do not fit into {capacity} blocks of {self.config.block_tokens}")
        sequence.target_tokens = sequence.prompt_tokens
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence whose client has gone. It is counted nowhere; its blocks stay cached."""
        if not sequence.is_live:
            return
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self._stop(sequence)
        sequence.state = State.ABORTED

    def begin(self, now_s: float, until_s: float = 0.0) -> Step | None:
        """Plan the next step, or None if there is nothing to do.

        Equal decode steps are taken at once as long as the one before the last ends before ``until_s``.
        """
        if self.residency is not None:
            self.residency.now_s = now_s
        preempted = self._grow()
        budget = self._continue_prefill(step := Step(now_s, now_s, len(self.decoding), 0))
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
        self.read_gauges()
        return step

    def stop_all(self, now_s: float) -> list[Sequence]:
        """End every sequence with the reason "abort", as an engine does that is told to stop."""
        stopped = [*self.running, *self.waiting]
        for sequence in stopped:
            self.abort(sequence)
            sequence.finished_s = now_s
            self.statistics.finished["abort"] += 1
        self.read_gauges()
        return stopped

    def read_gauges(self) -> None:
        """Publish the scheduler's state. Every step does; between steps it is the driver's choice."""
        gauges = self.statistics.gauges
        gauges.running = len(self.running)
        gauges.waiting = len(self.waiting)
        gauges.kv_usage_ratio = self.pool.usage_ratio

    def finish(self, step: Step) -> StepResult:
        """Take the tokens of a step that has ended."""
        decoded = min(step.decoding, len(self.decoding))  # some may have been aborted meanwhile
        statistics = self.statistics
        if decoded:
            self.decoding.advance(step.repeat)
            each_s = (step.end_s - step.start_s) / step.repeat
            statistics.inter_token.observe(each_s, decoded * step.repeat)
            statistics.generation_tokens += decoded * step.repeat
        self._last_token_s = step.end_s
        finished = self._complete(step.end_s)
        first = [sequence for sequence in step.prefilled if sequence.state is State.PREFILLING]
        computed = sum(self._first_token(sequence, step.end_s) for sequence in first)
        finished += [sequence for sequence in first if sequence.state is State.FINISHED]
        statistics.iteration_tokens.observe(decoded + computed + len(first), step.repeat)
        self.read_gauges()
        return StepResult(first, finished)

    # --- blocks ----------------------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)

    def _cache_full_blocks(self, sequence: Sequence, tokens: int) -> None:
        """Cache the keys of the blocks that ``tokens`` computed tokens fill."""
        full = tokens // self.config.block_tokens
        keys, blocks, cache = sequence.keys, sequence.blocks, self.pool.cache
        for index in range(sequence.keyed_blocks, full):
            cache(blocks[index], keys[index] if index < len(keys) else None)
        sequence.keyed_blocks = max(sequence.keyed_blocks, full)

    def _grow(self) -> bool:
        """Give decoding sequences the block that their next token needs; whether any was preempted for it."""
        preempted = False
        while (sequence := self.decoding.needy()) is not None:
            if self.pool.available == 0:
                self._preempt(next(reversed(self.running)))
                preempted = True
            else:
                self._cache_full_blocks(sequence, sequence.prompt_tokens + self.generated(sequence) - 1)
                sequence.blocks += self.pool.take(1)
                self.decoding.grown(sequence, self._room_tokens(sequence))
        return preempted

    def _room_tokens(self, sequence: Sequence) -> int:
        """Tokens that still fit into a sequence's blocks; its newest token has no place there yet."""
        stored = sequence.prompt_tokens + self.generated(sequence) - 1
        return len(sequence.blocks) * self.config.block_tokens - stored

    def _preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back at the head of the queue, without its blocks."""
        if sequence.state is State.DECODING:
            sequence.last_token_s = self._last_token_s
        self._stop(sequence)
        sequence.state = State.WAITING
        sequence.target_tokens = sequence.prompt_tokens + sequence.generated_tokens
        sequence.preemptions += 1
        sequence.uncounted_preemptions += 1
        self.waiting.appendleft(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones and give its blocks back."""
        if sequence.state is State.PREFILLING:
            if sequence in self._prefilling:
                self._prefilling.remove(sequence)
        else:
            self.decoding.leave(sequence)
            self._cache_full_blocks(sequence, sequence.prompt_tokens + sequence.generated_tokens - 1)
        del self.running[sequence]
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.keyed_blocks = 0
        sequence.computed_tokens = 0

    # --- planning --------------------------------------------------------------------------------------

    def _continue_prefill(self, step: Step) -> int:
        """Go on with the prompts begun; the prefill tokens that are left in the step."""
        budget = self.config.chunk_tokens
        while self._prefilling and budget:
            budget -= self._prefill(step, self._prefilling[0], budget)
        return budget

    def _prefill(self, step: Step, sequence: Sequence, budget: int) -> int:
        """Put a piece of a prompt into the step; the tokens it takes."""
        tokens = min(budget, sequence.target_tokens - sequence.computed_tokens)
        sequence.computed_tokens += tokens
        self._cache_full_blocks(sequence, sequence.computed_tokens)
        step.prefill_tokens += tokens
        if sequence.computed_tokens == sequence.target_tokens:
            step.prefilled.append(sequence)
            self._prefilling.popleft()
        return tokens

    def _admit(self, step: Step, budget: int, now_s: float) -> None:
        """Admit waiting sequences in order, as far as budget, slots and blocks go."""
        while self.waiting and budget and len(self.running) < self.config.max_running:
            sequence = self.waiting[0]
            if not self._place(sequence):
                return
            self.waiting.popleft()
            if sequence.admitted_s is None:
                sequence.admitted_s = max(now_s, sequence.arrived_s)
                sequence.cached_tokens = sequence.computed_tokens
                self.statistics.queries += sequence.prompt_tokens
                self.statistics.hits += sequence.computed_tokens
            sequence.state = State.PREFILLING
            self.running[sequence] = None
            self._prefilling.append(sequence)
            budget -= self._prefill(step, sequence, budget)

    def _place(self, sequence: Sequence) -> bool:
        """Hold the blocks of a sequence's tokens, cached ones first; False if they are not to be had."""
        tokens = sequence.target_tokens
        hits = self.pool.lookup(sequence.keys, (tokens - 1) // self.config.block_tokens)
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

    def _equal_steps(self, left_s: float, duration_s: float) -> int:
        """How many steps of this length nothing can interrupt, at least 1."""
        steps = self.decoding.steps_ahead()
        if left_s < duration_s * steps:
            steps = math.ceil(left_s / duration_s)
        return max(1, steps)

    # --- results ---------------------------------------------------------------------------------------

    def _first_token(self, sequence: Sequence, now_s: float) -> int:
        """A prefill has ended with a token: begin to decode. The prompt tokens that were computed for it."""
        statistics = self.statistics
        statistics.generation_tokens += 1
        computed = 0
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            cached = sequence.cached_tokens or 0
            computed = sequence.prompt_tokens - cached
            statistics.prompt_tokens += sequence.prompt_tokens
            statistics.prompt_cached += cached
            statistics.time_to_first_token.observe(max(0.0, now_s - sequence.arrived_s))
        else:
            statistics.inter_token.observe(now_s - sequence.last_token_s)
        statistics.preemptions += sequence.uncounted_preemptions
        sequence.uncounted_preemptions = 0
        sequence.generated_tokens += 1
        self.decoding.join(sequence, None if self.config.reserve_output else self._room_tokens(sequence))
        if sequence.generated_tokens >= sequence.output_tokens:
            self._end(sequence, now_s)
        return computed

    def _complete(self, now_s: float) -> list[Sequence]:
        """End the decoding sequences that have all their tokens."""
        finished = []
        while (sequence := self.decoding.complete()) is not None:
            self._end(sequence, now_s)
            finished.append(sequence)
        return finished

    def _end(self, sequence: Sequence, now_s: float) -> None:
        """Finish a sequence and count it."""
        self._stop(sequence)
        sequence.state = State.FINISHED
        sequence.finished_s = now_s
        self.statistics.count_end(sequence, now_s)
