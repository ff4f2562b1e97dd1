"""One generation on its way through an engine."""

from __future__ import annotations

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
