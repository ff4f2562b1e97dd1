"""A configuration made ready to place requests.

Theory of operation. Everything that a configuration decides once is decided here: pools by model, and per pool and
task group its routes (``routes.py``). A router swaps its whole placement for another between two requests; loads
and health live outside and carry over. ``decide`` is all that happens to a request before it is sent, and also what
explains it, so both give the same answer.

Which replicas an opening will be sent to, before it is: what warming a replica goes by.

A strategy that goes by the hash of an opening has a home or a few for each: of a hot one, under ``affinity_groups``,
as many of its home order as it has replicas of its own, whichever those are. Under one that goes by what replicas hold,
whoever is sent an opening is its home from then on, so the home order divides them. Under any other they come
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import NamedTuple

from routing.balancing.allocation import GroupShares
from routing.balancing.canary import CanaryVerdict
from routing.balancing.candidates import Candidates
from routing.balancing.decision import Decision, RequestKeys
from routing.balancing.health import Health, HealthRegistry
from routing.balancing.load_tracker import LoadTracker, Ticket
from routing.balancing.models import Models, ServedModel
from routing.balancing.rates import TokenRatio, TokenRatios, models_of
from routing.balancing.replicas import targets_of
from routing.balancing.request import PlacementRequest
from routing.balancing.residency import Residency
from routing.balancing.routes import Route, RouteBuilder, asks_residency, carry_over
from routing.balancing.strategies.affinity_groups import AffinityGroups
from routing.balancing.strategies.strategy import Keys
from routing.balancing.task_groups import MatchedGroup, TaskGroupMatcher
from routing.balancing.warm_up_prefixes import PrefixKey, WarmUpPrompt
from routing.prompt.hashing import PrefixHasher
from routing.schema import ReplicaState, ResidencySettings, RouterConfig, Tier1Settings, TieredSettings
from routing.types import Choice, NoReplicaError, PrefixHash, ReplicaId, TargetId


def preferred_among(
    route: Route, opening: PrefixHash, some: Collection[TargetId], is_there: Callable[[TargetId], bool]
) -> list[TargetId]:
    """Those of some targets that an opening calls home, when the replicas are those that ``is_there``. A short walk."""
    count = _homes(route, opening)
    members = set(route.shares.replicas(route.group)) if route.follows_traffic and route.shares is not None else None
    targets = route.replicas.targets

    def takes(target: TargetId) -> bool:
        return is_there(target) and (members is None or targets[target].replica.name in members)

    if count is None:
        return [target for target in some if target in targets and takes(target)]
    first = islice((target for target in route.replicas.ring.walk(opening) if takes(target)), count)
    return [target for target in first if target in some]


def _homes(route: Route, opening: PrefixHash) -> int | None:
    """How many replicas share an opening; None: all of them."""
    settings = route.policy.settings
    if isinstance(settings, TieredSettings):
        return settings.replicas
    if isinstance(route.strategy, AffinityGroups):
        return len(route.strategy.plan().get(opening, ())) or 1
    return 1 if isinstance(settings, Tier1Settings | ResidencySettings) else None


class _Pool(NamedTuple):
    """One pool, made ready."""

    find: Callable[[ServedModel, PlacementRequest], MatchedGroup]  # a request's task group
    own: Route
    by_group: dict[str, Route]
    ratios: dict[str, TokenRatio]  # by model; that of "" is of any other


class Placement:
    """One configuration, ready to decide.

    ``seed`` varies what need not agree between routers, such as ties; ``router`` is the name by which a trial may ask
    for this one.
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
        self._ratios = TokenRatios() if ratios is None else ratios
        self.models = Models(config)
        self.matcher = TaskGroupMatcher(config, self._hasher)
        self._pools: dict[str, _Pool] = {}
        self._shares: dict[str, GroupShares] = {}
        self.targets_by_replica = {
            replica.name: [target.id for target in targets_of(replica)]
            for pool in config.pools
            for replica in pool.replicas
        }
        self._asks_residency = {pool.name for pool in config.pools if asks_residency(pool)}
        for pool in config.pools:
            builder = RouteBuilder(pool, self._hasher, loads, self._residency, seed=seed, router=router)
            if builder.shares is not None:
                self._shares[pool.name] = builder.shares
            by_group = {group.name: builder.route(group) for group in pool.groups}
            ratios_of_pool = {model: self._ratios.of(pool.name, model) for model in models_of(pool)}
            own = builder.route(None)
            self._pools[pool.name] = _Pool(self.matcher.of_pool(pool.name), own, by_group, ratios_of_pool)

    def carry_over(self, before: Placement) -> None:
        """Let groups and strategies go on from what traffic had taught them under the configuration before."""
        for pool, shares in self._shares.items():
            if pool in before._shares:
                shares.carry_over(before._shares[pool])
        carry_over(self._routes(), before._routes())

    def prepare(self, health: Health) -> Iterator[None]:
        """Make what the first requests would otherwise wait for, 3 ms of a thousand replicas; stops now and then."""
        shared = {id(route.replicas): route.replicas for route in self._routes()}  # a trial's are the same
        for replicas in shared.values():
            yield from replicas.prepare(health)

    def _routes(self) -> Iterator[Route]:
        """Those in force, of all pools."""
        for _, own, by_group, _ in self._pools.values():
            yield own
            yield from by_group.values()

    def decide(
        self, request: PlacementRequest, health: Health, excluded: Collection[ReplicaId] = frozenset()
    ) -> Decision:
        """Choose a replica that is active, up and not ``excluded``; UnknownModelError or NoReplicaError."""
        loads = self._loads
        if loads.next_due_s != math.inf and loads.next_due_s <= (now_s := loads.clock()):
            loads.advance(now_s)
        served = self.models.served(request.model)
        find, route, routes, ratios = self._pools[served.pool.name]
        group, matched_by = find(served, request)
        if group is not None:
            route = routes[group.name]
        trial = route.canary_route
        if trial is not None and trial.rule.takes(request, served):
            route = trial.route
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
        """By task group of the pool, the hash that would claim a request that was decided on."""
        return self.matcher.tier1_hashes(decision.served, request)

    def verdict(self, decision: Decision, request: PlacementRequest) -> CanaryVerdict | None:
        """Which revision a request that was decided on falls to, and why; None where its policy tries none."""
        _, own, by_group, _ = self._pools[decision.pool]
        rule = by_group.get(decision.group, own).canary_rule
        return None if rule is None else rule.verdict(request, decision.served)

    def preferred_replicas(
        self, pool: str, opening: PrefixKey, replica: str, adapter: str, health: HealthRegistry
    ) -> list[TargetId]:
        """Those of a replica's targets that a task group's opening will call home, once the replica takes traffic."""
        group, prefix = opening
        _, own, by_group, _ = self._pools[pool]
        route = by_group.get(group) if group else own
        if route is None:
            return []
        replicas = route.replicas

        def is_there(target: TargetId) -> bool:
            configured = replicas.targets[target].replica
            return (
                configured.state is ReplicaState.ACTIVE
                and health.will_be_up(ReplicaId(configured.name))
                and (not adapter or replicas.holds(target, adapter, health))
            )

        return preferred_among(route, prefix, self.targets_by_replica.get(replica, []), is_there)

    def could_serve(self, missing: NoReplicaError, replica: str, health: HealthRegistry) -> bool:
        """Whether a replica of that pool would have been eligible, had it not been kept back."""
        _, own, by_group, _ = self._pools[missing.pool]
        replicas, adapter = by_group.get(missing.group, own).replicas, missing.adapter
        targets = [target for target in self.targets_by_replica[replica] if target in replicas.targets]
        holds = any(not adapter or replicas.holds(target, adapter, health) for target in targets)
        return holds and health.will_be_up(ReplicaId(replica))

    def warmed(self, pool: str, target: TargetId, cut: WarmUpPrompt) -> None:
        """A target has prefilled an opening: it holds that, where the pool asks."""
        if pool in self._asks_residency:
            self._residency.insert(target, cut.blocks, self._loads.clock(), cut.tokens)

    def dispatch(self, decision: Decision, *, is_retry: bool = False, is_plain: bool = False) -> Ticket:
        """Count a decision as sent: its load, and where its pool asks for it, what the replica will hold.

        A request counts as traffic once, however often it is tried. ``is_plain``: its response is not streamed.
        """
        route = decision.route
        if not is_retry:
            if route.shares is not None:
                route.shares.count(route.group)
            if route.counting is not None:
                route.counting.count_request(decision.keys)
        residency = self._residency if route.pool in self._asks_residency else None
        if residency is not None:
            residency.resize(decision.choice.target, decision.keys.ratio.block_tokens)
        ticket = count_as_sent(decision.choice, decision.keys, self._loads, residency, is_plain=is_plain)
        ticket.teach(decision.keys.ratio, decision.keys.sample_bytes)
        return ticket


def count_as_sent(
    choice: Choice, keys: Keys, loads: LoadTracker, residency: Residency | None, *, is_plain: bool = False
) -> Ticket:
    """Enter a choice's work, and what its replica will hold; None where nobody asks what replicas hold."""
    tokens = keys.prompt_tokens
    if residency is None:
        return loads.dispatch(choice.target, tokens, is_plain=is_plain)
    stay = residency.insert(choice.target, keys.chain, loads.clock(), tokens, keys.block_tokens)
    return loads.dispatch(choice.target, max(0, tokens - (choice.hit_tokens or 0)), stay, is_plain=is_plain)


def _usable(route: Route, whole: Candidates, adapter: str, excluded: Collection[ReplicaId]) -> Candidates:
    """Those of a pool's or a group's eligible replicas that are its own just now, and not excluded."""
    own = whole
    if route.follows_traffic and route.shares is not None:
        own = route.shares.candidates(route.group, route.replicas, whole, adapter)
    if not excluded:
        return own
    refused = [name for replica in excluded for name in route.replicas.targets_of_replica(replica)]
    if route.follows_traffic and route.shares is not None:
        return route.shares.untried(route.group, route.replicas, whole.without(refused), own)
    return own.without(refused)
