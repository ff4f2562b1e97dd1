"""What a draft, another revision or another configuration would mean in the present fleet. Reads; writes nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from controlplane.errors import ConflictError, DecryptionError
from controlplane.models import ConfigSnapshot, PolicyRevision, RoutingPolicy
from controlplane.push.snapshot import build_config
from controlplane.services.impact import Effect, compare_configs, with_settings
from controlplane.services.policies.warnings import DraftWarning, warnings_of
from controlplane.services.snapshots import snapshot_document
from routing import schema
from routing.schema import HIDDEN

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
    fleet = present_fleet() if fleet is None else fleet
    former = fleet if before is None else _in_force(fleet, policy, before)
    return compare_configs(former, _in_force(fleet, policy, after))


def warnings_of_settings(
    policy: RoutingPolicy, settings: dict[str, Any], *, fleet: schema.RouterConfig | None = None
) -> list[DraftWarning]:
    """What to look at before these settings go live in the fleet as it is now. Queries as ``effects_of_settings``."""
    fleet = present_fleet() if fleet is None else fleet
    group = policy.group.name if policy.group else None
    return warnings_of(_in_force(fleet, policy, settings), policy.pool.name, group)


def effects_of_revisions(before: PolicyRevision, after: PolicyRevision) -> list[Effect]:
    """What one revision does instead of another one of the same policy, in the fleet as it is now."""
    return effects_of_settings(after.policy, before.settings, after.settings)


def effects_of_configurations(before: ConfigSnapshot | None, after: ConfigSnapshot) -> list[Effect]:
    """What changed between two configurations, as routers ran them; ConflictError where one cannot be read any more."""
    return compare_configs(configuration_of(before) if before else None, configuration_of(after))


def present_fleet() -> schema.RouterConfig:
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
