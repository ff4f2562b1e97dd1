"""Keep a prompt's opening on one replica."""

from __future__ import annotations

from dataclasses import dataclass

from routing.core.group_replicas import GroupReplicas
from routing.core.homes.bounded_load import bounded_choice
from routing.core.homes.ring import HashRing
from routing.core.loads.candidates import Candidates
from routing.core.types import Choice, Reason, TargetId
from routing.schema import PrefixHashSettings
from routing.strategies.strategy import Keys


@dataclass(frozen=True, slots=True)
class PrefixHashStrategy:
    """Send a tier-1 prefix to the replica that its hash names, unless that replica is full."""

    ring: HashRing[TargetId]
    load_factor: float  # ratio to the mean load that still counts as room, >= 1
    min_bound: int  # requests that a replica may always hold

    @classmethod
    def build(cls, settings: PrefixHashSettings, replicas: GroupReplicas, _seed: int) -> PrefixHashStrategy:
        """The strategy for one group; where the prefix ends is settled by the keys that it is given."""
        return cls(replicas.ring, settings.load_factor, settings.min_bound)

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The prefix's first home with room; without a prefix the least loaded."""
        key = keys.tier1
        if key is None:
            return Choice(candidates.order.least_loaded(), Reason.NO_KEY)
        return bounded_choice(self.ring.walk(key), candidates, self.load_factor, self.min_bound)
