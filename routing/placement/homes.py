"""Which replicas an opening will be sent to, before it is: what warming a replica goes by.

A strategy that goes by the hash of an opening has a home or a few for each: of a hot one, under ``affinity_groups``,
as many of its home order as it has replicas of its own, whichever those are. Under one that goes by what replicas hold,
whoever is sent an opening is its home from then on, so the home order divides them. Under any other they come
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice

from routing.core.types import PrefixHash, TargetId
from routing.placement.routes import Route
from routing.schema import ResidencySettings, Tier1Settings, TieredSettings
from routing.strategies.affinity_groups import AffinityGroups


def homes_among(
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
