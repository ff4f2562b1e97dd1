"""Where a request goes, and what explains why: the choice, the candidates, what the strategy made of each."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any

from routing.core.loads.book import Load
from routing.core.loads.candidates import Candidates
from routing.core.models import Served
from routing.core.targets import Target
from routing.core.types import Choice, MatchedBy, PrefixHash, Reason, TargetId
from routing.placement.keys import RequestKeys
from routing.placement.routes import Route
from routing.schema import PolicyConfig, ReplicaConfig
from routing.strategies.strategy import Weighed, Weighs


class CandidateLoads:
    """Loads of candidates at one moment; few objects, because one is made for each request."""

    __slots__ = ("running", "targets", "waiting_tokens")

    def __init__(self, loads: list[Load]) -> None:
        self.targets = [load.target for load in loads]
        self.running = [load.running for load in loads]
        self.waiting_tokens = [load.waiting_tokens for load in loads]

    def __len__(self) -> int:
        return len(self.targets)

    def as_json(self) -> list[dict[str, Any]]:
        """As the admin port shows them."""
        return [
            {"replica": target, "running": running, "waiting_tokens": waiting}
            for target, running, waiting in zip(self.targets, self.running, self.waiting_tokens, strict=True)
        ]


class CandidateCosts(CandidateLoads):
    """The same with what a strategy makes of each for one request."""

    __slots__ = ("weighed",)

    def __init__(self, loads: list[Load], weighed: list[Weighed]) -> None:
        super().__init__(loads)
        self.weighed = weighed

    def as_json(self) -> list[dict[str, Any]]:
        """As the admin port shows them."""
        return [load | found._asdict() for load, found in zip(super().as_json(), self.weighed, strict=True)]


class Decision:
    """Where a request goes, and everything that explains why."""

    __slots__ = ("candidates", "choice", "keys", "matched_by", "route", "served", "target")

    def __init__(
        self,
        route: Route,
        matched_by: MatchedBy,
        served: Served,
        target: Target,
        choice: Choice,
        candidates: Candidates,
        keys: RequestKeys,
    ) -> None:
        self.route = route
        self.matched_by = matched_by
        self.served = served
        self.target = target
        self.choice = choice
        self.candidates = candidates
        self.keys = keys

    @property
    def replica(self) -> ReplicaConfig:
        """The replica that gets the request."""
        return self.target.replica

    @property
    def pool(self) -> str:
        """Whose replica it is."""
        return self.route.pool

    @property
    def group(self) -> str:
        """The task group; "" for none."""
        return self.route.group

    @property
    def policy(self) -> PolicyConfig:
        """The policy there, with the revision that chose: the one in force, or the one on trial."""
        return self.route.policy

    @property
    def strategy(self) -> str:
        """The name of the strategy that chose."""
        return self.policy.settings.name

    @property
    def reason(self) -> Reason:
        """The rule that named the replica."""
        return self.choice.reason

    @property
    def prefix(self) -> PrefixHash | None:
        """The tier-1 key, where the task group's, the pool's or the policy's rule says."""
        return self.keys.tier1

    def candidate_loads(self, limit: int | None = None) -> CandidateLoads:
        """Present loads: of all up to ``limit``; of more, the chosen one, the homes that refused, then others."""
        loads = self.candidates.loads
        if limit is None or len(loads) <= limit:
            return CandidateLoads(list(loads.values()))
        return CandidateLoads([loads[name] for name in self._shown(limit)])

    def explained(self, limit: int | None = None) -> CandidateCosts:
        """The same candidates with the figures that the strategy compares, as it computes them, by present loads."""
        names = list(self._shown(limit))
        weighed = [Weighed()] * len(names)
        if isinstance(self.route.strategy, Weighs):
            weighed = self.route.strategy.weigh(self.keys, self.candidates, names)
        loads = self.candidates.loads
        return CandidateCosts([loads[name] for name in names], weighed)

    def _shown(self, limit: int | None) -> Collection[TargetId]:
        loads = self.candidates.loads
        if limit is None or len(loads) <= limit:
            return loads.keys()
        return list(dict.fromkeys((self.choice.target, *self.choice.refused, *islice(loads, limit))))[:limit]
