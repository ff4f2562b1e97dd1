"""What telemetry does when the control plane's rows appear."""

from typing import Any

from django.db.models.signals import post_save
from django.dispatch import receiver

from controlplane.models import Pool
from telemetry.services.alerts.rules import ensure_default_rules


@receiver(post_save, sender=Pool, dispatch_uid="telemetry.default_rules")
def give_a_new_pool_its_rules(instance: Pool, created: bool, raw: bool = False, **_: Any) -> None:
    """Every pool starts with the default alert rules, in the transaction that makes it."""
    if created and not raw:
        ensure_default_rules(instance)
