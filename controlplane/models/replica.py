"""One vLLM engine behind a base URL."""

from django.db import models
from django.db.models import CheckConstraint, Q

from routing.schema import ReplicaState as WireState

from .names import LONG_NAME, long_name, well_formed
from .pool import Pool


class ReplicaState(models.TextChoices):
    """What an operator wants of a replica; whether it answers is measured, not kept here."""

    ACTIVE = WireState.ACTIVE, "Active"
    DRAINING = WireState.DRAINING, "Draining"  # running requests finish, new ones go elsewhere
    DISABLED = WireState.DISABLED, "Disabled"  # not even health-checked


class Replica(models.Model):
    """One vLLM engine behind a base URL. Its name is its identity on every ring; the URL may change."""

    pool = models.ForeignKey(Pool, models.PROTECT, related_name="replicas")
    name = long_name(unique=True)
    url = models.CharField(max_length=2048, unique=True)  # http(s)://host[:port][/base], without a final slash
    state = models.CharField(max_length=8, choices=ReplicaState, default=ReplicaState.ACTIVE)
    weight = models.FloatField(default=1.0)  # relative capacity
    block_tokens = models.PositiveIntegerField(null=True, blank=True)  # tokens a KV block holds; None until it told us
    capacity_blocks = models.PositiveIntegerField(null=True, blank=True)  # usable KV blocks of all ranks, or not told
    labels = models.JSONField(default=dict, blank=True)  # {key: value}, to find it by; routers do not know them
    adapters = models.JSONField(null=True, blank=True)  # names of its pool's; None: those that its /v1/models lists
    data_parallel_size = models.PositiveSmallIntegerField(default=1)  # ranks behind the URL, each with its own cache
    api_key_sealed = models.BinaryField(null=True, blank=True)  # what the engine asks of clients, encrypted at rest
    api_key_set_at = models.DateTimeField(null=True, blank=True)  # None: it has none
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("name",)
        constraints = (
            well_formed("replica_name_form", LONG_NAME),
            CheckConstraint(condition=Q(state__in=ReplicaState.values), name="replica_state_known"),
            CheckConstraint(condition=Q(weight__gt=0, weight__lte=1000), name="replica_weight_range"),
            CheckConstraint(condition=Q(data_parallel_size__range=(1, 1024)), name="replica_data_parallel_size_range"),
            CheckConstraint(
                condition=Q(api_key_sealed__isnull=True, api_key_set_at__isnull=True)
                | Q(api_key_sealed__isnull=False, api_key_set_at__isnull=False),
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
