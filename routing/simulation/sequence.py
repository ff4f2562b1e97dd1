"""One generation on its way through an engine.

The sequences that decode, which cost nothing per token.

Theory of operation. ``_ticks`` counts decode steps, in each of which everybody here gets one token. A sequence
remembers the tick it joined at, and two heaps say after which tick one has all its tokens and before which one needs a
block. So many equal steps are one addition. What a heap says of a sequence that has left is stale: its spell of
decoding is over, and the entry is dropped when it comes to the front.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum

from routing.simulation.blocks import BlockKey


class State(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True)
class Siblings:
    """The ``n`` sequences of one request, of which some figures are counted once."""

    size: int = 1
    ended: int = 0
    longest: int = 0  # generated tokens

    def add(self, generated_tokens: int) -> bool:
        """Count one that ended; whether it was the last."""
        self.ended += 1
        self.longest = max(self.longest, generated_tokens)
        return self.ended == self.size


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and the tokens generated from it. How many there will be is known when it is made."""

    keys: SequenceOf[BlockKey]  # of the full blocks of prompt + output, in order; those missing match nothing
    prompt_tokens: int  # >= 1
    output_tokens: int  # >= 1: what it will generate if nothing stops it
    arrived_s: float
    finish_reason: str = "length"  # what it ends with: "length" or "stop"
    max_tokens: int | None = None  # as asked for
    siblings: Siblings = field(default_factory=Siblings)
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    target_tokens: int = 0  # tokens to prefill: the prompt, and after a preemption what was generated too
    computed_tokens: int = 0  # of them, those in the cache
    keyed_blocks: int = 0  # full blocks whose key is cached
    generated_tokens: int = 0  # as of ``joined_tick``
    joined_tick: int = 0  # the engine's decode count when it began to decode
    spell: int = 0  # which spell of decoding; an engine's serial number
    cached_tokens: int | None = None  # hits at first admission; None before
    admitted_s: float | None = None  # first admission
    first_token_s: float | None = None
    finished_s: float | None = None
    last_token_s: float = 0.0
    preemptions: int = 0
    uncounted_preemptions: int = 0

    @property
    def is_live(self) -> bool:
        """Whether it still takes part."""
        return self.state is not State.FINISHED and self.state is not State.ABORTED


_Heap = list[tuple[int, int, Sequence]]  # tick, spell, whose


class Decoding:
    """Those of one engine, in the order in which they joined."""

    __slots__ = ("_completions", "_growths", "_sequences", "_spells", "_ticks")

    def __init__(self) -> None:
        self._sequences: dict[Sequence, None] = {}
        self._ticks = 0
        self._spells = 0  # begun so far; their numbers break ties in the heaps
        self._completions: _Heap = []  # tick after which a sequence has all its tokens
        self._growths: _Heap = []  # tick before which a sequence needs a block

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def generated(self, sequence: Sequence) -> int:
        """Tokens that a sequence, here or not, has generated so far."""
        if sequence.state is State.DECODING:
            return sequence.generated_tokens + self._ticks - sequence.joined_tick
        return sequence.generated_tokens

    def join(self, sequence: Sequence, room_tokens: int | None) -> None:
        """Let a sequence decode. It needs a block after ``room_tokens`` more, >= 0; None: never."""
        self._spells += 1
        sequence.state = State.DECODING
        sequence.joined_tick = self._ticks
        sequence.spell = self._spells
        self._sequences[sequence] = None
        left = sequence.output_tokens - sequence.generated_tokens
        heapq.heappush(self._completions, (self._ticks + left, sequence.spell, sequence))
        if room_tokens is not None:
            heapq.heappush(self._growths, (self._ticks + room_tokens, sequence.spell, sequence))

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out, with what it has generated; the caller says what becomes of it."""
        sequence.generated_tokens = self.generated(sequence)
        del self._sequences[sequence]

    def advance(self, steps: int) -> None:
        """So many steps have ended; nobody may have been complete, or without a block, before the last."""
        self._ticks += steps

    def steps_ahead(self) -> int:
        """Steps until somebody is complete or needs a block; there must be somebody."""
        _drop_stale(self._completions)
        _drop_stale(self._growths)
        tick = self._completions[0][0]
        if self._growths:
            tick = min(tick, self._growths[0][0])
        return tick - self._ticks

    def complete(self) -> Sequence | None:
        """Somebody who has all its tokens, told once; None if there is nobody."""
        heap = self._completions
        _drop_stale(heap)
        return heapq.heappop(heap)[2] if heap and heap[0][0] <= self._ticks else None

    def needy(self) -> Sequence | None:
        """Who needs a block next, told until it has ``grown`` or left; None if nobody does before the next step."""
        heap = self._growths
        _drop_stale(heap)
        return heap[0][2] if heap and heap[0][0] <= self._ticks else None

    def grown(self, sequence: Sequence, room_tokens: int) -> None:
        """``needy`` has a block, and needs another one after ``room_tokens`` more."""
        heapq.heapreplace(self._growths, (self._ticks + room_tokens, sequence.spell, sequence))


def _drop_stale(heap: _Heap) -> None:
    while heap and not _is_current(heap[0][2], heap[0][1]):
        heapq.heappop(heap)


def _is_current(sequence: Sequence, spell: int) -> bool:
    return sequence.state is State.DECODING and sequence.spell == spell
