"""What telemetry does when the control plane's rows appear, and when its own go with them."""

from typing import Any

from django.db.models.signals import post_save, pre_delete
from django.dispatch import receiver

from controlplane.models import Pool
from telemetry.models import AlertRule
from telemetry.services.alerts.rules import close_alerts, ensure_default_rules


@receiver(post_save, sender=Pool, dispatch_uid="telemetry.default_rules")
def give_a_new_pool_its_rules(instance: Pool, created: bool, raw: bool = False, **_: Any) -> None:
    """Every pool starts with the default alert rules, in the transaction that makes it."""
    if created and not raw:
        ensure_default_rules(instance)


@receiver(pre_delete, sender=AlertRule, dispatch_uid="telemetry.last_alerts")
def end_the_alerts_of_a_rule_that_goes(instance: AlertRule, **_: Any) -> None:
    """A rule goes with its pool or task group: whoever was told of its alerts is told of their end first."""
    close_alerts(instance, because="what it looked at was removed")
