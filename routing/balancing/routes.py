"""Routes: policy, strategy, replicas and canary of each pool's own requests and of each task group's.

While a policy has a canary there are two routes for the same requests. They differ in the policy's revision, its
settings and its strategy, and share everything else: replicas, loads, estimated cached blocks and measured rates.

Canary. A hash of the tier-1 key, seeded with the policy's name, maps every prefix to a position between 0 and 1. The
canary gets positions below its share. So all requests of a prefix stay together, routers and workers agree without
communication, and a prefix stays with the canary when the share grows. Different policies choose different prefixes.
The tier-1 boundary is the task group's or the pool's, else the default, never the policy's own: otherwise a revision
that moves the boundary would change which requests it gets. A prompt without a prefix at that boundary uses the default
boundary. A request without a prompt has nothing to cache and uses the active revision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from msgspec import structs
from xxhash import xxh3_64_intdigest

from routing.balancing.disaggregation import PrefillRoute
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.replicas import GroupReplicas
from routing.balancing.request import PlacementRequest, ServedModel, configured_tier1, policy_of, tier1_rule
from routing.balancing.residency import Residency
from routing.balancing.strategies.registry import build_strategy
from routing.balancing.strategies.strategy import Strategy
from routing.prompt.hashing import DEFAULT_TIER1, PrefixHasher
from routing.schema import (
    PREFIX_SPACE,
    Canary,
    PolicyConfig,
    PoolConfig,
    ReplicaConfig,
    ReplicaRole,
    TaskGroupConfig,
    Tier1,
    split_position,
    split_seed,
)


class Arm(StrEnum):
    """Which of a policy's two revisions places a request."""

    ACTIVE = "active"
    CANARY = "canary"


class ArmReason(StrEnum):
    """Why the active revision or the canary places a request."""

    OTHER_ROUTERS = "other_routers"  # the canary is limited to other routers
    OTHER_GROUPS = "other_groups"  # the canary is limited to other task groups
    NO_PROMPT = "no_prompt"
    BEYOND_SHARE = "beyond_share"
    WITHIN_SHARE = "within_share"


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """Which revision places a request, and why; as ``/admin/explain`` shows it."""

    arm: Arm
    why: ArmReason
    active_revision: int
    canary_revision: int
    share: float  # of the prefix space that the canary gets
    place: float | None  # position of the request in the prefix space, 0 to 1; None without a prompt


class CanaryRule:
    """Decides which requests of a pool or task group go to a policy's canary. ``tier1``: the configured boundary."""

    def __init__(
        self,
        policy: PolicyConfig,
        canary: Canary,
        hasher: PrefixHasher,
        tier1: Tier1 | None,
        *,
        router: str,
        group: str,
    ) -> None:
        self._canary = canary
        self._policy = policy
        self._hasher = hasher
        self._tier1 = tier1 or DEFAULT_TIER1
        self._seed = split_seed(policy.name)
        self._share_end = int(canary.share * PREFIX_SPACE)
        self._excluded_by: ArmReason | None = None
        if canary.routers is not None and router not in canary.routers:
            self._excluded_by = ArmReason.OTHER_ROUTERS
        elif canary.groups is not None and group not in canary.groups:
            self._excluded_by = ArmReason.OTHER_GROUPS

    @property
    def applies(self) -> bool:
        """Whether the canary includes this router and group."""
        return self._excluded_by is None

    def selects(self, request: PlacementRequest, served: ServedModel) -> bool:
        """Whether the canary places a request, where it applies. 1.5 us for a prefix of 1 KiB."""
        position = self._position(request, served)
        return position is not None and position < self._share_end

    def verdict(self, request: PlacementRequest, served: ServedModel) -> CanaryVerdict:
        """Which revision places a request, and why."""
        position = self._position(request, served)
        if self._excluded_by is not None:
            reason = self._excluded_by
        elif position is None:
            reason = ArmReason.NO_PROMPT
        else:
            reason = ArmReason.WITHIN_SHARE if position < self._share_end else ArmReason.BEYOND_SHARE
        return CanaryVerdict(
            Arm.CANARY if reason is ArmReason.WITHIN_SHARE else Arm.ACTIVE,
            reason,
            self._policy.revision,
            self._canary.revision,
            self._canary.share,
            None if position is None else position / PREFIX_SPACE,
        )

    def _position(self, request: PlacementRequest, served: ServedModel) -> int | None:
        """A request's position, in 2**64ths of the prefix space; None without a prompt."""
        prompt, tier1 = request.prompt, self._hasher.tier1
        key = tier1(prompt, served.model, self._tier1, served.adapter)
        if key is None and self._tier1 is not DEFAULT_TIER1:
            key = tier1(prompt, served.model, DEFAULT_TIER1, served.adapter)
        return None if key is None else split_position(key, self._seed)


@dataclass(frozen=True, slots=True)
class Route:
    """How the requests of a pool or task group are placed by one revision of its policy."""

    pool: str
    group: str  # "" for the pool's own requests
    policy: PolicyConfig  # with the revision that places
    strategy: Strategy
    replicas: GroupReplicas
    tier1: Tier1  # boundary of the tier-1 prefix
    arm: Arm | None = None  # None: the policy has no canary
    canary_rule: CanaryRule | None = None  # of the policy, on the active route
    canary_route: CanaryRoute | None = None  # None: there is no canary here
    prefill: PrefillRoute | None = None  # None: no replica of the pool has a role
    ttft_objective_ms: int | None = None  # of the task group


class CanaryRoute(NamedTuple):
    """A canary's route, and the rule for the requests that it gets."""

    rule: CanaryRule
    route: Route


class RouteBuilder:
    """Makes the routes of one pool. ``router`` is this router's name, to which canaries may be limited.

    Each route draws from a seed of its own, and each set of replicas breaks ties by a seed of its own. Two groups with
    the same seed would send their requests to the same replicas at the same time.
    """

    def __init__(
        self,
        pool: PoolConfig,
        hasher: PrefixHasher,
        loads: LoadTracker,
        residency: Residency,
        *,
        seed: int,
        router: str,
    ) -> None:
        self._prefill_replicas = [replica for replica in pool.replicas if replica.role is ReplicaRole.PREFILL]
        self._has_roles = has_roles(pool)
        if self._prefill_replicas:
            decoding = tuple(replica for replica in pool.replicas if replica.role is not ReplicaRole.PREFILL)
            pool = structs.replace(pool, replicas=decoding)
        self._pool = pool  # with the replicas that serve requests
        self._hasher = hasher
        self._loads = loads
        self._residency = residency
        self._seed = seed
        self._router = router
        self._replicas: dict[frozenset[str], GroupReplicas] = {}

    def route(self, group: TaskGroupConfig | None) -> Route:
        """The route of a task group, or of the pool's own requests, with the route of its canary."""
        policy = policy_of(self._pool, group)
        canary = policy.canary
        if canary is None:
            return self._revision_route(policy, group)
        tier1, name = configured_tier1(self._pool, group), group.name if group else ""
        rule = CanaryRule(policy, canary, self._hasher, tier1, router=self._router, group=name)
        active = replace(self._revision_route(policy, group), arm=Arm.ACTIVE, canary_rule=rule)
        if not rule.applies:
            return active
        next_policy = structs.replace(policy, revision=canary.revision, settings=canary.settings, canary=None)
        canary_route = replace(self._revision_route(next_policy, group), arm=Arm.CANARY)
        return replace(active, canary_route=CanaryRoute(rule, canary_route))

    def _revision_route(self, policy: PolicyConfig, group: TaskGroupConfig | None) -> Route:
        replicas, name = self._replicas_of(group), group.name if group else ""
        strategy = build_strategy(policy.settings, replicas, self._seed_of("route", name, str(policy.revision)))
        return Route(
            self._pool.name,
            name,
            policy,
            strategy,
            replicas,
            tier1_rule(self._pool, group, policy.settings),
            prefill=self._prefill_route(group) if self._has_roles else None,
            ttft_objective_ms=group.ttft_objective_ms if group else None,
        )

    def _prefill_route(self, group: TaskGroupConfig | None) -> PrefillRoute:
        replicas = self._group_replicas(self._prefill_replicas, group)
        return PrefillRoute(self._pool, replicas, self._seed_of("prefill", group.name if group else ""))

    def _replicas_of(self, group: TaskGroupConfig | None) -> GroupReplicas:
        """The replicas that serve a group or the whole pool."""
        return self._group_replicas(self._pool.replicas, group)

    def _group_replicas(self, replicas: Iterable[ReplicaConfig], group: TaskGroupConfig | None) -> GroupReplicas:
        """The replicas that a group may use; groups with the same replicas share the ring and the sums."""
        allowed = None if group is None or group.replicas is None else frozenset(group.replicas)
        configs = [replica for replica in replicas if allowed is None or replica.name in allowed]
        names = frozenset(replica.name for replica in configs)
        if names not in self._replicas:
            seed = self._seed_of("replicas", *sorted(names))
            adapter_replicas = self._pool.adapter_replicas
            self._replicas[names] = GroupReplicas(configs, self._loads, seed, self._residency, adapter_replicas)
        return self._replicas[names]

    def _seed_of(self, *parts: str) -> int:
        """A seed for one part of this pool: the same each time for the same router."""
        return xxh3_64_intdigest("\n".join((self._pool.name, *parts)).encode(), self._seed)


def has_roles(pool: PoolConfig) -> bool:
    """Whether any replica has the role prefill or decode, so that another replica may prefill a prompt."""
    return any(replica.role is not ReplicaRole.BOTH for replica in pool.replicas)


def uses_residency(pool: PoolConfig) -> bool:
    """Whether a pool's requests are recorded in the residency.

    Where replicas have roles, it tells how much of a prompt is to be prefilled.
    """
    return has_roles(pool) or pool.uses_residency


def carry_over(routes: Iterable[Route], before: Iterable[Route]) -> None:
    """Let strategies continue with what they learnt for the same requests and revision, as canary or active."""
    strategies = {_identity(route): route.strategy for route in _with_canaries(before)}
    for route in _with_canaries(routes):
        earlier = strategies.get(_identity(route))
        if earlier is not None:
            route.strategy.carry_over(earlier)


def _with_canaries(routes: Iterable[Route]) -> Iterator[Route]:
    for route in routes:
        yield route
        if route.canary_route is not None:
            yield route.canary_route.route


def _identity(route: Route) -> tuple[object, ...]:
    policy = route.policy
    return route.pool, route.group, policy.name, policy.revision, policy.settings
