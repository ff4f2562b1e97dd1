"""What a configuration says of each pool's own requests and of each task group's: policy, strategy, replicas, trial.

While a policy tries another revision there are two routes for the same requests: they differ in the policy's revision,
its settings and its strategy, and share everything else, what replicas hold, do and are measured at included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from msgspec import structs
from xxhash import xxh3_64_intdigest

from routing.balancing.allocation import GroupShares
from routing.balancing.canary import Arm, CanaryRule
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.replicas import GroupReplicas
from routing.balancing.residency import Residency
from routing.balancing.strategies.registry import build_strategy
from routing.balancing.strategies.strategy import CarriesOver, FollowsTraffic, Strategy
from routing.balancing.task_groups import policy_of, said_tier1, tier1_rule
from routing.prompt.hashing import PrefixHasher
from routing.schema import PolicyConfig, PoolConfig, ResidencySettings, TaskGroupConfig, Tier1


@dataclass(frozen=True, slots=True)
class Route:
    """One pool's own requests, or one task group's; of these, while a trial lasts, one revision's."""

    pool: str
    group: str  # "" for the pool's own
    policy: PolicyConfig  # with the revision that places, and its settings
    strategy: Strategy
    counting: FollowsTraffic | None  # the strategy, where it goes by the requests that came
    replicas: GroupReplicas
    tier1: Tier1  # where tier 1 ends
    shares: GroupShares | None  # that its requests count in; None: no group of the pool follows its traffic
    follows_traffic: bool  # whether they say which replicas it has
    arm: Arm | None = None  # None: the policy has no trial
    canary_rule: CanaryRule | None = None  # of the policy, where this is the revision in force
    canary_route: CanaryRoute | None = None  # who gets some of its requests; None: there is no trial here


class CanaryRoute(NamedTuple):
    """A trial at work: the requests that ``rule`` takes go by ``route``."""

    rule: CanaryRule
    route: Route


class RouteBuilder:
    """Makes the routes of one pool. ``router`` is this router's name, by which trials may ask for it.

    Each route draws by a seed of its own, and each set of replicas breaks ties by one: two groups that drew alike would
    send their requests to the same replicas at the same time.
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
        self._pool = pool
        self._hasher = hasher
        self._loads = loads
        self._residency = residency
        self._seed = seed
        self._router = router
        self._replicas: dict[frozenset[str], GroupReplicas] = {}
        self.shares = GroupShares(pool, hasher) if any(group.auto_replicas for group in pool.groups) else None

    def route(self, group: TaskGroupConfig | None) -> Route:
        """The route of a task group, or of the pool's own requests; behind it the one of its policy's trial."""
        policy = policy_of(self._pool, group)
        if policy.trial is None:
            return self._placed_by(policy, group)
        trial, name = policy.trial, group.name if group else ""
        said = said_tier1(self._pool, group)
        rule = CanaryRule(policy, trial, self._hasher, said, router=self._router, group=name)
        in_force = replace(self._placed_by(policy, group), arm=Arm.IN_FORCE, canary_rule=rule)
        if not rule.is_here:
            return in_force
        on_trial = structs.replace(policy, revision=trial.revision, settings=trial.settings, trial=None)
        return replace(
            in_force, canary_route=CanaryRoute(rule, replace(self._placed_by(on_trial, group), arm=Arm.TRIAL))
        )

    def _placed_by(self, policy: PolicyConfig, group: TaskGroupConfig | None) -> Route:
        """The route that one revision makes."""
        replicas, name = self._replicas_of(group), group.name if group else ""
        strategy = build_strategy(policy.settings, replicas, self._seed_of("route", name, str(policy.revision)))
        return Route(
            self._pool.name,
            name,
            policy,
            strategy,
            strategy if isinstance(strategy, FollowsTraffic) else None,
            replicas,
            tier1_rule(self._pool, group, policy.settings),
            self.shares,
            follows_traffic=self.shares is not None and (group is None or group.auto_replicas is not None),
        )

    def _replicas_of(self, group: TaskGroupConfig | None) -> GroupReplicas:
        """Those of a group, or of the whole pool; groups that use the same ones share ring and sums."""
        chosen = None if group is None or group.replicas is None else frozenset(group.replicas)
        configs = [replica for replica in self._pool.replicas if chosen is None or replica.name in chosen]
        names = frozenset(replica.name for replica in configs)
        if names not in self._replicas:
            seed = self._seed_of("replicas", *sorted(names))
            self._replicas[names] = GroupReplicas(configs, self._loads, seed, self._residency)
        return self._replicas[names]

    def _seed_of(self, *what: str) -> int:
        """A seed for one thing in this pool: the same each time for the same router."""
        return xxh3_64_intdigest("\n".join((self._pool.name, *what)).encode(), self._seed)


def asks_residency(pool: PoolConfig) -> bool:
    """Whether any policy of the pool asks what replicas hold: then everybody's requests are entered.

    A revision on trial counts on every router, so that one to which the trial is widened knows already.
    """
    policies = [pool.policy, *(group.policy for group in pool.groups if group.policy)]
    settings = [policy.settings for policy in policies] + [it.trial.settings for it in policies if it.trial]
    return any(isinstance(one, ResidencySettings) for one in settings)


def carry_over(routes: Iterable[Route], before: Iterable[Route]) -> None:
    """Let strategies go on from what they had learned for the same requests as the same revision, tried or in force."""
    known = {_identity(route): route.strategy for route in _with_trials(before)}
    for route in _with_trials(routes):
        earlier = known.get(_identity(route))
        if earlier is not None and isinstance(route.strategy, CarriesOver):
            route.strategy.carry_over(earlier)


def _with_trials(routes: Iterable[Route]) -> Iterator[Route]:
    for route in routes:
        yield route
        if route.canary_route is not None:
            yield route.canary_route.route


def _identity(route: Route) -> tuple[object, ...]:
    policy = route.policy
    return route.pool, route.group, policy.name, policy.revision, policy.settings
