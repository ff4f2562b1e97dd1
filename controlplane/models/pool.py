"""Replicas that serve the same models."""

from django.contrib.postgres.fields import ArrayField
from django.db.models import (
    PROTECT,
    CharField,
    CheckConstraint,
    DateTimeField,
    ForeignKey,
    JSONField,
    Model,
    PositiveIntegerField,
    Q,
    TextField,
)

from routing.schema import StreamUsage

from .names import SHORT_NAME, short_name, well_formed
from .project import Project


class Pool(Model):
    """Replicas that serve the same models, and so can stand in for each other. It always has a live policy.

    What routers do about it is kept as the schema's own JSON (``schema_fields``); None: what they do by themselves.
    """

    project = ForeignKey(Project, PROTECT, related_name="pools")  # who may see and change it
    name = short_name(unique=True)
    models = ArrayField(CharField(max_length=256), default=list, blank=True)  # served names; [] takes any model
    aliases = JSONField(default=list, blank=True)  # routing.schema.Alias each: other names for these
    adapters = JSONField(default=list, blank=True)  # routing.schema.Adapter each: that its replicas may hold
    description = TextField(blank=True, max_length=1000)
    health = JSONField(null=True, blank=True)  # routing.schema.HealthCheck
    breaker = JSONField(null=True, blank=True)  # routing.schema.BreakerConfig
    caps = JSONField(null=True, blank=True)  # routing.schema.Caps
    concurrency = JSONField(null=True, blank=True)  # routing.schema.ConcurrencyConfig; None: no limit
    tier1 = JSONField(null=True, blank=True)  # routing.schema.Tier1; None: where the policy says
    share_half_life = PositiveIntegerField(null=True, blank=True)  # requests
    stream_usage = CharField(  # noqa: DJ001 - None: as routers do
        max_length=8, null=True, blank=True, choices=[(usage.value, usage.value) for usage in StreamUsage]
    )
    warm_up = JSONField(null=True, blank=True)  # routing.schema.WarmUp; None: replicas take traffic cold
    created_at = DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("name",)
        constraints = (
            well_formed("pool_name_form", SHORT_NAME),
            CheckConstraint(
                condition=Q(share_half_life=None) | Q(share_half_life__range=(100, 1_000_000)),
                name="pool_share_half_life_range",
            ),
        )

    def __str__(self) -> str:
        return self.name
