"""Rows as JSON, and JSON as arguments of services. What a service checks is not checked here again."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.models import (
    ApiToken,
    AuditEntry,
    ConfigSnapshot,
    Event,
    PolicyRevision,
    Pool,
    Project,
    Replica,
    ReplicaState,
    Rollout,
    Router,
    RoutingPolicy,
    Scope,
    TaskGroup,
)
from controlplane.models.audit_entry import SAID

from .fields import ById, ByName


def by_username(source: str) -> serializers.CharField:
    """A person, shown by the name they sign in with; null where the system acted by itself."""
    return serializers.CharField(source=f"{source}.username", default=None, read_only=True)


class PoolSerializer(serializers.ModelSerializer[Pool]):
    """A pool."""

    project = ByName(read_only=True)

    class Meta:
        model = Pool
        fields = ("name", "project", "models", "description", "created_at")


class ProjectSerializer(serializers.ModelSerializer[Project]):
    """A project."""

    class Meta:
        model = Project
        fields = ("name", "description", "created_at")


class ProjectInput(serializers.Serializer[Any]):
    """A new project."""

    name = serializers.CharField(max_length=30)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)


class PoolChange(serializers.Serializer[Any]):
    """What to change of a pool."""

    models = serializers.ListField(child=serializers.CharField(max_length=256), max_length=256, required=False)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)


class PoolInput(PoolChange):
    """A new pool; without a project it belongs to the one called ``default``. Name and project are for good."""

    name = serializers.CharField(max_length=30)
    project = ByName(queryset=Project.objects.all(), required=False)


class ReplicaSerializer(serializers.ModelSerializer[Replica]):
    """A replica as an operator wants it; whether it answers is telemetry's to say."""

    pool = ByName(read_only=True)

    class Meta:
        model = Replica
        fields = ("name", "pool", "url", "state", "weight", "block_tokens", "capacity_blocks", "created_at")


class ReplicaChange(serializers.Serializer[Any]):
    """What to change of a replica. The name is its identity on every ring and stays."""

    url = serializers.CharField(max_length=2048, required=False)
    weight = serializers.FloatField(required=False)


class ReplicaInput(serializers.Serializer[Any]):
    """A new replica."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=63)
    url = serializers.CharField(max_length=2048)
    weight = serializers.FloatField(required=False)


class ReplicaStateInput(serializers.Serializer[Any]):
    """What is wanted of a replica."""

    state = serializers.ChoiceField(choices=ReplicaState.choices)


class TaskGroupSerializer(serializers.ModelSerializer[TaskGroup]):
    """A task group; no replicas means all of its pool's."""

    pool = ByName(read_only=True)
    replicas = ByName(many=True, read_only=True)

    class Meta:
        model = TaskGroup
        fields = ("id", "pool", "name", "owner", "description", "replicas", "created_at")


class TaskGroupChange(serializers.Serializer[Any]):
    """What to change of a task group."""

    owner = serializers.CharField(max_length=200, allow_blank=True, required=False)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)
    replicas = ByName(queryset=Replica.objects.all(), many=True, required=False)


class TaskGroupInput(TaskGroupChange):
    """A new task group."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=30)


class RevisionSerializer(serializers.ModelSerializer[PolicyRevision]):
    """One version of a policy."""

    policy = ByName(read_only=True)
    author = by_username("author")

    class Meta:
        model = PolicyRevision
        fields = (
            "id",
            "policy",
            "number",
            "state",
            "settings",
            "digest",
            "author",
            "reason",
            "created_at",
            "published_at",
        )


class PolicySerializer(serializers.ModelSerializer[RoutingPolicy]):
    """A policy with its live revision and its draft, each null where there is none."""

    pool = ByName(read_only=True)
    group = serializers.CharField(source="group.name", default=None, read_only=True)
    live = serializers.SerializerMethodField()
    draft = serializers.SerializerMethodField()

    class Meta:
        model = RoutingPolicy
        fields = ("id", "name", "pool", "group", "live", "draft")

    def get_live(self, policy: RoutingPolicy) -> dict[str, Any] | None:
        """The revision in force."""
        return self._revision(policy, "live")

    def get_draft(self, policy: RoutingPolicy) -> dict[str, Any] | None:
        """The revision being edited."""
        return self._revision(policy, "draft")

    def _revision(self, policy: RoutingPolicy, state: str) -> dict[str, Any] | None:
        for revision in policy.revisions.all():  # the viewset fetched these two alone
            if revision.state == state:
                return dict(RevisionSerializer(revision).data)
        return None


class PolicyInput(serializers.Serializer[Any]):
    """A policy of its own for a task group."""

    group = ById(queryset=TaskGroup.objects.select_related("pool"))


class DraftInput(serializers.Serializer[Any]):
    """What the draft should say. ``based_on`` is the number of the live revision that you looked at."""

    settings = serializers.DictField()
    reason = serializers.CharField(max_length=500, allow_blank=True, required=False)
    based_on = serializers.IntegerField(min_value=1, required=False)


class PublishInput(serializers.Serializer[Any]):
    """Why, and the digest of the draft that you looked at."""

    reason = serializers.CharField(max_length=500, allow_blank=True, required=False)
    digest = serializers.CharField(max_length=64, required=False)


class SettingChangeSerializer(serializers.Serializer[Any]):
    """One difference between two versions."""

    field = serializers.CharField()
    before = serializers.JSONField(allow_null=True)
    after = serializers.JSONField(allow_null=True)
    meaning = serializers.CharField()


class DiffSerializer(serializers.Serializer[Any]):
    """What going live would change. ``before`` is null where nothing is live yet."""

    before = serializers.IntegerField(allow_null=True)
    after = serializers.IntegerField()
    digest = serializers.CharField()
    changes = SettingChangeSerializer(many=True)


class RolloutSerializer(serializers.ModelSerializer[Rollout]):
    """A revision on its way to the routers."""

    policy = serializers.CharField(source="revision.policy.name", read_only=True)
    revision = serializers.IntegerField(source="revision.number", read_only=True)
    snapshot = serializers.IntegerField(source="snapshot.number", read_only=True)
    started_by = by_username("started_by")

    class Meta:
        model = Rollout
        fields = ("id", "policy", "revision", "snapshot", "state", "started_by", "started_at", "finished_at")


class RouterSerializer(serializers.ModelSerializer[Router]):
    """A router: what it runs beside what it should run."""

    desired_number = serializers.SerializerMethodField()
    in_sync = serializers.SerializerMethodField()

    class Meta:
        model = Router
        fields = (
            "name",
            "admin_url",
            "data_url",
            "boot",
            "version",
            "first_seen_at",
            "last_seen_at",
            "lost_at",
            "running_number",
            "running_sha256",
            "desired_number",
            "in_sync",
            "last_ack_at",
            "last_nack",
            "last_error",
        )

    def get_desired_number(self, router: Router) -> int | None:  # noqa: ARG002 - the same for every router
        """The newest configuration's number."""
        desired: ConfigSnapshot | None = self.context.get("desired")
        return desired.number if desired else None

    def get_in_sync(self, router: Router) -> bool:
        """Whether it runs the newest configuration, as far as it told us."""
        desired: ConfigSnapshot | None = self.context.get("desired")
        return desired is not None and router.runs(desired.number, desired.sha256)


class AnnounceInput(serializers.Serializer[Any]):
    """A router's heartbeat."""

    name = serializers.CharField(max_length=63)
    boot = serializers.CharField(max_length=64)
    version = serializers.CharField(max_length=64, allow_blank=True, required=False)
    admin_url = serializers.CharField(max_length=2048)
    data_url = serializers.CharField(max_length=2048, allow_blank=True, required=False)
    revision = serializers.IntegerField(min_value=1, max_value=2**53, allow_null=True, required=False)
    sha256 = serializers.RegexField(r"^[0-9a-f]{64}$", allow_null=True, required=False)


class AnnouncedSerializer(serializers.Serializer[Any]):
    """What the router should run; it is pushed to its admin port."""

    desired_revision = serializers.IntegerField(allow_null=True)


class EventSerializer(serializers.ModelSerializer[Event]):
    """Something that happened."""

    pool = ByName(read_only=True)
    replica = ByName(read_only=True)
    router = ByName(read_only=True)
    actor = by_username("actor")

    class Meta:
        model = Event
        fields = ("id", "at", "kind", "pool", "replica", "router", "actor", "summary", "detail")


class AuditSerializer(serializers.ModelSerializer[AuditEntry]):
    """One entry of the audit log; ``digest`` covers all the rest, ``previous`` is that of the entry before."""

    class Meta:
        model = AuditEntry
        fields = (*SAID, "digest")


class TokenSerializer(serializers.ModelSerializer[ApiToken]):
    """A token, without its secret."""

    user = serializers.CharField(source="user.username", read_only=True)

    class Meta:
        model = ApiToken
        fields = ("id", "name", "key_id", "user", "scopes", "created_at", "expires_at", "last_used_at", "revoked_at")


class TokenInput(serializers.Serializer[Any]):
    """A new token, acting for whoever asks."""

    name = serializers.CharField(max_length=100)
    scopes = serializers.ListField(child=serializers.ChoiceField(choices=Scope.choices), min_length=1, max_length=3)
    expires_at = serializers.DateTimeField(allow_null=True, required=False)


class CreatedTokenSerializer(TokenSerializer):
    """A token with its text, shown this once."""

    token = serializers.CharField(read_only=True)

    class Meta(TokenSerializer.Meta):
        fields = (*TokenSerializer.Meta.fields, "token")  # type: ignore[assignment]  # one longer
