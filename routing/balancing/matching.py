"""Matches a request to what a configuration says about it: its pool and model by name, and its task group by rules.

An alias is another name for a model or an adapter, so prompts under both names share KV blocks. An adapter's KV blocks
are its own, although its weights are mostly those of the model that it adapts.

Task groups. The first rule that names a group of the pool decides: the header, the API key, the session key, the tier-1
prefix, the model. The order goes from what a client states on purpose to what many requests have in common. Requests
with an API key that is limited to some groups are an exception: they belong to the group that they name, else to the
key's first group, and no other rule applies. Rules that no group of a pool uses cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

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
from routing.types import MatchedBy, PrefixHash, UnknownModelError

MAX_UNKNOWN: Final = 256  # cached names that are in no configuration


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a model name in a request stands for."""

    pool: PoolConfig
    name: str  # as engines know it: the model's, or the adapter's
    model: str  # "" for an engine's default model
    adapter: str = ""  # "" for none


class Models:
    """The model names of all pools of a configuration."""

    def __init__(self, config: RouterConfig) -> None:
        self._by_name = {name: served for pool in config.pools for name, served in _names(pool).items()}
        self._unknown: dict[str, ServedModel] = {}  # other names, in the pool that serves any model
        self._any_model = next((pool for pool in config.pools if not pool.models), None)
        default = config.pools[0] if len(config.pools) == 1 else self._any_model
        model = default.models[0] if default and default.models else ""  # as vLLM: the first of its served names
        self._default = None if default is None else ServedModel(default, model, model)

    def resolve(self, name: str | None) -> ServedModel:
        """The model with this name, in the pool that serves any model if no other has it; else UnknownModelError.

        A request without a model gets the engine's default model if only one pool can be meant.
        """
        if name is None:
            served = self._default
        else:
            served = self._by_name.get(name) or self._unknown.get(name) or self._resolve_unknown(name)
        if served is None:
            raise UnknownModelError(name)
        return served

    def _resolve_unknown(self, name: str) -> ServedModel | None:
        if self._any_model is None:
            return None
        if len(self._unknown) >= MAX_UNKNOWN:
            self._unknown.clear()
        served = self._unknown[name] = ServedModel(self._any_model, name, name)
        return served


def _names(pool: PoolConfig) -> dict[str, ServedModel]:
    """Every name of a pool; aliases come last, because they stand for one of the others."""
    names = {model: ServedModel(pool, model, model) for model in pool.models}
    names |= {adapter.name: ServedModel(pool, adapter.name, adapter.model, adapter.name) for adapter in pool.adapters}
    aliases = {
        alias.name: names.get(alias.model) or ServedModel(pool, alias.model, alias.model) for alias in pool.aliases
    }
    return names | aliases


def policy_of(pool: PoolConfig, group: TaskGroupConfig | None) -> PolicyConfig:
    """The policy that places the requests of a task group, or of the pool itself."""
    return group.policy if group and group.policy else pool.policy


def configured_tier1(pool: PoolConfig, group: TaskGroupConfig | None) -> Tier1 | None:
    """The tier-1 boundary of the group, else of the pool; None if the policy decides."""
    return (group.tier1 if group else None) or pool.tier1


def tier1_rule(pool: PoolConfig, group: TaskGroupConfig | None, settings: Settings) -> Tier1:
    """The tier-1 boundary of the group, else of the pool, else of the policy's settings, else the default."""
    of_policy = settings.tier1 if isinstance(settings, Tier1Settings) else DEFAULT_TIER1
    return configured_tier1(pool, group) or of_policy


class MatchedGroup(NamedTuple):
    """A request's task group (None: the pool's own requests), and the rule that matched."""

    group: TaskGroupConfig | None
    by: MatchedBy


_UNMATCHED: Final = MatchedGroup(None, MatchedBy.UNMATCHED)
_NO_RULES: Final = GroupMatch()


class TaskGroupMatcher:
    """Finds the task groups of requests, for all pools."""

    def __init__(self, config: RouterConfig, hasher: PrefixHasher) -> None:
        self._by_pool = {pool.name: _PoolGroups(pool, hasher) for pool in config.pools}

    def of_pool(self, pool: str) -> Callable[[ServedModel, PlacementRequest], MatchedGroup]:
        """The function that finds the task group of a request to this pool."""
        return self._by_pool[pool].find

    def group(self, served: ServedModel, request: PlacementRequest) -> MatchedGroup:
        """The task group of a request."""
        return self._by_pool[served.pool.name].find(served, request)

    def tier1_hashes(self, served: ServedModel, request: PlacementRequest) -> dict[str, PrefixHash | None]:
        """By task group of the pool, the hash that claims this request if it is in ``match.tier1_hashes``."""
        return self._by_pool[served.pool.name].tier1_hashes(served, request)


class _PoolGroups:
    """The task groups of one pool."""

    def __init__(self, pool: PoolConfig, hasher: PrefixHasher) -> None:
        groups = pool.groups
        self._by_name = {group.name: group for group in groups}
        self._by_key = {name: group for group in groups for name in group.match.api_keys}
        self._by_key_prefix = _Prefixes((prefix, group) for group in groups for prefix in group.match.api_key_prefixes)
        self._by_session = _Prefixes((prefix, group) for group in groups for prefix in group.match.session_prefixes)
        self._boundaries = _boundaries(pool)
        self._by_model = {model: group for group in groups for model in group.match.models}
        self._has_rules = any(group.match != _NO_RULES for group in groups)
        self._hasher = hasher

    def find(self, served: ServedModel, request: PlacementRequest) -> MatchedGroup:
        """The group that the first matching rule names."""
        named = self._by_name.get(request.group) if request.group else None
        if request.key_groups is not None:
            return self._of_limited_key(named, request.group, request.key_groups)
        if named is not None:
            return MatchedGroup(named, MatchedBy.HEADER)
        return self._by_rules(served, request) if self._has_rules else _UNMATCHED

    def tier1_hashes(self, served: ServedModel, request: PlacementRequest) -> dict[str, PrefixHash | None]:
        """By task group, the hash of the request's tier-1 prefix at that group's boundary."""
        rules = {group.name: boundary.rule for boundary in self._boundaries for group in boundary.groups}
        return {name: self._tier1(served, request, rule) for name, rule in rules.items()}

    def _of_limited_key(
        self, named: TaskGroupConfig | None, header: str | None, groups: tuple[str, ...]
    ) -> MatchedGroup:
        """The group of a request whose API key is limited to ``groups``."""
        if header:
            return MatchedGroup(named, MatchedBy.HEADER) if named is not None and named.name in groups else _UNMATCHED
        first = next((self._by_name[name] for name in groups if name in self._by_name), None)
        return _UNMATCHED if first is None else MatchedGroup(first, MatchedBy.API_KEY)

    def _by_rules(self, served: ServedModel, request: PlacementRequest) -> MatchedGroup:
        if request.key and (group := self._by_key.get(request.key) or self._by_key_prefix.longest(request.key)):
            return MatchedGroup(group, MatchedBy.API_KEY)
        if request.session_key and (group := self._by_session.longest(request.session_key)):
            return MatchedGroup(group, MatchedBy.SESSION)
        for rule, _, by_hash in self._boundaries:
            if by_hash and (group := by_hash.get(self._tier1(served, request, rule))):
                return MatchedGroup(group, MatchedBy.TIER1)
        group = self._by_model.get(request.model or served.name) or self._by_model.get(served.name)
        return MatchedGroup(group, MatchedBy.MODEL) if group else _UNMATCHED

    def _tier1(self, served: ServedModel, request: PlacementRequest, rule: Tier1) -> PrefixHash | None:
        return self._hasher.tier1(request.prompt, served.model, rule, served.adapter)


class _Prefixes:
    """Task groups by a prefix of a text; the longest prefix wins."""

    def __init__(self, claims: Iterable[tuple[str, TaskGroupConfig]]) -> None:
        self._by_prefix = dict(claims)
        self._lengths = sorted({len(prefix) for prefix in self._by_prefix}, reverse=True)

    def longest(self, text: str) -> TaskGroupConfig | None:
        """The group that claims the longest prefix of a text. O(different lengths)."""
        return next((group for length in self._lengths if (group := self._by_prefix.get(text[:length]))), None)


class _BoundaryGroups(NamedTuple):
    """Task groups with the same tier-1 boundary, and the hashes that they claim."""

    rule: Tier1
    groups: list[TaskGroupConfig]
    by_hash: dict[PrefixHash | None, TaskGroupConfig]


def _boundaries(pool: PoolConfig) -> list[_BoundaryGroups]:
    """In the order of the configuration, so that a prompt is hashed once for each boundary."""
    boundaries: list[_BoundaryGroups] = []
    for group in pool.groups:
        rule = tier1_rule(pool, group, policy_of(pool, group).settings)
        boundary = next((boundary for boundary in boundaries if boundary.rule == rule), None)
        if boundary is None:
            boundaries.append(boundary := _BoundaryGroups(rule, [], {}))
        boundary.groups.append(group)
        boundary.by_hash.update({PrefixHash(int(hash_, 16)): group for hash_ in group.match.tier1_hashes})
    return boundaries
