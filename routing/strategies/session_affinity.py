"""Keep a session on one replica."""

from __future__ import annotations

from dataclasses import dataclass

from routing.core.group_replicas import GroupReplicas
from routing.core.homes.bounded_load import bounded_choice
from routing.core.homes.ring import HashRing
from routing.core.loads.candidates import Candidates
from routing.core.types import Choice, Reason, TargetId
from routing.schema import SessionAffinitySettings
from routing.strategies.strategy import Keys


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """Send a session to the replica that its key names, unless that replica is full."""

    ring: HashRing[TargetId]
    load_factor: float  # ratio to the mean load that still counts as room, >= 1
    min_bound: int  # requests that a replica may always hold

    @classmethod
    def build(cls, settings: SessionAffinitySettings, replicas: GroupReplicas, _seed: int) -> SessionAffinity:
        """The strategy for one group."""
        return cls(replicas.ring, settings.load_factor, settings.min_bound)

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The session's first home with room; without a session key the least loaded."""
        key = keys.session
        if key is None:
            return Choice(candidates.order.least_loaded(), Reason.NO_KEY)
        return bounded_choice(self.ring.walk(key), candidates, self.load_factor, self.min_bound)
