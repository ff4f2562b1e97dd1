"""Comparing two configurations."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from routing import schema

from .effect import Effect, in_order
from .fleet import fleet_effects
from .front import front_effects
from .leaves import differing, explained, leaves_of
from .placement import placement_effects
from .plain import plain_effects


def compare_configs(before: schema.RouterConfig | None, after: schema.RouterConfig) -> list[Effect]:
    """Everything that changes and for whom, the gravest first; [] where nothing does. ``before`` None: there was none.

    Pure. Whatever differs is in the ``paths`` of at least one effect.
    """
    left = differing(leaves_of(before), leaves_of(after))
    if not left:
        return []
    found: list[Effect] = []
    for effects in (front_effects, fleet_effects, placement_effects):
        found += effects(before, after, left)
    claimed = {path for effect in found for path in effect.paths}
    found += plain_effects({path: values for path, values in left.items() if not explained(path, claimed)})
    return in_order(found)


def with_settings(
    config: schema.RouterConfig, policy: schema.PolicyConfig, *, pool: str, group: str | None
) -> schema.RouterConfig:
    """The same configuration with a pool's policy, or one of its task groups', in place of the present one."""
    pools = (_with_policy(one, policy, group) if one.name == pool else one for one in config.pools)
    return replace(config, pools=tuple(pools))


def _with_policy(pool: schema.PoolConfig, policy: schema.PolicyConfig, group: str | None) -> schema.PoolConfig:
    if group is None:
        return replace(pool, policy=policy)
    groups: Iterable[schema.TaskGroupConfig] = (
        replace(one, policy=policy) if one.name == group else one for one in pool.groups
    )
    return replace(pool, groups=tuple(groups))
