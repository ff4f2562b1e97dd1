"""What every page shows of telemetry."""

from __future__ import annotations

from typing import Any

from django.db.models import Q
from django.http import HttpRequest
from django.utils import timezone
from django.utils.functional import SimpleLazyObject

from controlplane.access.actor import actor_of, visible
from telemetry.models import AlertState
from telemetry.services.alerts.alerts import open_alerts
from telemetry.services.self_monitoring import telemetry_status

FIRES = Q(state=AlertState.FIRING, muted__isnull=True)


def telemetry_status_context(request: HttpRequest) -> dict[str, Any]:
    """Context processor: how many alerts fire unmuted, and what telemetry is late with. One query, where a page shows
    it to somebody signed in.
    """
    if not (hasattr(request, "user") and request.user.is_authenticated):
        return {}
    now = timezone.now()
    return {
        "telemetry_status": SimpleLazyObject(
            lambda: telemetry_status(visible(actor_of(request), open_alerts()).filter(FIRES), now)
        )
    }
