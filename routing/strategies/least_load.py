"""The replica with the least outstanding work."""

from __future__ import annotations

from dataclasses import dataclass

from routing.core.group_replicas import GroupReplicas
from routing.core.loads.candidates import Candidates
from routing.core.types import Choice, Reason
from routing.schema import LeastLoadSettings
from routing.strategies.strategy import Keys


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """Send each request to where the least work waits."""

    @classmethod
    def build(cls, _settings: LeastLoadSettings, _replicas: GroupReplicas, _seed: int) -> LeastLoad:
        """The strategy for one group."""
        return cls()

    def choose(self, _keys: Keys, candidates: Candidates) -> Choice:
        """The least loaded candidate."""
        return Choice(candidates.order.least_loaded(), Reason.LEAST_LOAD)
