"""Signal handlers: default alert rules for new pools, and resolved notifications for deleted rules."""

from typing import Any

from django.db.models.signals import post_save, pre_delete
from django.dispatch import receiver

from controlplane.models import Pool
from telemetry.models import AlertRule
from telemetry.services.alerts.rules import close_alerts, ensure_default_rules


@receiver(post_save, sender=Pool, dispatch_uid="telemetry.default_rules")
def create_default_rules(instance: Pool, created: bool, raw: bool = False, **_: Any) -> None:
    """Create the default alert rules of a pool in the transaction that creates the pool."""
    if created and not raw:
        ensure_default_rules(instance)


@receiver(pre_delete, sender=AlertRule, dispatch_uid="telemetry.last_alerts")
def close_alerts_of_deleted_rule(instance: AlertRule, **_: Any) -> None:
    """Resolve the alerts of a rule before it is deleted with its pool or task group, so that receivers are notified."""
    close_alerts(instance, reason="its rule was removed")
