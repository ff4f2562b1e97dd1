"""Placement: a configuration, prepared to choose replicas for requests.

Theory of operation. Everything that follows from a configuration alone is computed here once: pools by model, and the
routes of each pool and task group (``routes.py``). A router replaces its whole placement between two requests; loads
and health are kept outside and carry over. ``decide`` does all that happens to a request before it is sent, and also
serves ``/admin/explain``, so explanations and placements agree.

``preferred_among`` tells warm-ups which replicas will get a prefix. A strategy that hashes prefixes has one preferred
replica or a few for each: for a hot prefix under ``affinity_groups``, as many as it owns. Under a strategy that uses
the residency, the replica that is sent a prefix becomes its replica, so the ring order divides the prefixes. Under any
other strategy every replica gets every prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import NamedTuple

from routing.balancing.allocation import GroupShares
from routing.balancing.candidates import Candidates
from routing.balancing.decision import Decision, RequestKeys
from routing.balancing.health import HealthRegistry
from routing.balancing.load_tracker import LoadTracker, Ticket
from routing.balancing.matching import MatchedGroup, Models, ServedModel, TaskGroupMatcher
from routing.balancing.rates import TokenRatio, TokenRatios, models_of
from routing.balancing.replicas import targets_of
from routing.balancing.request import PlacementRequest
from routing.balancing.residency import Residency
from routing.balancing.routes import CanaryVerdict, Route, RouteBuilder, carry_over, uses_residency
from routing.balancing.strategies.affinity_groups import AffinityGroups
from routing.balancing.strategies.strategy import Keys
from routing.balancing.warm_up_prefixes import PrefixKey, WarmUpPrompt
from routing.prompt.hashing import PrefixHasher
from routing.schema import ReplicaState, ResidencySettings, RouterConfig, Tier1Settings, TieredSettings
from routing.types import Choice, NoReplicaError, PrefixHash, ReplicaId, TargetId


def preferred_among(
    route: Route, prefix: PrefixHash, targets: Collection[TargetId], is_available: Callable[[TargetId], bool]
) -> list[TargetId]:
    """The ``targets`` that a prefix prefers, out of all that are available. A short walk of the ring."""
    count = _preferred_count(route, prefix)
    members = set(route.shares.replicas(route.group)) if route.follows_traffic and route.shares is not None else None
    all_targets = route.replicas.targets

    def is_usable(target: TargetId) -> bool:
        return is_available(target) and (members is None or all_targets[target].replica.name in members)

    if count is None:
        return [target for target in targets if target in all_targets and is_usable(target)]
    first = islice((target for target in route.replicas.ring.walk(prefix) if is_usable(target)), count)
    return [target for target in first if target in targets]


def _preferred_count(route: Route, prefix: PrefixHash) -> int | None:
    """How many replicas share a prefix; None: all of them."""
    settings = route.policy.settings
    if isinstance(settings, TieredSettings):
        return settings.replicas
    if isinstance(route.strategy, AffinityGroups):
        return len(route.strategy.plan().get(prefix, ())) or 1
    return 1 if isinstance(settings, Tier1Settings | ResidencySettings) else None


class _Pool(NamedTuple):
    """One prepared pool."""

    find_group: Callable[[ServedModel, PlacementRequest], MatchedGroup]
    own: Route
    by_group: dict[str, Route]
    ratios: dict[str, TokenRatio]  # by model; "" is any other


class Placement:
    """One prepared configuration.

    ``seed`` varies what need not agree between routers, such as ties; ``router`` is this router's name, to which
    canaries may be limited.
    """

    def __init__(
        self,
        config: RouterConfig,
        loads: LoadTracker,
        seed: int = 0,
        residency: Residency | None = None,
        router: str = "",
        ratios: TokenRatios | None = None,
    ) -> None:
        self.config = config
        self._loads = loads
        self._residency = Residency() if residency is None else residency
        self._hasher = PrefixHasher(config.hash_secret)
        ratios = TokenRatios() if ratios is None else ratios
        self.models = Models(config)
        self.matcher = TaskGroupMatcher(config, self._hasher)
        self._pools: dict[str, _Pool] = {}
        self._shares: dict[str, GroupShares] = {}
        self.targets_by_replica = {
            replica.name: [target.id for target in targets_of(replica)]
            for pool in config.pools
            for replica in pool.replicas
        }
        self._residency_pools = {pool.name for pool in config.pools if uses_residency(pool)}
        for pool in config.pools:
            builder = RouteBuilder(pool, self._hasher, loads, self._residency, seed=seed, router=router)
            if builder.shares is not None:
                self._shares[pool.name] = builder.shares
            by_group = {group.name: builder.route(group) for group in pool.groups}
            ratios_of_pool = {model: ratios.of(pool.name, model) for model in models_of(pool)}
            own = builder.route(None)
            self._pools[pool.name] = _Pool(self.matcher.of_pool(pool.name), own, by_group, ratios_of_pool)

    def carry_over(self, before: Placement) -> None:
        """Let groups and strategies continue with what they learnt under the configuration before."""
        for pool, shares in self._shares.items():
            if pool in before._shares:
                shares.carry_over(before._shares[pool])
        carry_over(self._routes(), before._routes())

    def prepare(self, health: HealthRegistry) -> Iterator[None]:
        """Compute what the first requests would otherwise wait for, 3 ms for a thousand replicas; yields in between."""
        shared = {id(route.replicas): route.replicas for route in self._routes()}  # canaries use the same replicas
        for replicas in shared.values():
            yield from replicas.prepare(health)

    def _routes(self) -> Iterator[Route]:
        """The active routes of all pools."""
        for _, own, by_group, _ in self._pools.values():
            yield own
            yield from by_group.values()

    def _route(self, pool: str, group: str) -> Route:
        """The active route of a task group, or of the pool's own requests."""
        _, own, by_group, _ = self._pools[pool]
        return by_group.get(group, own)

    def decide(
        self, request: PlacementRequest, health: HealthRegistry, excluded: Collection[ReplicaId] = frozenset()
    ) -> Decision:
        """Choose a replica that is active, up and not ``excluded``; UnknownModelError or NoReplicaError."""
        loads = self._loads
        if loads.next_due_s != math.inf and loads.next_due_s <= (now_s := loads.clock()):
            loads.advance(now_s)
        served = self.models.resolve(request.model)
        find_group, route, routes, ratios = self._pools[served.pool.name]
        group, matched_by = find_group(served, request)
        if group is not None:
            route = routes[group.name]
        canary = route.canary_route
        if canary is not None and canary.rule.takes(request, served):
            route = canary.route
        candidates = route.replicas.candidates(health, served.adapter)
        if route.follows_traffic or excluded:
            candidates = _usable(route, candidates, served.adapter, excluded)
        if not candidates.loads:
            raise NoReplicaError(route.pool, route.group, served.adapter)
        ratio = ratios.get(served.model) or ratios[""]
        keys = RequestKeys(request, served, self._hasher, route.tier1, ratio)
        choice = route.strategy.choose(keys, candidates)
        return Decision(route, matched_by, served, route.replicas.targets[choice.target], choice, candidates, keys)

    def tier1_hashes(self, decision: Decision, request: PlacementRequest) -> dict[str, PrefixHash | None]:
        """By task group of the pool, the tier-1 hash with which it would claim a request."""
        return self.matcher.tier1_hashes(decision.served, request)

    def canary_verdict(self, decision: Decision, request: PlacementRequest) -> CanaryVerdict | None:
        """Which revision places a request, and why; None if its policy has no canary."""
        rule = self._route(decision.pool, decision.group).canary_rule
        return None if rule is None else rule.verdict(request, decision.served)

    def preferred_replicas(
        self, pool: str, prefix_key: PrefixKey, replica: str, adapter: str, health: HealthRegistry
    ) -> list[TargetId]:
        """The targets of a replica that will be preferred for a task group's prefix once the replica takes traffic."""
        group, prefix = prefix_key
        if group and group not in self._pools[pool].by_group:
            return []
        route = self._route(pool, group)
        replicas = route.replicas

        def is_available(target: TargetId) -> bool:
            configured = replicas.targets[target].replica
            return (
                configured.state is ReplicaState.ACTIVE
                and health.is_up_after_warm_up(ReplicaId(configured.name))
                and (not adapter or replicas.has_adapter(target, adapter, health))
            )

        return preferred_among(route, prefix, self.targets_by_replica.get(replica, []), is_available)

    def could_serve(self, missing: NoReplicaError, replica: str, health: HealthRegistry) -> bool:
        """Whether a replica would be eligible for the rejected request if it were not warming up."""
        replicas, adapter = self._route(missing.pool, missing.group).replicas, missing.adapter
        targets = [target for target in self.targets_by_replica[replica] if target in replicas.targets]
        has_adapter = any(not adapter or replicas.has_adapter(target, adapter, health) for target in targets)
        return has_adapter and health.is_up_after_warm_up(ReplicaId(replica))

    def record_warm_up(self, pool: str, target: TargetId, prompt: WarmUpPrompt) -> None:
        """Record in the residency that a target has prefilled a warm-up prompt."""
        if pool in self._residency_pools:
            self._residency.insert(target, prompt.blocks, self._loads.clock(), prompt.tokens)

    def dispatch(self, decision: Decision, *, is_retry: bool = False, is_plain: bool = False) -> Ticket:
        """Record a decision as sent: its load, its traffic, and its blocks in the residency if the pool uses it.

        A request counts as traffic once, however often it is retried. ``is_plain``: its response is not streamed.
        """
        route = decision.route
        if not is_retry:
            if route.shares is not None:
                route.shares.count(route.group)
            if route.counting is not None:
                route.counting.count_request(decision.keys)
        residency = self._residency if route.pool in self._residency_pools else None
        if residency is not None:
            residency.resize(decision.choice.target, decision.keys.ratio.block_tokens)
        ticket = record_dispatch(decision.choice, decision.keys, self._loads, residency, is_plain=is_plain)
        ticket.sample_ratio(decision.keys.ratio, decision.keys.sample_bytes)
        return ticket


def record_dispatch(
    choice: Choice, keys: Keys, loads: LoadTracker, residency: Residency | None, *, is_plain: bool = False
) -> Ticket:
    """Record a choice's load, and its blocks in the residency; None if no policy uses the residency."""
    tokens = keys.prompt_tokens
    if residency is None:
        return loads.dispatch(choice.target, tokens, is_plain=is_plain)
    record = residency.insert(choice.target, keys.chain, loads.clock(), tokens, keys.block_tokens)
    return loads.dispatch(choice.target, max(0, tokens - (choice.hit_tokens or 0)), record, is_plain=is_plain)


def _usable(route: Route, unfiltered: Candidates, adapter: str, excluded: Collection[ReplicaId]) -> Candidates:
    """The eligible replicas of a route that are in the group's current set and not excluded."""
    own = unfiltered
    if route.follows_traffic and route.shares is not None:
        own = route.shares.candidates(route.group, route.replicas, unfiltered, adapter)
    if not excluded:
        return own
    failed = [name for replica in excluded for name in route.replicas.targets_of_replica(replica)]
    if route.follows_traffic and route.shares is not None:
        return route.shares.untried(route.group, route.replicas, unfiltered.without(failed), own)
    return own.without(failed)
