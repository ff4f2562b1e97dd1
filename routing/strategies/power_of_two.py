"""Of two replicas drawn by chance the one with less outstanding work.

Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from routing.core.group_replicas import GroupReplicas
from routing.core.loads.candidate import work_of
from routing.core.loads.candidates import Candidates
from routing.core.types import Choice, Reason
from routing.schema import PowerOfTwoSettings
from routing.strategies.strategy import Keys

AGAIN: Final = 4  # draws of a second one, while it is the first


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Draw two, and take the one with less work; of equal ones the first."""

    rng: random.Random

    @classmethod
    def build(cls, _settings: PowerOfTwoSettings, _replicas: GroupReplicas, seed: int) -> PowerOfTwo:
        """The strategy for one group."""
        return cls(random.Random(seed))  # noqa: S311 - no secret

    def choose(self, _keys: Keys, candidates: Candidates) -> Choice:
        """The less loaded one of two, which are the same where one has nearly all weight."""
        draw = self.rng.random
        one = other = candidates.drawn(draw())
        for _ in range(AGAIN):
            other = candidates.drawn(draw())
            if other is not one:
                break
        return Choice((other if work_of(other) < work_of(one) else one).target, Reason.LESS_OF_TWO)
