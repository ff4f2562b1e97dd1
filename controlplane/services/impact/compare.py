"""What stands before placement: the secret in every key, who is let in, which models are served.

A sentence for whatever no rule explains, from what the schema says of the field. Nothing stays unsaid.

Comparing two configurations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
from msgspec.structs import replace

from controlplane.errors import ConflictError, DecryptionError
from controlplane.models import ConfigSnapshot, PolicyRevision, RoutingPolicy
from controlplane.push.snapshot import build_config
from controlplane.services.impact.effect import (
    Differences,
    Effect,
    Impact,
    Path,
    differing,
    explained,
    in_order,
    leaves_of,
    several,
    shown,
    some,
)
from controlplane.services.impact.fleet import fleet_effects
from controlplane.services.impact.placement import placement_effects
from controlplane.services.impact.warnings import DraftWarning, warnings_of
from controlplane.services.snapshots import snapshot_document
from routing import schema
from routing.schema import HIDDEN, SECRET_FIELDS

ANYBODY, KEYS = "anybody", "API keys only"


def front_effects(
    before: schema.RouterConfig | None, after: schema.RouterConfig, left: Differences
) -> Iterator[Effect]:
    """The secret, access, and the names of models."""
    if before is None:
        return
    if ("hash_secret",) in left:
        text = (
            "The fleet's hash secret is another: every key is hashed anew, so all homes move, everything is cold at "
            "first, and hashes of prefixes noted before match nothing."
        )
        yield Effect("hash_secret", Impact.RESET, ("every request",), text, None, None, None, (("hash_secret",),))
    yield from _access(before.access, after.access, left)
    yield from _models(before, after, left)


def _access(before: schema.Access | None, after: schema.Access | None, left: Differences) -> Iterator[Effect]:
    who = ("every client",)
    if before is None or after is None:
        if ("access",) in left:
            now, was = (KEYS, ANYBODY) if after else (ANYBODY, KEYS)
            rule = (
                f"with one of {several(len(after.keys), 'API key')}; all others get 401" if after else "without a key"
            )
            text = f"Requests are let in {rule}."
            yield Effect("access", Impact.REFUSE, who, text, was, now, 0.0, (("access",),))
        return
    old, new = {key.name: key for key in before.keys}, {key.name: key for key in after.keys}
    for name in dict.fromkeys((*new, *old)):
        place: Path = ("access", "keys", name)
        client = (f"API key {name}",)
        if name not in old:
            yield Effect("key_added", Impact.REFUSE, client, f"API key {name} is let in.", None, name, 0.0, (place,))
        elif name not in new:
            text = f"API key {name} is let in no more: its requests get 401."
            yield Effect("key_removed", Impact.REFUSE, client, text, name, None, 0.0, (place,))
        elif (*place, "digest") in left:
            text = f"API key {name} has another secret: clients that send the former one get 401."
            yield Effect("key_secret", Impact.REFUSE, client, text, None, None, 0.0, ((*place, "digest"),))


def _models(before: schema.RouterConfig, after: schema.RouterConfig, left: Differences) -> Iterator[Effect]:
    old = {pool.name: pool for pool in before.pools}
    for pool in after.pools:
        place: Path = ("pools", pool.name)
        fields = ("models", "aliases", "adapters")
        paths = left.under(*((*place, field) for field in fields))
        if pool.name not in old or not paths:
            continue
        was, now = ({name: _stands_for(one, name) for name, _ in one.names} for one in (old[pool.name], pool))
        new, gone = sorted(now.keys() - was.keys()), sorted(was.keys() - now.keys())
        other = sorted(name for name in now.keys() & was.keys() if now[name] != was[name])
        words = [f"takes {some(new)}" if new else "", f"takes {some(gone)} no more" if gone else ""]
        words += [f"takes {some(other)} for another model than before" if other else ""]
        said = ", ".join(word for word in words if word) or "says its models in another order"
        if not pool.models and old[pool.name].models:
            said = "takes any model that no other pool serves"
        text = f"Pool {pool.name} {said}."
        yield Effect("models", Impact.REFUSE, (f"pool {pool.name}",), text, sorted(was), sorted(now), None, paths)


def _stands_for(pool: schema.PoolConfig, name: str) -> str:
    named = {one.name: one.model for one in pool.aliases} | {one.name: one.model for one in pool.adapters}
    return named.get(name, name)


_REFUSING = frozenset({"caps", "concurrency", "access"})  # branches that say which requests are taken
_STEPS = {"pools": "pool", "groups": "task group", "replicas": "replica", "keys": "API key"}


def plain_effects(left: Mapping[Path, tuple[Any, Any]]) -> Iterator[Effect]:
    """One effect for each leaf."""
    for path, (before, after) in left.items():
        place, field, unit, meaning = described(path)
        old, new = (shown(_safe(value, path), path[-1]) for value in (before, after))
        text = f"{place}: {field} is {new} instead of {old}{f' {unit}' if unit else ''}."
        text = f"{text} {meaning}".strip() if meaning else text
        impact = Impact.REFUSE if _refuses(path) else Impact.STEER
        yield Effect("field", impact, (_who(path),), text, _safe(before, path), _safe(after, path), None, (path,))


def _refuses(path: Path) -> bool:
    return bool(_REFUSING & set(path)) or (path[0] == "limits" and path[-1].startswith("max_"))


def described(path: Path) -> tuple[str, str, str, str]:
    """Where a leaf stands, what it is called, its unit, and what it means; "" where the schema does not say."""
    meta = _meta(path)
    steps = _readable(path)
    place = " of ".join(reversed(steps)) if steps else "Every router"
    section = "" if not (rest := _rest(path)) else f"{rest} "
    return place[0].upper() + place[1:], f"{section}{path[-1].replace('_', ' ')}", *meta


def _readable(path: Path) -> list[str]:
    """pools.chat.groups.a as "pool chat", "task group a"."""
    return [f"{_STEPS[step]} {name}" for step, name in pairwise(path) if step in _STEPS]


def _rest(path: Path) -> str:
    """The branches between the last named thing and the leaf."""
    after = max((at + 2 for at, step in enumerate(path[:-1]) if step in _STEPS), default=0)
    return ", ".join(step.replace("_", " ") for step in path[after:-1])


def _who(path: Path) -> str:
    return (_readable(path) or ["every request"])[-1]


def _safe(value: Any, path: Path) -> Any:
    """The value without what is secret in it."""
    if path[-1] in SECRET_FIELDS and value:
        return HIDDEN
    if isinstance(value, dict):
        return {name: _safe(inner, tuple(name.split("."))) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(inner, path) for inner in value]
    return value


@cache
def _meta(path: Path) -> tuple[str, str]:
    """Unit and description of a leaf."""
    kinds: list[Any] = [msgspec.inspect.type_info(schema.RouterConfig)]
    unit, text = "", ""
    for step in path:
        kinds, unit, text = _step(kinds, step)
    return unit, text


def _step(kinds: list[Any], step: str) -> tuple[list[Any], str, str]:
    """The types one step further in, and what the annotation there says."""
    found: list[Any] = []
    unit = text = ""
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.VarTupleType):
            found += _structs(kind.item_type)  # the step is the name of one of them
        elif isinstance(kind, msgspec.inspect.StructType):
            for field in kind.fields:
                if field.encode_name == step:
                    found += _structs(field.type)
                    unit, text = _said(field.type) if not text else (unit, text)
    return found, unit, text


def _structs(kind: Any) -> list[Any]:
    """What a type may be, without annotations and unions."""
    if isinstance(kind, msgspec.inspect.Metadata):
        return _structs(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return [one for part in kind.types for one in _structs(part)]
    return [kind]


def _said(kind: Any) -> tuple[str, str]:
    """Unit and description in a type's annotations, those of a union's parts included."""
    if isinstance(kind, msgspec.inspect.Metadata):
        inner = _said(kind.type)
        return (kind.extra or {}).get("unit", inner[0]), (kind.extra_json_schema or {}).get("description", inner[1])
    if isinstance(kind, msgspec.inspect.UnionType):
        return next((said for part in kind.types if any(said := _said(part))), ("", ""))
    return "", ""


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


_NO_SECRET = "0" * 32  # pages need none: no comparison of policies depends on it
_PLACEHOLDERS = {"hash_secret": _NO_SECRET, "digest": "0" * 64, "api_key": "hidden"}


def effects_of_settings(
    policy: RoutingPolicy,
    before: dict[str, Any] | None,
    after: dict[str, Any],
    *,
    fleet: schema.RouterConfig | None = None,
) -> list[Effect]:
    """What one version of a policy's settings does instead of another, in the fleet as it is now.

    ``before`` is None where the policy was in force nowhere. A fixed number of queries, none with a ``fleet``.
    """
    fleet = current_fleet() if fleet is None else fleet
    former = fleet if before is None else _in_force(fleet, policy, before)
    return compare_configs(former, _in_force(fleet, policy, after))


def warnings_of_settings(
    policy: RoutingPolicy, settings: dict[str, Any], *, fleet: schema.RouterConfig | None = None
) -> list[DraftWarning]:
    """What to look at before these settings go live in the fleet as it is now. Queries as ``effects_of_settings``."""
    fleet = current_fleet() if fleet is None else fleet
    group = policy.group.name if policy.group else None
    return warnings_of(_in_force(fleet, policy, settings), policy.pool.name, group)


def effects_of_revisions(before: PolicyRevision, after: PolicyRevision) -> list[Effect]:
    """What one revision does instead of another one of the same policy, in the fleet as it is now."""
    return effects_of_settings(after.policy, before.settings, after.settings)


def effects_of_configurations(before: ConfigSnapshot | None, after: ConfigSnapshot) -> list[Effect]:
    """What changed between two configurations, as routers ran them; ConflictError where one cannot be read any more."""
    return compare_configs(configuration_of(before) if before else None, configuration_of(after))


def current_fleet() -> schema.RouterConfig:
    """What the rows say now, without the fleet's secret. A fixed number of queries."""
    return build_config(_NO_SECRET)


def configuration_of(snapshot: ConfigSnapshot) -> schema.RouterConfig:
    """A configuration as routers got it; where its seal cannot be opened, as people see it, without its secrets."""
    try:
        return schema.load_snapshot(snapshot_document(snapshot)).config
    except (DecryptionError, schema.ConfigError):
        return _from_document(snapshot)


def _from_document(snapshot: ConfigSnapshot) -> schema.RouterConfig:
    try:
        return msgspec.convert(_filled(snapshot.document), schema.RouterConfig)
    except msgspec.ValidationError as error:
        release = "a release whose configurations this one cannot read"
        raise ConflictError(f"Configuration {snapshot.number} was written by {release}: {error}.") from None


def _filled(value: Any, name: str = "") -> Any:
    """The document with something well formed where a secret was taken out."""
    if isinstance(value, dict):
        return {key: _filled(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, name) for inner in value]
    return _PLACEHOLDERS.get(name, value) if value == HIDDEN else value


def _in_force(fleet: schema.RouterConfig, policy: RoutingPolicy, settings: dict[str, Any]) -> schema.RouterConfig:
    config = schema.PolicyConfig(policy.name, 1, msgspec.convert(settings, schema.Settings))
    return with_settings(fleet, config, pool=policy.pool.name, group=policy.group.name if policy.group else None)
