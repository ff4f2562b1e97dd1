"""What the control plane is at now: routers that do not run what they should."""

from __future__ import annotations

from datetime import datetime

from controlplane.models import ConfigSnapshot, Router
from telemetry.alerts.past import ControlNow


def control_now(now: datetime, evaluated_at: datetime | None) -> ControlNow:
    """Routers and rules as they are now. Two queries, and one for each router that is behind."""
    newest = ConfigSnapshot.objects.only("number", "sha256").order_by("-number").first()
    present = list(Router.objects.filter(lost_at=None))
    behind = [router for router in present if newest and not router.runs(newest.number, newest.sha256)]
    return ControlNow(
        behind_s={router.name: _behind_s(router, now) for router in behind},
        refusing={router.name: str(router.last_nack.get("reason", "")) for router in behind if router.last_nack},
        routers=len(present),
        unevaluated_s=(now - evaluated_at).total_seconds() if evaluated_at else 0.0,
    )


def _behind_s(router: Router, now: datetime) -> float:
    """Seconds since the first configuration was made that a router should have run and does not, while it was there."""
    later = ConfigSnapshot.objects.filter(number__gt=router.running_number or 0).order_by("number")
    made_at = later.values_list("created_at", flat=True).first() or now
    return max((now - max(made_at, router.first_seen_at)).total_seconds(), 0.0)
