"""Decisions: where a request goes and why, with the keys of the request and the loads and costs of the candidates."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from routing.balancing.candidates import Candidates
from routing.balancing.load_tracker import Load
from routing.balancing.matching import ServedModel
from routing.balancing.rates import TokenRatio
from routing.balancing.replicas import Target
from routing.balancing.request import PlacementRequest
from routing.balancing.routes import Route
from routing.balancing.strategies.strategy import Estimate
from routing.prompt.hashing import PrefixHasher, boundary_end
from routing.prompt.structure import PromptStructure, describe_structure
from routing.schema import PolicyConfig, ReplicaConfig, Tier1
from routing.types import BLOCK_TOKENS, Choice, MatchedBy, PrefixHash, Reason, TargetId


class RequestKeys:
    """The keys of one request. Computed on first use, and cached."""

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
        self.ratio = ratio  # of the pool's model; it may change while the request runs
        ids = request.prompt.ids
        self.block_tokens = BLOCK_TOKENS if ids else ratio.block_tokens  # estimated, or exact for token ids
        self.prompt_tokens = request.prompt.estimate(ratio.block_tokens)  # estimated length of the prompt
        self._tier1: PrefixHash | None = None
        self._tier2: PrefixHash | None = None
        self._blocks: list[array[int]] | None = None
        self._chain: array[int] | None = None

    @property
    def session(self) -> PrefixHash | None:
        """Key of the session, which tenants do not share; None if the request has none."""
        key, tenant = self._request.session_key, self._request.tenant
        return self._hasher.session(f"{tenant} {key}" if tenant else key) if key else None

    @property
    def tier1(self) -> PrefixHash | None:
        """Key of the tier-1 prefix; None if that is empty."""
        if self._tier1 is None:
            served = self._served
            self._tier1 = self._hasher.tier1(self._request.prompt, served.model, self._rule, served.adapter)
        return self._tier1

    @property
    def tier1_bytes(self) -> int:
        """Length of the tier-1 prefix in the canonical prompt."""
        return boundary_end(self._request.prompt, self._rule)

    @property
    def tier1_tokens(self) -> int:
        """Estimated tokens of the tier-1 prefix."""
        return self.ratio.tokens(self.tier1_bytes)

    @property
    def sample_bytes(self) -> int:
        """Bytes of the prompt if it is a usable sample for the ratio, else 0."""
        return self._request.prompt.sample_bytes

    @property
    def tier2(self) -> PrefixHash | None:
        """Key of the conversation: its session, else the tier-1 prefix and the next message; None without either."""
        if self._tier2 is None:
            served, prompt = self._served, self._request.prompt
            self._tier2 = self.session or self._hasher.tier2(prompt, served.model, self._rule, served.adapter)
        return self._tier2

    @property
    def blocks(self) -> list[array[int]]:
        """Chained block hashes of the prompt, in shared chunks."""
        blocks = self._blocks
        if blocks is None:
            served = self._served
            blocks = self._blocks = self._hasher.chunks(self._request.prompt, served.model, served.adapter)
        return blocks

    @property
    def chain(self) -> Sequence[int]:
        """Chained block hashes of the prompt, in one array."""
        chain = self._chain
        if chain is None:
            chain = self._chain = array("Q", b"".join(self._blocks or self.blocks))
        return chain

    def structure(self, tools: Any) -> PromptStructure:
        """Structure of the prompt, without its text; ``tools`` as the client sent them. 1 ms: not for every request."""
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
        """As JSON values for the admin port."""
        return [
            {"replica": target, "running": running, "waiting_tokens": waiting}
            for target, running, waiting in zip(self.targets, self.running, self.waiting_tokens, strict=True)
        ]


class CandidateCosts(CandidateLoads):
    """The same with the values that a strategy compares."""

    __slots__ = ("estimates",)

    def __init__(self, loads: list[Load], estimates: list[Estimate]) -> None:
        super().__init__(loads)
        self.estimates = estimates

    def as_json(self) -> list[dict[str, Any]]:
        """As JSON values for the admin port."""
        return [load | estimate._asdict() for load, estimate in zip(super().as_json(), self.estimates, strict=True)]


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
        """The pool's name."""
        return self.route.pool

    @property
    def group(self) -> str:
        """The task group; "" for none."""
        return self.route.group

    @property
    def policy(self) -> PolicyConfig:
        """The policy, with the revision that placed the request."""
        return self.route.policy

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return self.policy.settings.name

    @property
    def reason(self) -> Reason:
        """Why the replica was chosen."""
        return self.choice.reason

    @property
    def prefix(self) -> PrefixHash | None:
        """The tier-1 key."""
        return self.keys.tier1

    def candidate_loads(self, limit: int | None = None) -> CandidateLoads:
        """Current loads of up to ``limit`` candidates: the chosen one, those that were skipped, then others."""
        loads = self.candidates.loads
        if limit is None or len(loads) <= limit:
            return CandidateLoads(list(loads.values()))
        return CandidateLoads([loads[name] for name in self._first(limit)])

    def candidate_costs(self, limit: int | None = None) -> CandidateCosts:
        """The same candidates with the values that the strategy compares, by current loads."""
        names = list(self._first(limit))
        loads = self.candidates.loads
        estimates = self.route.strategy.estimate(self.keys, self.candidates, names)
        return CandidateCosts([loads[name] for name in names], estimates)

    def _first(self, limit: int | None) -> Collection[TargetId]:
        loads = self.candidates.loads
        if limit is None or len(loads) <= limit:
            return loads.keys()
        return list(dict.fromkeys((self.choice.target, *self.choice.skipped, *islice(loads, limit))))[:limit]
