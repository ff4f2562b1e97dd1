"""Projects, pools, replicas, task groups, client keys and fleet settings.

Names become metric labels, header values and ring identities, so they never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import (
    CASCADE,
    PROTECT,
    BigIntegerField,
    BooleanField,
    CharField,
    CheckConstraint,
    DateTimeField,
    Deferrable,
    FloatField,
    ForeignKey,
    Func,
    JSONField,
    Model,
    PositiveBigIntegerField,
    PositiveIntegerField,
    PositiveSmallIntegerField,
    Q,
    TextField,
    UniqueConstraint,
)
from django.utils import timezone

from controlplane.kv_cache import KvBytes, kv_bytes
from routing.schema import LEAST_URGENT, StreamFailure, StreamUsage
from routing.schema import ReplicaRole as WireRole
from routing.schema import ReplicaState as WireState

# A policy's name is its pool's, or ``pool.group``: pools and groups hold no dot, and both fit in 63 characters.
SHORT_NAME = r"^[a-z0-9]([a-z0-9_-]{0,28}[a-z0-9])?$"
LONG_NAME = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"  # routing.schema.Name


def short_name(*, unique: bool = False) -> CharField[str, str]:
    return CharField(max_length=30, unique=unique)


def long_name(*, unique: bool = False) -> CharField[str, str]:
    return CharField(max_length=63, unique=unique)


def well_formed(name: str, pattern: str) -> CheckConstraint:
    """Database constraint for the syntax of the column ``name``."""
    return CheckConstraint(
        condition=Q(name__regex=pattern),
        name=name,
        violation_error_message="Expected lower-case letters, digits and -, with a letter or digit at both ends.",
    )


class NextVersion(Func):
    """The next version of any row: a row that is removed and created again never has an earlier version."""

    template = "nextval('controlplane_version')"
    output_field = BigIntegerField()


class VersionedModel(Model):
    """A row that users edit.

    A trigger (migration 0002) increases ``version`` with each change of a column. Its arguments name the columns that
    workers write, which do not count. An edit that is based on an older version can thus be rejected.
    """

    version = BigIntegerField(db_default=NextVersion(), editable=False)
    _stored: Mapping[str, Any] = MappingProxyType({})

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the row without unchanged unique columns; its new version is read when it is needed.

        Because of the trigger, an update that names a unique column locks out inserts of rows that refer to this one.
        """
        if not self._state.adding and not args and kwargs.get("update_fields") is None:
            indexes = (index for index in self._meta.constraints if isinstance(index, UniqueConstraint))
            unique = {name for index in indexes if index.condition is None for name in index.fields}
            kwargs["update_fields"] = [
                field.attname
                for field in self._meta.concrete_fields
                if field.attname in self.__dict__
                and not (
                    (field.unique or field.name in unique)
                    and self._stored.get(field.attname, self) == self.__dict__[field.attname]
                )
            ]
        super().save(*args, **kwargs)
        for name in ("version", "_stored"):
            self.__dict__.pop(name, None)
        self._stored = self.__dict__.copy()

    @classmethod
    def from_db(cls, *args: Any) -> Self:
        """Django's, with a copy of the values as they are stored."""
        row = super().from_db(*args)
        row._stored = row.__dict__.copy()  # noqa: SLF001 - of this class
        return row

    @property
    def etag(self) -> str:
        """The entity tag of this version."""
        return f'"{self.version}"'


class Project(VersionedModel):
    """Pools with the same owners. Users without a role in it cannot tell that it exists."""

    name = short_name(unique=True)
    description = TextField(blank=True, max_length=1000)
    needs_approval = BooleanField(default=False, db_default=False)  # publications wait for a second user
    created_at = DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("name",)
        constraints = (well_formed("project_name_form", SHORT_NAME),)

    def __str__(self) -> str:
        return self.name


class Pool(VersionedModel):
    """Replicas that serve the same models. A pool always has an active policy.

    JSON fields contain parts of the routers' schema (``schema_fields``); None: the routers' default.
    """

    project = ForeignKey(Project, PROTECT, related_name="pools")
    name = short_name(unique=True)
    models = ArrayField(CharField(max_length=256), default=list, blank=True)  # served names; [] takes any model
    aliases = JSONField(default=list, blank=True)  # routing.schema.Alias
    adapters = JSONField(default=list, blank=True)  # routing.schema.Adapter
    adapter_replicas = PositiveIntegerField(null=True, blank=True)  # replicas per adapter; None: all that have it
    description = TextField(blank=True, max_length=1000)
    health = JSONField(null=True, blank=True)  # routing.schema.HealthCheck
    breaker = JSONField(null=True, blank=True)  # routing.schema.BreakerConfig
    caps = JSONField(null=True, blank=True)  # routing.schema.Caps
    concurrency = JSONField(null=True, blank=True)  # routing.schema.ConcurrencyConfig; None: no limit
    tier1 = JSONField(null=True, blank=True)  # routing.schema.Tier1; None: the policy's
    stream_usage = CharField(  # noqa: DJ001 - None: the routers' default
        max_length=8, null=True, blank=True, choices=[(usage.value, usage.value) for usage in StreamUsage]
    )
    on_stream_failure = CharField(  # noqa: DJ001 - None: the routers' default
        max_length=8, null=True, blank=True, choices=[(choice.value, choice.value) for choice in StreamFailure]
    )
    keep_alive_s = FloatField(null=True, blank=True)  # of silent streams; None: no comments
    warm_up = JSONField(null=True, blank=True)  # routing.schema.WarmUp; None: no warm-up
    session_keys = JSONField(null=True, blank=True)  # routing.schema.SessionKey; None: DEFAULT_SESSION_KEYS
    paths = JSONField(null=True, blank=True)  # routing.schema.DataPath; None: all
    disaggregation = JSONField(null=True, blank=True)  # routing.schema.Disaggregation; None: its defaults
    allowed_origins = ArrayField(CharField(max_length=256), default=list, db_default=[], blank=True)  # Origin
    kv_cache = JSONField(null=True, blank=True)  # controlplane.kv_cache.KvCache; None: unknown
    costs = JSONField(null=True, blank=True)  # controlplane.kv_cache.Costs; None: unknown
    # services.policies.publish_checks.PredictionPolicy, not sent to routers; None: its defaults.
    what_if = JSONField(null=True, blank=True)
    created_at = DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("name",)
        constraints = (
            well_formed("pool_name_form", SHORT_NAME),
            CheckConstraint(
                condition=Q(adapter_replicas=None) | Q(adapter_replicas__range=(1, 10_000)),
                name="pool_adapter_replicas_range",
            ),
        )

    def __str__(self) -> str:
        return self.name

    @property
    def kv_bytes(self) -> KvBytes | None:
        """KV cache of one token; None: unknown."""
        return kv_bytes(self.kv_cache)

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Bytes of KV cache of one token; None: unknown."""
        size = self.kv_bytes
        return size.bytes_per_token if size else None


class ReplicaState(models.TextChoices):
    """The desired state of a replica; its health is measured by telemetry."""

    ACTIVE = WireState.ACTIVE, "Active"
    DRAINING = WireState.DRAINING, "Draining"  # running requests finish; no new ones
    DISABLED = WireState.DISABLED, "Disabled"  # no health checks


class ReplicaRole(models.TextChoices):
    """Which phase of a request a replica computes."""

    BOTH = WireRole.BOTH, "Prefill and decode"
    PREFILL = WireRole.PREFILL, "Prefill"
    DECODE = WireRole.DECODE, "Decode"


class Replica(VersionedModel):
    """One vLLM engine behind a base URL. Its name is its identity on every hash ring; the URL may change."""

    pool = models.ForeignKey(Pool, models.PROTECT, related_name="replicas")
    name = long_name(unique=True)
    url = models.CharField(max_length=2048)  # http(s)://host[:port][/base], without a final slash
    state = models.CharField(max_length=8, choices=ReplicaState, default=ReplicaState.ACTIVE)
    weight = models.FloatField(default=1.0)  # relative capacity
    block_tokens = models.PositiveIntegerField(null=True, blank=True)  # per KV block; None: not reported yet
    capacity_blocks = models.PositiveIntegerField(null=True, blank=True)  # KV blocks of all ranks; None: as above
    labels = models.JSONField(default=dict, blank=True)  # {key: value}, for filters; not sent to routers
    adapters = models.JSONField(null=True, blank=True)  # names; None: those in its /v1/models
    data_parallel_size = models.PositiveSmallIntegerField(default=1)  # ranks, each with its own cache
    kv_events = models.JSONField(null=True, blank=True)  # routing.schema.KvEvents; None: its cache is estimated
    # What the engine says of its KV events: {"kv_events", "problem"}; not sent to routers. None: nothing known.
    reported_kv_events = models.JSONField(null=True, blank=True)
    role = models.CharField(
        max_length=8, choices=ReplicaRole, default=ReplicaRole.BOTH, db_default=ReplicaRole.BOTH.value
    )
    api_key_encrypted = models.BinaryField(null=True, blank=True)  # the API key that the engine requires
    api_key_set_at = models.DateTimeField(null=True, blank=True)  # None: no API key
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("name",)
        constraints = (
            well_formed("replica_name_form", LONG_NAME),
            # Deferrable, because discovered replicas may swap addresses.
            UniqueConstraint(fields=["url"], name="replica_url_unique", deferrable=Deferrable.IMMEDIATE),
            CheckConstraint(condition=Q(state__in=ReplicaState.values), name="replica_state_known"),
            CheckConstraint(condition=Q(role__in=ReplicaRole.values), name="replica_role_known"),
            CheckConstraint(condition=Q(weight__gt=0, weight__lte=1000), name="replica_weight_range"),
            CheckConstraint(condition=Q(data_parallel_size__range=(1, 1024)), name="replica_data_parallel_size_range"),
            CheckConstraint(
                condition=Q(api_key_encrypted__isnull=True, api_key_set_at__isnull=True)
                | Q(api_key_encrypted__isnull=False, api_key_set_at__isnull=False),
                name="replica_api_key_dated",
            ),
            CheckConstraint(
                condition=Q(block_tokens=None) | Q(block_tokens__gt=0), name="replica_block_tokens_positive"
            ),
            CheckConstraint(
                condition=Q(capacity_blocks=None) | Q(capacity_blocks__gt=0), name="replica_capacity_positive"
            ),
        )

    def __str__(self) -> str:
        return self.name

    @property
    def cache_tokens(self) -> int | None:
        """Cache size of all ranks; None: not reported yet."""
        return self.capacity_blocks * self.block_tokens if self.capacity_blocks and self.block_tokens else None

    @property
    def cache_bytes(self) -> int | None:
        """Cache size in bytes; None: not reported, or the pool's bytes per token are unknown. Reads the pool."""
        tokens, size = self.cache_tokens, self.pool.kv_bytes_per_token
        return tokens * size if tokens and size else None


class TaskGroup(VersionedModel):
    """Requests with one purpose that share a tier-1 prefix, selected by the ``X-Task-Group`` header or by ``match``.

    JSON fields contain parts of the routers' schema (``schema_fields``).
    """

    pool = models.ForeignKey(Pool, models.PROTECT, related_name="groups")
    name = short_name()
    owner = models.CharField(max_length=200, blank=True)  # contact: a team, an address
    description = models.TextField(blank=True, max_length=1000)
    replicas = models.ManyToManyField(Replica, related_name="groups", blank=True)  # allowed subset; none: all
    match = models.JSONField(null=True, blank=True)  # routing.schema.GroupMatch; None: only the header
    tier1 = models.JSONField(null=True, blank=True)  # routing.schema.Tier1; None: the pool's or policy's
    priority = models.PositiveSmallIntegerField(default=0)  # in the admission queue, 0 first
    ttft_objective_ms = models.PositiveIntegerField(null=True, blank=True)  # None: none
    concurrency = models.JSONField(null=True, blank=True)  # routing.schema.ConcurrencyConfig; None: no limit
    caps = models.JSONField(null=True, blank=True)  # routing.schema.Caps; None: the pool's
    response_cache = models.JSONField(null=True, blank=True)  # routing.schema.ResponseCache; None: off
    semantic_cache = models.JSONField(null=True, blank=True)  # routing.schema.SemanticCache; None: off
    expected_tier1 = models.CharField(max_length=16, blank=True)  # hash of the expected prefix; "": none
    hit_rate_objective = models.FloatField(null=True, blank=True)  # ratio; None: none
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("pool__name", "name")
        constraints = (
            well_formed("group_name_form", SHORT_NAME),
            UniqueConstraint(fields=["pool", "name"], name="group_name_unique"),
            CheckConstraint(condition=Q(priority__lte=LEAST_URGENT), name="group_priority_range"),
            CheckConstraint(condition=Q(expected_tier1__regex=r"^([0-9a-f]{16})?$"), name="group_expected_tier1_form"),
            CheckConstraint(
                condition=Q(hit_rate_objective=None) | Q(hit_rate_objective__gt=0, hit_rate_objective__lte=1),
                name="group_hit_rate_objective_range",
            ),
        )

    def __str__(self) -> str:
        return f"{self.pool.name}.{self.name}"


class ClientKey(VersionedModel):
    """A client's key for the models and task groups of one project. Only the digest that routers compare is stored.

    Unset limits are unlimited. Routers use its full name, so that names are unique within a project only.
    """

    project = ForeignKey(Project, CASCADE, related_name="client_keys")
    name = short_name()
    hint = CharField(max_length=12)  # its first characters
    digest = CharField(max_length=64, unique=True)  # SHA-256, hex; 256 random bits need no salt
    models = JSONField(null=True, blank=True)  # allowed names; None: all of the project
    groups = JSONField(null=True, blank=True)  # allowed names, the first is the default; None: all
    tenant = CharField(max_length=30, blank=True)  # isolates cached prefixes from other tenants; "": none
    requests_per_s = FloatField(null=True, blank=True)
    burst = PositiveIntegerField(null=True, blank=True)  # requests; None: one second of requests_per_s
    tokens_per_min = PositiveBigIntegerField(null=True, blank=True)
    queue_weight = FloatField(default=1.0, db_default=1.0)
    created_at = DateTimeField(auto_now_add=True)
    created_by = ForeignKey(settings.AUTH_USER_MODEL, PROTECT, null=True, blank=True, related_name="+")
    expires_at = DateTimeField(null=True, blank=True)  # None: never
    revoked_at = DateTimeField(null=True, blank=True)  # None: not revoked

    class Meta:
        ordering = ("project__name", "name", "-created_at")
        constraints = (
            well_formed("client_key_name_form", SHORT_NAME),
            UniqueConstraint(fields=["project", "name"], condition=Q(revoked_at=None), name="client_key_name_unique"),
            CheckConstraint(
                condition=Q(burst=None) | Q(requests_per_s__isnull=False), name="client_key_burst_of_a_rate"
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} ({self.hint}...)"

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= timezone.now()

    @property
    def full_name(self) -> str:
        """The key's name in router configurations and metrics."""
        return f"{self.project.name}.{self.name}"


class FleetSettings(VersionedModel):
    """One row, or none: then routers accept requests without a key, within their default limits."""

    id = PositiveSmallIntegerField(primary_key=True, default=1)
    needs_key = BooleanField(default=False)  # accept only requests with a client key
    limits = JSONField(null=True, blank=True)  # routing.schema.Limits; None: the routers' default

    class Meta:
        verbose_name_plural = "fleet settings"
        constraints = (CheckConstraint(condition=Q(id=1), name="fleet_settings_single_row"),)

    def __str__(self) -> str:
        return "fleet settings"


class FleetSecret(models.Model):
    """The ``hash_secret`` mixed into every prefix hash, generated once, encrypted at rest. One row."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    encrypted = models.BinaryField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = (CheckConstraint(condition=Q(id=1), name="fleet_secret_single_row"),)

    def __str__(self) -> str:
        return "fleet secret"
