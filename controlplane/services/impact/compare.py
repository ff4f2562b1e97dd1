"""Compares two configurations: access, the rules of the other modules, and every field without a rule.

The functions that take models compare settings, revisions and snapshots in the current fleet. They only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import inspect
from msgspec.structs import replace

from controlplane.errors import ConflictError, DecryptionError
from controlplane.models import ConfigSnapshot, PolicyRevision, RoutingPolicy
from controlplane.push.snapshot import build_config
from controlplane.services.impact.effect import (
    Differences,
    Effect,
    Impact,
    Path,
    find_differences,
    format_value,
    is_explained,
    leaves_of,
    sort_by_severity,
)
from controlplane.services.impact.fleet import fleet_effects
from controlplane.services.impact.placement import placement_effects
from controlplane.services.impact.warnings import DraftWarning, warnings_of
from controlplane.services.snapshots import snapshot_document
from routing import schema
from routing.schema import HIDDEN, SECRET_FIELDS

_NO_SECRET = "0" * 32  # comparisons of policies do not depend on the hash secret
_PLACEHOLDERS = {"hash_secret": _NO_SECRET, "digest": "0" * 64, "api_key": "hidden"}


# --- rows -----------------------------------------------------------------------------------------------


def effects_of_settings(
    policy: RoutingPolicy,
    before: dict[str, Any] | None,
    after: dict[str, Any],
    *,
    fleet: schema.RouterConfig | None = None,
) -> list[Effect]:
    """Effects of replacing a policy's settings in the current fleet; ``before`` None: the active configuration.

    A fixed number of queries, none with a ``fleet``.
    """
    fleet = current_fleet() if fleet is None else fleet
    old_config = fleet if before is None else _with_settings(fleet, policy, before)
    return compare_configs(old_config, _with_settings(fleet, policy, after))


def warnings_of_settings(
    policy: RoutingPolicy, settings: dict[str, Any], *, fleet: schema.RouterConfig | None = None
) -> list[DraftWarning]:
    """Likely mistakes in these settings in the current fleet. Queries as ``effects_of_settings``."""
    fleet = current_fleet() if fleet is None else fleet
    group = policy.group.name if policy.group else None
    return warnings_of(_with_settings(fleet, policy, settings), policy.pool.name, group)


def effects_of_revisions(before: PolicyRevision, after: PolicyRevision) -> list[Effect]:
    """Effects of one revision compared with another of the same policy, in the current fleet."""
    return effects_of_settings(after.policy, before.settings, after.settings)


def effects_of_configurations(before: ConfigSnapshot | None, after: ConfigSnapshot) -> list[Effect]:
    """Effects of one snapshot compared with an earlier one; ConflictError if a snapshot can no longer be read."""
    return compare_configs(_config_of(before) if before else None, _config_of(after))


def current_fleet() -> schema.RouterConfig:
    """The configuration of the current rows, without the hash secret. A fixed number of queries."""
    return build_config(_NO_SECRET)


def _config_of(snapshot: ConfigSnapshot) -> schema.RouterConfig:
    """The snapshot's configuration; without its secrets if the key that encrypted it is no longer configured."""
    try:
        return schema.load_snapshot(snapshot_document(snapshot)).config
    except (DecryptionError, schema.ConfigError):
        pass
    try:
        return msgspec.convert(schema.without_removed(_fill_hidden(snapshot.document)), schema.RouterConfig)
    except msgspec.ValidationError as error:
        raise ConflictError(
            f"Configuration {snapshot.number} was written by a release whose format this release cannot read: {error}."
        ) from None


def _fill_hidden(value: Any, name: str = "") -> Any:
    """The document with valid placeholders for hidden secrets."""
    if isinstance(value, dict):
        return {key: _fill_hidden(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill_hidden(inner, name) for inner in value]
    return _PLACEHOLDERS.get(name, value) if value == HIDDEN else value


def _with_settings(fleet: schema.RouterConfig, policy: RoutingPolicy, settings: dict[str, Any]) -> schema.RouterConfig:
    config = schema.PolicyConfig(policy.name, 1, msgspec.convert(settings, schema.Settings))
    return with_policy(fleet, config, pool=policy.pool.name, group=policy.group.name if policy.group else None)


# --- configurations -------------------------------------------------------------------------------------


def compare_configs(before: schema.RouterConfig | None, after: schema.RouterConfig) -> list[Effect]:
    """All effects of a change, most severe first; [] if nothing differs. Pure.

    Every difference is in the ``paths`` of at least one effect.
    """
    differences = find_differences(leaves_of(before), leaves_of(after))
    if not differences:
        return []
    effects: list[Effect] = []
    for rules in (_access_effects, fleet_effects, placement_effects):
        effects += rules(before, after, differences)
    described = {path for effect in effects for path in effect.paths}
    effects += field_effects({path: sides for path, sides in differences.items() if not is_explained(path, described)})
    return sort_by_severity(effects)


def with_policy(
    config: schema.RouterConfig, policy: schema.PolicyConfig, *, pool: str, group: str | None
) -> schema.RouterConfig:
    """The configuration with another policy for a pool, or for one of its task groups."""

    def replace_policy(candidate: schema.PoolConfig) -> schema.PoolConfig:
        if candidate.name != pool:
            return candidate
        if group is None:
            return replace(candidate, policy=policy)
        groups = (replace(entry, policy=policy) if entry.name == group else entry for entry in candidate.groups)
        return replace(candidate, groups=tuple(groups))

    return replace(config, pools=tuple(replace_policy(candidate) for candidate in config.pools))


def _access_effects(
    before: schema.RouterConfig | None, after: schema.RouterConfig, differences: Differences
) -> Iterator[Effect]:
    """Effects of a new hash secret, and of added, removed and changed API keys."""
    if before is None:
        return
    if ("hash_secret",) in differences:
        text = (
            "The fleet's hash secret changes. All prefixes get new hashes, so every cache starts cold. Prefix hashes "
            "in earlier records no longer match."
        )
        yield Effect("hash_secret", Impact.COLD_CACHES, ("every request",), text, paths=(("hash_secret",),))
    affected = ("every client",)
    if ("access",) in differences:  # API keys become required, or are no longer required
        text, old, new = "Requests no longer need an API key.", "required", "not required"
        if after.access is not None:
            keys = f"{len(after.access.keys):,} configured"
            text, old, new = f"Requests need an API key ({keys}); others are rejected with 401.", new, old
        yield Effect("access", Impact.ACCESS, affected, text, old, new, 0.0, (("access",),))
    if before.access is None or after.access is None:
        return
    old_keys, new_keys = ({key.name for key in side.keys} for side in (before.access, after.access))
    for name in sorted(old_keys | new_keys):
        path: Path = ("access", "keys", name)
        affected = (f"API key {name}",)
        if name not in old_keys:
            yield Effect(
                "key_added", Impact.ACCESS, affected, f"API key {name} is now accepted.", None, name, 0.0, (path,)
            )
        elif name not in new_keys:
            text = f"API key {name} is no longer accepted: its requests are rejected with 401."
            yield Effect("key_removed", Impact.ACCESS, affected, text, name, None, 0.0, (path,))
        elif (*path, "digest") in differences:
            text = f"API key {name} has a new secret: requests with the previous one are rejected with 401."
            yield Effect("key_secret", Impact.ACCESS, affected, text, None, None, 0.0, ((*path, "digest"),))


# --- fields without a rule ------------------------------------------------------------------------------

# Fields and branches that decide which requests are accepted.
_ACCEPTANCE = frozenset(
    {"access", "adapters", "aliases", "allowed_origins", "api_key", "caps", "concurrency", "models", "paths"}
)
_SESSIONS = frozenset({"match", "session_keys"})  # what decides the task group or the session of a request
_UNSET = {"paths": "all", "session_keys": "the default"}  # what null means, where that is not "none"
_OBJECTS = {"pools": "pool", "groups": "task group", "replicas": "replica", "keys": "API key"}


def field_effects(leaves: Mapping[Path, tuple[Any, Any]]) -> Iterator[Effect]:
    """One effect for each leaf, described with the schema's own text."""
    for path, (before, after) in leaves.items():
        objects = [f"{_OBJECTS[step]} {name}" for step, name in pairwise(path) if step in _OBJECTS]
        field_start = max((index + 2 for index, step in enumerate(path[:-1]) if step in _OBJECTS), default=0)
        field = ".".join(path[field_start:])
        unit, description = _schema_text(path)
        subject = " of ".join(reversed(objects)) or "every router"
        old, new = (_UNSET.get(path[-1], "none") if value is None else _text(value, path) for value in (before, after))
        text = f"{subject[0].upper()}{subject[1:]}: {field} is {new} instead of {old}{' ' if unit else ''}{unit}."
        if path[-1] == "url":
            description = "The replica keeps its ring position; its cache may be cold."
        is_limit = path[0] == "limits" and path[-1].startswith("max_")
        impact = Impact.MOVE if _SESSIONS & set(path) else Impact.PLACEMENT
        if is_limit or _ACCEPTANCE & set(path):
            impact = Impact.ACCESS
        sides = _hide(before, path), _hide(after, path)
        affected = (objects or ["every request"])[-1]
        yield Effect("field", impact, (affected,), f"{text} {description}".strip(), *sides, None, (path,))


def _text(value: Any, path: Path) -> str:
    return format_value(_hide(value, path), path[-1])


def _hide(value: Any, path: Path) -> Any:
    """The value without secrets."""
    if path[-1] in SECRET_FIELDS and value:
        return HIDDEN
    if isinstance(value, dict):
        return {name: _hide(inner, tuple(name.split("."))) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(inner, path) for inner in value]
    return value


_Typed = tuple[Any, str, str]  # a type, and the unit and description of its annotation


@cache
def _root_types() -> list[_Typed]:
    return list(_flatten(inspect.type_info(schema.RouterConfig)))


def _schema_text(path: Path) -> tuple[str, str]:
    """Unit and description of a leaf; "" where the schema has none."""
    types = _root_types()
    for step in path:
        types = [inner for kind, _, _ in types for inner in _member_types(kind, step)]
    return next(((unit, text) for _, unit, text in types if unit or text), ("", ""))


def _member_types(kind: Any, step: str) -> Iterator[_Typed]:
    """The types of a field, or of a member of a list of named objects."""
    if isinstance(kind, inspect.VarTupleType):
        yield from _flatten(kind.item_type)
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            if field.encode_name == step:
                yield from _flatten(field.type)


def _flatten(kind: Any, unit: str = "", text: str = "") -> Iterator[_Typed]:
    """The members of a union, without annotations."""
    if isinstance(kind, inspect.Metadata):
        unit = unit or (kind.extra or {}).get("unit", "")
        yield from _flatten(kind.type, unit, text or (kind.extra_json_schema or {}).get("description", ""))
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _flatten(member, unit, text)
    else:
        yield kind, unit, text
