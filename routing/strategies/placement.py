"""A configuration made ready to place requests.

Theory of operation. Everything that a configuration decides once is decided here: pools by model, and per pool and
task group its policy, strategy and fleet. A router swaps its whole placement for another between two requests; loads
and health live outside and carry over. ``decide`` is all that happens to a request before it is sent, and also what
explains it, so both give the same answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import islice

from msgspec import Struct

from routing.core.candidates import Candidates
from routing.core.fleet import Fleet
from routing.core.health import Health
from routing.core.load import LoadBook, Ticket
from routing.core.matching import Matcher
from routing.core.prefix import DEFAULT_BOUNDARY, PrefixHasher
from routing.core.prompt import CanonicalPrompt
from routing.core.residency import Residency
from routing.core.types import Choice, NoReplicaError, PrefixHash, Reason, ReplicaId
from routing.schema import (
    OpeningSettings,
    PolicyConfig,
    PoolConfig,
    ReplicaConfig,
    ResidencySettings,
    RouterConfig,
    TaskGroupConfig,
)
from routing.strategies.registry import build_strategy
from routing.strategies.strategy import Keys, Strategy, Weighed, Weighs


class PlacementRequest(Struct, frozen=True, gc=False):
    """What placing a request needs to know of it."""

    model: str | None
    group: str | None  # the task group that the client named
    session_key: str | None
    prompt: CanonicalPrompt


class CandidateLoad(Struct, frozen=True, gc=False):
    """A candidate's load at one moment."""

    replica: ReplicaId
    running: int
    waiting_tokens: int


class CandidateCost(CandidateLoad, frozen=True, gc=False):
    """The same with what a strategy makes of it for one request."""

    hit_tokens: int | None = None  # predicted cached tokens of the prompt; None where the strategy does not ask
    cost: float | None = None  # as the strategy compares it; None where it compares no figures


class RequestKeys:
    """The keys of one request. Computed when asked, and then kept."""

    __slots__ = ("_blocks", "_boundary", "_chain", "_hasher", "_request", "_tier1")

    def __init__(self, request: PlacementRequest, hasher: PrefixHasher, boundary: OpeningSettings) -> None:
        self._request = request
        self._hasher = hasher
        self._boundary = boundary
        self._tier1: PrefixHash | None = None
        self._blocks: list[array[int]] | None = None
        self._chain: array[int] | None = None

    @property
    def session(self) -> PrefixHash | None:
        """Key of the session; None when the request names none."""
        key = self._request.session_key
        return self._hasher.session(key) if key else None

    @property
    def tier1(self) -> PrefixHash | None:
        """Key of the prompt's opening at the policy's boundary; None when that is empty."""
        if self._tier1 is None:
            self._tier1 = self._hasher.tier1(self._request.prompt, self._request.model or "", self._boundary)
        return self._tier1

    @property
    def tier2(self) -> PrefixHash | None:
        """Key of the conversation: its session, else all up to its first user message; None without either."""
        return self.session or self._hasher.tier2(self._request.prompt, self._request.model or "")

    @property
    def blocks(self) -> list[array[int]]:
        """Chained block hashes of the prompt, in stretches that others share."""
        if self._blocks is None:
            self._blocks = self._hasher.stretches(self._request.prompt, self._request.model or "")
        return self._blocks

    @property
    def chain(self) -> Sequence[int]:
        """The same in one."""
        if self._chain is None:
            self._chain = array("Q", b"".join(self.blocks))
        return self._chain

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of the prompt."""
        return self._request.prompt.tokens


class Decision(Struct, frozen=True, gc=False):
    """Where a request goes, and everything that explains why."""

    pool: str
    group: str  # "" for none
    policy: PolicyConfig
    replica: ReplicaConfig
    choice: Choice
    candidates: Candidates
    keys: RequestKeys
    chooser: Strategy

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
        """The tier-1 key, at the policy's boundary or at the default one."""
        return self.keys.tier1

    def candidate_loads(self, limit: int | None = None) -> list[CandidateLoad]:
        """Present loads: of all up to ``limit``; of more, the chosen one, the homes that refused, then others."""
        loads = self.candidates.loads
        return [CandidateLoad(name, (load := loads[name]).running, load.waiting_tokens) for name in self._shown(limit)]

    def explained(self) -> list[CandidateCost]:
        """All candidates with the figures that the strategy compares, as it computes them, by present loads."""
        names, weighed = list(self.candidates.loads), [Weighed()] * len(self.candidates)
        if isinstance(self.chooser, Weighs):
            weighed = self.chooser.weigh(self.keys, self.candidates, names)
        return [
            CandidateCost(load.replica, load.running, load.waiting_tokens, *found)
            for load, found in zip(self.candidate_loads(), weighed, strict=True)
        ]

    def _shown(self, limit: int | None) -> Collection[ReplicaId]:
        loads = self.candidates.loads
        if limit is None or len(loads) <= limit:
            return loads.keys()
        return list(dict.fromkeys((self.choice.replica, *self.choice.refused, *islice(loads, limit))))[:limit]


class Route(Struct, frozen=True):
    """One pool's own requests, or one task group's."""

    pool: str
    group: str  # "" for the pool's own
    policy: PolicyConfig
    strategy: Strategy
    fleet: Fleet
    boundary: OpeningSettings


class Placement:
    """One configuration, ready to decide. ``seed`` varies what need not agree between routers, such as ties."""

    def __init__(
        self, config: RouterConfig, loads: LoadBook, seed: int = 0, residency: Residency | None = None
    ) -> None:
        self.config = config
        self._loads = loads
        self._residency = Residency() if residency is None else residency
        self._matcher = Matcher(config)
        self._hasher = PrefixHasher(config.hash_secret)
        self._routes: dict[tuple[str, str], Route] = {}
        self._asks_residency = {pool.name for pool in config.pools if _asks_residency(pool)}
        for pool in config.pools:
            fleets = _Fleets(pool, loads, seed, self._residency)
            for group in (None, *pool.groups):
                self._routes[pool.name, group.name if group else ""] = _route(pool, group, fleets)

    def decide(
        self, request: PlacementRequest, health: Health, excluded: Collection[ReplicaId] = frozenset()
    ) -> Decision:
        """Choose a replica that is active, up and not ``excluded``; UnknownModelError or NoReplicaError."""
        pool = self._matcher.pool(request.model)
        group = self._matcher.group(pool, request.group)
        route = self._routes[pool.name, group.name if group else ""]
        candidates = route.fleet.candidates(health)
        if excluded:
            candidates = candidates.without(excluded)
        if not candidates:
            raise NoReplicaError(route.pool, route.group)
        keys = RequestKeys(request, self._hasher, route.boundary)
        choice = route.strategy.choose(keys, candidates)
        replica = route.fleet.replicas[choice.replica]
        return Decision(route.pool, route.group, route.policy, replica, choice, candidates, keys, route.strategy)

    def dispatch(self, decision: Decision) -> Ticket:
        """Count a decision as sent: its load, and where its pool asks for it, what the replica will hold."""
        residency = self._residency if decision.pool in self._asks_residency else None
        return count_as_sent(decision.choice, decision.keys, self._loads, residency)


def count_as_sent(choice: Choice, keys: Keys, loads: LoadBook, residency: Residency | None) -> Ticket:
    """Enter a choice's work, and what its replica will hold; None where nobody asks what replicas hold."""
    tokens = keys.prompt_tokens
    if residency is None:
        return loads.dispatch(choice.replica, tokens)
    stay = residency.insert(choice.replica, keys.chain, loads.clock(), tokens)
    return loads.dispatch(choice.replica, max(0, tokens - (choice.hit_tokens or 0)), stay)


class _Fleets:
    """The fleets of one pool: groups that use the same replicas share one, its ring and its sums."""

    def __init__(self, pool: PoolConfig, loads: LoadBook, seed: int, residency: Residency) -> None:
        self._pool = pool
        self._loads = loads
        self._seed = seed
        self._residency = residency
        self._by_names: dict[frozenset[str], Fleet] = {}

    def of(self, group: TaskGroupConfig | None) -> Fleet:
        """The fleet of a group, or of the whole pool."""
        chosen = None if group is None or group.replicas is None else frozenset(group.replicas)
        replicas = [replica for replica in self._pool.replicas if chosen is None or replica.name in chosen]
        names = frozenset(replica.name for replica in replicas)
        if names not in self._by_names:
            self._by_names[names] = Fleet(replicas, self._loads, self._seed, self._residency)
        return self._by_names[names]


def _asks_residency(pool: PoolConfig) -> bool:
    """Whether any policy of the pool asks what replicas hold: then everybody's requests are entered."""
    policies = (pool.policy, *(group.policy for group in pool.groups if group.policy))
    return any(isinstance(policy.settings, ResidencySettings) for policy in policies)


def _route(pool: PoolConfig, group: TaskGroupConfig | None, fleets: _Fleets) -> Route:
    policy = group.policy if group and group.policy else pool.policy
    fleet = fleets.of(group)
    strategy = build_strategy(policy.settings, fleet)
    boundary = policy.settings if isinstance(policy.settings, OpeningSettings) else DEFAULT_BOUNDARY
    return Route(pool.name, group.name if group else "", policy, strategy, fleet, boundary)
