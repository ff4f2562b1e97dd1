"""The keys of one request, by which strategies place it: session, tier 1, tier 2, block hashes.

Where a request goes, and what explains why: the choice, the candidates, what the strategy made of each.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from routing.balancing.candidates import Candidates
from routing.balancing.load_tracker import Load
from routing.balancing.models import ServedModel
from routing.balancing.rates import TokenRatio
from routing.balancing.replicas import Target
from routing.balancing.request import PlacementRequest
from routing.balancing.routes import Route
from routing.balancing.strategies.strategy import Weighed, Weighs
from routing.prompt.hashing import PrefixHasher, boundary_end
from routing.prompt.structure import PromptStructure, describe_structure
from routing.schema import PolicyConfig, ReplicaConfig, Tier1
from routing.types import BLOCK_TOKENS, Choice, MatchedBy, PrefixHash, Reason, TargetId


class RequestKeys:
    """The keys of one request. Computed when asked; what is asked twice is kept."""

    __slots__ = (
        "_blocks",
        "_chain",
        "_hasher",
        "_request",
        "_rule",
        "_served",
        "_tier1",
        "_tier2",
        "block_tokens",
        "prompt_tokens",
        "ratio",
    )

    def __init__(
        self,
        request: PlacementRequest,
        served: ServedModel,
        hasher: PrefixHasher,
        rule: Tier1,
        ratio: TokenRatio,
    ) -> None:
        self._request = request
        self._served = served
        self._hasher = hasher
        self._rule = rule
        self.ratio = ratio  # of the pool's model; it may move while the request is under way
        ids = request.prompt.ids
        self.block_tokens = BLOCK_TOKENS if ids else ratio.block_tokens  # of each block: estimated, or so many ids
        self.prompt_tokens = request.prompt.estimate(ratio.block_tokens)  # estimated length of the prompt
        self._tier1: PrefixHash | None = None
        self._tier2: PrefixHash | None = None
        self._blocks: list[array[int]] | None = None
        self._chain: array[int] | None = None

    @property
    def session(self) -> PrefixHash | None:
        """Key of the session, which tenants do not share; None when the request names none."""
        key, tenant = self._request.session_key, self._request.tenant
        return self._hasher.session(f"{tenant} {key}" if tenant else key) if key else None

    @property
    def tier1(self) -> PrefixHash | None:
        """Key of the prompt's opening, where the group's tier 1 ends; None when that is empty."""
        if self._tier1 is None:
            served = self._served
            self._tier1 = self._hasher.tier1(self._request.prompt, served.model, self._rule, served.adapter)
        return self._tier1

    @property
    def tier1_bytes(self) -> int:
        """Where the opening ends in the canonical prompt."""
        return boundary_end(self._request.prompt, self._rule)

    @property
    def tier1_tokens(self) -> int:
        """Estimated tokens of the opening."""
        return self.ratio.tokens(self.tier1_bytes)

    @property
    def sample_bytes(self) -> int:
        """Bytes of the prompt where its tokens may teach the ratio, else 0."""
        return self._request.prompt.sample_bytes

    @property
    def tier2(self) -> PrefixHash | None:
        """Key of the conversation: its session, else the opening and the message behind it; None without either."""
        if self._tier2 is None:
            served, prompt = self._served, self._request.prompt
            self._tier2 = self.session or self._hasher.tier2(prompt, served.model, self._rule, served.adapter)
        return self._tier2

    @property
    def blocks(self) -> list[array[int]]:
        """Chained block hashes of the prompt, in stretches that others share."""
        blocks = self._blocks
        if blocks is None:
            served = self._served
            blocks = self._blocks = self._hasher.chunks(self._request.prompt, served.model, served.adapter)
        return blocks

    @property
    def chain(self) -> Sequence[int]:
        """The same in one."""
        chain = self._chain
        if chain is None:
            chain = self._chain = array("Q", b"".join(self._blocks or self.blocks))
        return chain

    def shape(self, tools: Any) -> PromptStructure:
        """How the prompt begins, without its text; ``tools`` as the client sent them. 1 ms: not for every request."""
        return describe_structure(self._request.prompt, tools, self._request.session_key, self._hasher.digest)


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
        served: ServedModel,
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
