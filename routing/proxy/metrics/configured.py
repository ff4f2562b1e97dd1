"""Which labels of figures are in a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from routing.proxy.metrics.metrics import SeriesKey
from routing.schema import PoolConfig, RouterConfig


@dataclass(frozen=True, slots=True)
class _Labels:
    """What may stand beside a pool's name. Of groups and replicas also the empty one, which stands for any."""

    groups: frozenset[str]
    replicas: frozenset[str]
    policies: frozenset[tuple[str, int]]  # with their revisions, those on trial included
    tried: frozenset[tuple[str, int]]  # both revisions of those with a trial


class ConfiguredSeries:
    """The series of one configuration: made once, since every scrape asks about each series. O(1) an answer."""

    __slots__ = ("_pools",)

    def __init__(self, config: RouterConfig) -> None:
        self._pools = {pool.name: _labels(pool) for pool in config.pools}

    def holds(self, key: SeriesKey, *, tried: bool = False) -> bool:
        """Whether all labels are configured. Empty ones stand for any, and so does a policy without a name.

        ``tried``: whether the policy has a trial, too.
        """
        pool, group, replica, policy, revision = key
        if not pool:
            return True
        labels = self._pools.get(pool)
        if labels is None or group not in labels.groups or replica not in labels.replicas:
            return False
        if tried:
            return (policy, revision) in labels.tried
        return not policy or (policy, revision) in labels.policies


def _labels(pool: PoolConfig) -> _Labels:
    policies = [pool.policy, *(group.policy for group in pool.groups if group.policy)]
    in_force = {(policy.name, policy.revision) for policy in policies}
    on_trial = {(policy.name, policy.trial.revision) for policy in policies if policy.trial}
    beside = {(policy.name, policy.revision) for policy in policies if policy.trial}
    return _Labels(
        groups=frozenset(["", *(group.name for group in pool.groups)]),
        replicas=frozenset(["", *(replica.name for replica in pool.replicas)]),
        policies=frozenset(in_force | on_trial),
        tried=frozenset(beside | on_trial),
    )
