"""What holds for all routers: who is let in, and what they accept and wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

from django.contrib.auth.models import User
from django.db import transaction

from controlplane import router_fields
from controlplane.models import EventKind, FleetSettings
from controlplane.schema_fields import checked
from controlplane.services.events import record_event
from controlplane.services.snapshots import freeze_snapshot

FACTS = ("needs_key", "limits")


class Settings(TypedDict, total=False):
    """What may be said of the fleet. What is not given stays as it is."""

    needs_key: bool  # whether only clients with a key are let in
    limits: Mapping[str, Any] | None  # routing.schema.Limits; None: the routers' own


def fleet_settings() -> FleetSettings:
    """What was said; the defaults where nothing was. A query."""
    return FleetSettings.objects.get_or_create(pk=1)[0]


@transaction.atomic
def update_fleet_settings(*, by: User | None = None, **settings: Unpack[Settings]) -> FleetSettings:
    """Change what is given; InvalidError for limits that routers would refuse."""
    values = checked(router_fields.FLEET, settings)
    row = FleetSettings.objects.select_for_update().get(pk=fleet_settings().pk)
    before = facts(row)
    for name, value in values.items():
        setattr(row, name, value)
    if facts(row) == before:
        return row
    row.save()
    summary = "Limits of the routers were changed." if row.needs_key == before["needs_key"] else _admitting(row)
    record_event(EventKind.FLEET_CHANGED, summary, by=by, detail={"before": before, "after": facts(row)})
    freeze_snapshot(reason=summary.rstrip("."), by=by)
    return row


def facts(row: FleetSettings) -> dict[str, Any]:
    """What an event shows of the fleet's settings before and after a change."""
    return {name: getattr(row, name) for name in FACTS}


def _admitting(row: FleetSettings) -> str:
    return "Only clients with a key are let in." if row.needs_key else "Clients are let in without a key."
