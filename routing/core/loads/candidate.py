"""One replica that a request may go to."""

from __future__ import annotations

from typing import Final, NamedTuple

from routing.core.loads.book import Load
from routing.core.types import TargetId

REQUEST_TOKENS: Final = 80  # work of a running request beside its prompt: a step's fixed 0.010 s at 8,000 tokens/s


class Candidate(NamedTuple):
    """A target with what its cost is made of."""

    target: TargetId
    load: Load
    weight: float
    bit: int  # in the residency's masks; 0 where nothing is known of it
    share: float = 1.0  # of its weight that it has; less while it starts slowly


def work_of(candidate: Candidate) -> float:
    """Outstanding work, in tokens by the replica's weight."""
    load = candidate.load
    return (load.waiting_tokens + REQUEST_TOKENS * load.running) / candidate.weight
