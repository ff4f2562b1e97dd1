"""What holds for a task group: its own where it says something, else its pool's.

From a request to its task group.

Theory of operation. The first rule that names a group of the request's pool decides: the header, the API key, the
session key, the tier-1 prefix, the model. They go from what a client says on purpose to what many requests have in
common. A key that is good for some groups only is the exception: its requests are of the one that they name, else of
its first one, and no other rule is asked. Rules that no group of a pool uses cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from routing.balancing.models import ServedModel
from routing.balancing.request import PlacementRequest
from routing.prompt.hashing import DEFAULT_TIER1, PrefixHasher
from routing.schema import (
    GroupMatch,
    PolicyConfig,
    PoolConfig,
    RouterConfig,
    Settings,
    TaskGroupConfig,
    Tier1,
    Tier1Settings,
)
from routing.types import MatchedBy, PrefixHash


def policy_of(pool: PoolConfig, group: TaskGroupConfig | None) -> PolicyConfig:
    """The policy that places the requests of a task group, or of the pool itself."""
    return group.policy if group and group.policy else pool.policy


def said_tier1(pool: PoolConfig, group: TaskGroupConfig | None) -> Tier1 | None:
    """Where the group says that tier 1 ends, else the pool; None where it is for the policy to say."""
    return (group.tier1 if group else None) or pool.tier1


def tier1_rule(pool: PoolConfig, group: TaskGroupConfig | None, settings: Settings) -> Tier1:
    """Where tier 1 ends: where the group says, else the pool, else the policy's settings, else the default."""
    of_policy = settings.tier1 if isinstance(settings, Tier1Settings) else DEFAULT_TIER1
    return said_tier1(pool, group) or of_policy


class MatchedGroup(NamedTuple):
    """A request's task group, None for its pool's own requests, and the rule that said so."""

    group: TaskGroupConfig | None
    by: MatchedBy


_UNMATCHED: Final = MatchedGroup(None, MatchedBy.UNMATCHED)
_NO_RULES: Final = GroupMatch()


class TaskGroupMatcher:
    """The task groups of all pools, by what makes a request theirs."""

    __slots__ = ("_groups",)

    def __init__(self, config: RouterConfig, hasher: PrefixHasher) -> None:
        self._groups = {pool.name: _PoolGroups(pool, hasher) for pool in config.pools}

    def of_pool(self, pool: str) -> Callable[[ServedModel, PlacementRequest], MatchedGroup]:
        """What finds the task group of a request for this pool."""
        return self._groups[pool].find

    def group(self, served: ServedModel, request: PlacementRequest) -> MatchedGroup:
        """The task group of a request."""
        return self._groups[served.pool.name].find(served, request)

    def tier1_hashes(self, served: ServedModel, request: PlacementRequest) -> dict[str, PrefixHash | None]:
        """By task group of the pool, the hash that claims this request where ``match.tier1_hashes`` holds it."""
        return self._groups[served.pool.name].tier1_hashes(served, request)


class _PoolGroups:
    """The task groups of one pool."""

    __slots__ = ("_by_key", "_by_key_prefix", "_by_model", "_by_name", "_by_session", "_by_tier1", "_hasher", "_rules")

    def __init__(self, pool: PoolConfig, hasher: PrefixHasher) -> None:
        groups = pool.groups
        self._by_name = {group.name: group for group in groups}
        self._by_key = {name: group for group in groups for name in group.match.api_keys}
        self._by_key_prefix = _Prefixes((prefix, group) for group in groups for prefix in group.match.api_key_prefixes)
        self._by_session = _Prefixes((prefix, group) for group in groups for prefix in group.match.session_prefixes)
        self._by_tier1 = _by_boundary(pool)
        self._by_model = {model: group for group in groups for model in group.match.models}
        self._rules = any(group.match != _NO_RULES for group in groups)
        self._hasher = hasher

    def find(self, served: ServedModel, request: PlacementRequest) -> MatchedGroup:
        """The first rule that names a group."""
        named = self._by_name.get(request.group) if request.group else None
        if request.key_groups is not None:
            return self._of_key(named, request.group, request.key_groups)
        if named is not None:
            return MatchedGroup(named, MatchedBy.HEADER)
        return self._by_rules(served, request) if self._rules else _UNMATCHED

    def tier1_hashes(self, served: ServedModel, request: PlacementRequest) -> dict[str, PrefixHash | None]:
        """By task group, the hash of the request's opening at that group's boundary."""
        rules = {group.name: rule for rule, groups, _ in self._by_tier1 for group in groups}
        return {name: self._tier1(served, request, rule) for name, rule in rules.items()}

    def _of_key(self, named: TaskGroupConfig | None, asked: str | None, groups: tuple[str, ...]) -> MatchedGroup:
        """Of a key that is good for these groups alone."""
        if asked:
            return MatchedGroup(named, MatchedBy.HEADER) if named is not None and named.name in groups else _UNMATCHED
        first = next((self._by_name[name] for name in groups if name in self._by_name), None)
        return _UNMATCHED if first is None else MatchedGroup(first, MatchedBy.API_KEY)

    def _by_rules(self, served: ServedModel, request: PlacementRequest) -> MatchedGroup:
        """What the request itself tells; it names no group."""
        if request.key and (group := self._by_key.get(request.key) or self._by_key_prefix.longest(request.key)):
            return MatchedGroup(group, MatchedBy.API_KEY)
        if request.session_key and (group := self._by_session.longest(request.session_key)):
            return MatchedGroup(group, MatchedBy.SESSION)
        for rule, _, by_hash in self._by_tier1:
            if by_hash and (group := by_hash.get(self._tier1(served, request, rule))):
                return MatchedGroup(group, MatchedBy.TIER1)
        group = self._by_model.get(request.model or served.name) or self._by_model.get(served.name)
        return MatchedGroup(group, MatchedBy.MODEL) if group else _UNMATCHED

    def _tier1(self, served: ServedModel, request: PlacementRequest, rule: Tier1) -> PrefixHash | None:
        return self._hasher.tier1(request.prompt, served.model, rule, served.adapter)


class _Prefixes:
    """Task groups by how a text begins; a longer beginning comes before a shorter one."""

    __slots__ = ("_by_prefix", "_lengths")

    def __init__(self, claims: Iterable[tuple[str, TaskGroupConfig]]) -> None:
        self._by_prefix = dict(claims)
        self._lengths = sorted({len(prefix) for prefix in self._by_prefix}, reverse=True)

    def longest(self, text: str) -> TaskGroupConfig | None:
        """The group that claims the longest beginning of a text. O(different lengths)."""
        return next((group for length in self._lengths if (group := self._by_prefix.get(text[:length]))), None)


class _AtBoundary(NamedTuple):
    """Task groups with the same boundary, and those of their hashes that they claim."""

    rule: Tier1
    groups: list[TaskGroupConfig]
    by_hash: dict[PrefixHash | None, TaskGroupConfig]


def _by_boundary(pool: PoolConfig) -> list[_AtBoundary]:
    """In the order of the configuration, so that a prompt is hashed once for each boundary."""
    found: list[_AtBoundary] = []
    for group in pool.groups:
        rule = tier1_rule(pool, group, policy_of(pool, group).settings)
        place = next((it for it in found if it.rule == rule), None)
        if place is None:
            found.append(place := _AtBoundary(rule, [], {}))
        place.groups.append(group)
        place.by_hash.update({PrefixHash(int(hash_, 16)): group for hash_ in group.match.tier1_hashes})
    return found
