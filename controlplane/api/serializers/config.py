"""The whole fleet as JSON: a bundle, and what applying it does."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers
from rest_framework.exceptions import ValidationError

from controlplane.api.serializers.discovery import SourceInput
from controlplane.api.serializers.fleet import PoolInput, ReplicaInput, TaskGroupInput
from controlplane.api.serializers.policies import RolloutSerializer
from controlplane.models import ReplicaState


class BundleReplica(ReplicaInput):
    """A replica of the pool that it stands in."""

    pool = None  # type: ignore[assignment]  # DRF's way to leave an inherited field out
    state = serializers.ChoiceField(choices=ReplicaState.choices, required=False)


class BundleGroup(TaskGroupInput):
    """A task group of the pool that it stands in; ``policy`` null: placed by the pool's."""

    pool = None  # type: ignore[assignment]  # DRF's way to leave an inherited field out
    policy = serializers.DictField(required=False, allow_null=True)


class BundleSource(SourceInput):
    """Where to look for replicas of the pool that it stands in."""

    pool = None  # type: ignore[assignment]  # DRF's way to leave an inherited field out


class BundlePool(PoolInput):
    """A pool. What is left out is left alone; a list is all there should be, where pruning is asked for."""

    policy = serializers.DictField(required=False, help_text="A strategy's name and settings.")
    replicas = BundleReplica(many=True, required=False)
    groups = BundleGroup(many=True, required=False)
    sources = BundleSource(many=True, required=False)


class BundleSerializer(serializers.Serializer[Any]):
    """A bundle, as ``GET`` exports it."""

    format = serializers.IntegerField(min_value=1, max_value=1, help_text="1: the form described here.")
    reason = serializers.CharField(max_length=500, required=False, write_only=True, help_text="For the history.")
    pools = BundlePool(many=True)


class ChangeSerializer(serializers.Serializer[Any]):
    """One field of one object."""

    field = serializers.CharField()
    before = serializers.JSONField(allow_null=True)
    after = serializers.JSONField(allow_null=True)


class ActionSerializer(serializers.Serializer[Any]):
    """What applying does to one object."""

    op = serializers.ChoiceField(choices=("create", "change", "remove"))
    kind = serializers.CharField()
    name = serializers.CharField()
    pool = serializers.CharField()
    changes = ChangeSerializer(many=True)


class AppliedSerializer(serializers.Serializer[Any]):
    """What was done, or with ``dry_run`` would be, in the order in which it is."""

    actions = ActionSerializer(many=True)
    rollouts = RolloutSerializer(many=True)


def check_shape(bundle: Any) -> dict[str, Any]:
    """A bundle whose lists hold objects with names, each once; a ValidationError points to what does not.

    What the objects say is judged when they are applied, since it may refer to others of the same bundle.
    """
    if not isinstance(bundle, dict):
        raise ValidationError("Expected an object.")
    if unknown := sorted(set(bundle) - {"format", "pools", "reason"}):
        raise ValidationError({name: ["There is no such field."] for name in unknown})
    if bundle.get("format") != 1:
        raise ValidationError({"format": ["Expected 1."]})
    for at, pool in enumerate(_named(bundle.get("pools"), ("pools",))):
        for key in ("replicas", "groups", "sources"):
            if pool.get(key) is not None:
                _named(pool[key], ("pools", at, key))
    return bundle


def _named(listed: Any, path: tuple[str | int, ...]) -> list[dict[str, Any]]:
    if not isinstance(listed, list):
        raise _fault(path, "Expected a list.")
    seen: set[str] = set()
    for at, one in enumerate(listed):
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise _fault((*path, at), "Expected an object with a name.")
        if one["name"] in seen:
            raise _fault((*path, at, "name"), "This name stands here twice.")
        seen.add(one["name"])
    return listed


def _fault(path: tuple[str | int, ...], reason: str) -> ValidationError:
    detail: Any = [reason]
    for step in reversed(path):
        detail = {step: detail}
    return ValidationError(detail)
