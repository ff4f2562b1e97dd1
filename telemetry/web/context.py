"""What every page shows of telemetry."""

from __future__ import annotations

from typing import Any

from django.db.models import Q
from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from controlplane.access.asker import asker_of
from controlplane.access.scope import visible
from telemetry.models import AlertState
from telemetry.services.alerts.listing import open_alerts

FIRES = Q(state=AlertState.FIRING, muted__isnull=True)


def firing_alerts(request: HttpRequest) -> dict[str, Any]:
    """Context processor: how many alerts fire unmuted. One query, where a page shows it to somebody signed in."""
    count = SimpleLazyObject(lambda: visible(asker_of(request), open_alerts()).filter(FIRES).count())
    return {"firing_alerts": count if hasattr(request, "user") and request.user.is_authenticated else 0}
