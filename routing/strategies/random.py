"""Any replica, by chance."""

from __future__ import annotations

import random
from dataclasses import dataclass

from routing.core.group_replicas import GroupReplicas
from routing.core.loads.candidates import Candidates
from routing.core.types import Choice, Reason
from routing.schema import RandomSettings
from routing.strategies.strategy import Keys


@dataclass(frozen=True, slots=True)
class Random:
    """Draw among the candidates, each as likely as its weight says."""

    rng: random.Random

    @classmethod
    def build(cls, _settings: RandomSettings, _replicas: GroupReplicas, seed: int) -> Random:
        """The strategy for one group."""
        return cls(random.Random(seed))  # noqa: S311 - no secret

    def choose(self, _keys: Keys, candidates: Candidates) -> Choice:
        """Whoever is drawn."""
        return Choice(candidates.drawn(self.rng.random()).target, Reason.RANDOM)
