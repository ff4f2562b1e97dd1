"""What holds for all routers and all pools."""

from django.db.models import BooleanField, CheckConstraint, JSONField, Model, PositiveSmallIntegerField, Q


class FleetSettings(Model):
    """One row, or none while nothing was said: then routers take requests from anybody, within their own limits."""

    id = PositiveSmallIntegerField(primary_key=True, default=1)
    needs_key = BooleanField(default=False)  # whether only clients with a key are let in
    limits = JSONField(null=True, blank=True)  # routing.schema.Limits; None: the routers' own

    class Meta:
        verbose_name_plural = "fleet settings"
        constraints = (CheckConstraint(condition=Q(id=1), name="fleet_settings_single_row"),)

    def __str__(self) -> str:
        return "fleet settings"
