"""Serializers of a bundle: the whole fleet as one document, and what applying it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rest_framework import serializers
from rest_framework.exceptions import ValidationError

from controlplane.api.fields import SchemaField, check_unknown_fields
from controlplane.api.serializers.fleet import PoolInput, ReplicaInput, SourceInput, TaskGroupInput
from controlplane.api.serializers.policies import RolloutSerializer
from controlplane.models import ReplicaState, Rollout
from routing.schema import without_removed

Path = tuple[str | int, ...]


class BundleReplica(ReplicaInput):
    """A replica of the enclosing pool."""

    pool = None  # type: ignore[assignment]  # DRF's way to leave an inherited field out
    state = serializers.ChoiceField(choices=ReplicaState.choices, required=False)


class BundleGroup(TaskGroupInput):
    """A task group of the enclosing pool; with a null ``policy`` the pool's policy places it."""

    pool = None  # type: ignore[assignment]  # as above
    policy = serializers.DictField(required=False, allow_null=True)


class BundleSource(SourceInput):
    """A replica source of the enclosing pool."""

    pool = None  # type: ignore[assignment]  # as above


class BundlePool(PoolInput):
    """A pool. Missing fields stay unchanged; a list is complete where pruning is requested."""

    policy = serializers.DictField(required=False, help_text="A strategy's name and settings.")
    replicas = BundleReplica(many=True, required=False)
    groups = BundleGroup(many=True, required=False)
    sources = BundleSource(many=True, required=False)


class BundleSerializer(serializers.Serializer[Any]):
    """A bundle, as ``GET`` exports it."""

    format = serializers.IntegerField(min_value=1, max_value=1, help_text="1: the format described here.")
    reason = serializers.CharField(max_length=500, required=False, write_only=True, help_text="For the history.")
    override_reason = serializers.CharField(
        max_length=500,
        required=False,
        write_only=True,
        help_text="Why policies are published without the prediction that their pool requires.",
    )
    confirm_faulted = serializers.BooleanField(
        required=False,
        write_only=True,
        help_text="Publish policies with settings that an alert or an analysis named.",
    )
    pools = BundlePool(many=True)


@dataclass(frozen=True, slots=True)
class Change:
    """One changed field of one object."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Action:
    """What applying a bundle does to one object."""

    op: str  # create, change or remove
    kind: str
    name: str
    pool: str
    changes: tuple[Change, ...] = ()


@dataclass(slots=True)
class Applied:
    """Everything that applying a bundle did."""

    actions: list[Action] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)


class AppliedSerializer(serializers.Serializer[Any]):
    """All actions, in order; with ``dry_run`` the planned ones."""

    actions = SchemaField(list[Action])
    rollouts = RolloutSerializer(many=True)


def check_shape(bundle: Any) -> dict[str, Any]:
    """A bundle whose lists hold objects with unique names, without what is removed. ValidationError otherwise.

    The objects themselves are validated when they are applied, because they may refer to others of the same bundle.
    """
    if not isinstance(bundle, dict):
        raise ValidationError("Expected an object.")
    stored: dict[str, Any] = without_removed(bundle)  # it may be of an earlier release
    options = {"reason": "", "override_reason": "", "confirm_faulted": False}
    check_unknown_fields(stored, {"format": 1, "pools": [], **options})
    if stored.get("format") != 1:
        raise ValidationError({"format": ["Expected 1."]})
    for position, pool in enumerate(_named_objects(stored.get("pools"), ("pools",))):
        for key in ("replicas", "groups", "sources"):
            if pool.get(key) is not None:
                _named_objects(pool[key], ("pools", position, key))
    return stored


def nested_error(path: Path, detail: Any) -> ValidationError:
    """A ValidationError whose detail belongs to the place at ``path``."""
    for step in reversed(path):
        detail = {step: detail}
    return ValidationError(detail)


def _named_objects(items: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(items, list):
        raise nested_error(path, ["Expected a list."])
    names: set[str] = set()
    for position, item in enumerate(items):
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise nested_error((*path, position), ["Expected an object with a name."])
        if item["name"] in names:
            raise nested_error((*path, position, "name"), ["The list has this name twice."])
        names.add(item["name"])
    return items
