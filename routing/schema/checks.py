"""The rules of a whole configuration that types cannot say; those of one part stand with that part."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from routing.schema.access import check_access
from routing.schema.addresses import AddressRules
from routing.schema.base import ConfigError
from routing.schema.fleet import PoolConfig, RouterConfig
from routing.schema.groups import check_claimed_keys, check_groups
from routing.schema.models import check_held, check_names
from routing.schema.policies import check_trial
from routing.schema.ring import MAX_ON_RING
from routing.schema.urls import check_base_url


def check_config(config: RouterConfig) -> None:
    """The rules that types cannot say: unique names, known references, usable URLs."""
    _check_unique((pool.name for pool in config.pools), "$.pools", "pool")
    _check_unique((r.name for pool in config.pools for r in pool.replicas), "$.pools[*].replicas", "replica")
    _check_models(config)
    if config.replica_networks is not None:
        AddressRules(config.replica_networks)  # ConfigError for what is no network
    keys = {key.name for key in config.access.keys} if config.access else set()
    for index, pool in enumerate(config.pools):
        _check_pool(pool, f"$.pools[{index}]", keys)
    if config.access is not None:
        groups = {group.name for pool in config.pools for group in pool.groups}
        models = {name for pool in config.pools for name, _ in pool.names}
        check_access(config.access, groups, models if all(pool.models for pool in config.pools) else None)


def _check_pool(pool: PoolConfig, path: str, keys: Collection[str]) -> None:
    _check_unique((group.name for group in pool.groups), f"{path}.groups", "task group")
    adapters = {adapter.name for adapter in pool.adapters}
    for index, replica in enumerate(pool.replicas):
        check_base_url(replica.url, f"{path}.replicas[{index}].url")
        check_held(replica.adapters, adapters, f"{path}.replicas[{index}].adapters")
    ranks = sum(replica.data_parallel_size for replica in pool.replicas)
    if ranks > MAX_ON_RING:
        raise ConfigError(f"{path}.replicas", f"{ranks} replicas and ranks, where a pool has at most {MAX_ON_RING}")
    replicas = {replica.name for replica in pool.replicas}
    models = {name for name, _ in pool.names} if pool.models else None
    check_groups(pool.groups, replicas, models, pool.name, f"{path}.groups")
    check_claimed_keys(pool.groups, keys, f"{path}.groups")
    check_trial(pool.policy, f"{path}.policy", {group.name for group in pool.groups if group.policy is None})
    for index, group in enumerate(pool.groups):
        if group.policy is not None:
            check_trial(group.policy, f"{path}.groups[{index}].policy", None)


def _check_models(config: RouterConfig) -> None:
    """A name belongs to one pool, and at most one pool takes any model."""
    owners: dict[str, str] = {}
    any_model: str | None = None
    for index, pool in enumerate(config.pools):
        check_names(pool.names, pool.name, f"$.pools[{index}]", owners)
        if not pool.models and any_model is not None:
            raise ConfigError(f"$.pools[{index}].models", f"every model is already served by pool {any_model!r}")
        any_model = any_model if pool.models else pool.name


def _check_unique(names: Iterator[str], path: str, noun: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(path, f"two {noun}s are named {name!r}")
        seen.add(name)
