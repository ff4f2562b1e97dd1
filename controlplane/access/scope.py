"""Which project a row belongs to, and so who can tell that it exists."""

from __future__ import annotations

from typing import Any, TypeVar

from django.db.models import Model, QuerySet

from controlplane.access.asker import Asker

# The way from a row to its project; None: it belongs to none, and is for those who hold a role in all of them.
PROJECT_OF: dict[str, str | None] = {
    "controlplane.Project": "pk",
    "controlplane.Pool": "project",
    "controlplane.Replica": "pool__project",
    "controlplane.ReplicaSource": "pool__project",
    "controlplane.DiscoveredReplica": "source__pool__project",
    "controlplane.TaskGroup": "pool__project",
    "controlplane.RoutingPolicy": "pool__project",
    "controlplane.PolicyRevision": "policy__pool__project",
    "controlplane.Rollout": "revision__policy__pool__project",
    "controlplane.Event": "pool__project",
    "controlplane.Router": None,
    "controlplane.ConfigSnapshot": None,
    "controlplane.ClientKey": "project",
    "controlplane.FleetSettings": None,
    "controlplane.ApiToken": None,
    "controlplane.AuditEntry": None,
    "controlplane.AuditCheck": None,
    "controlplane.RoleAssignment": None,
    "controlplane.PersonSession": None,
    "controlplane.SignInLock": None,
    "auth.User": None,
    "telemetry.AlertRule": "pool__project",
    "telemetry.Alert": "pool__project",
    "telemetry.AlertStep": "alert__pool__project",
    "telemetry.Silence": "project",
    "telemetry.Channel": None,
    "telemetry.Heartbeat": None,
    "telemetry.MetricsServer": None,
    "telemetry.Notification": "alert__pool__project",
}

Row = TypeVar("Row", bound=Model)


def visible(asker: Asker, rows: QuerySet[Row]) -> QuerySet[Row]:
    """Those of the rows that the asker may know of; KeyError for a kind of row that nobody thought of."""
    path = PROJECT_OF[rows.model._meta.label]  # noqa: SLF001 - Django's documented way to a model's name
    projects = asker.projects()
    if projects is None:
        return rows
    return rows.filter(**{f"{path}__in": projects}) if path and projects else rows.none()


def project_id_of(row: Model) -> int | None:
    """The project that a row belongs to; None where it belongs to none."""
    path = PROJECT_OF[row._meta.label]  # noqa: SLF001 - as above
    if path is None or path == "pk":
        return row.pk if path else None
    *way, last = path.split("__")
    found: Any = row
    for step in way:
        found = getattr(found, step)
        if found is None:
            return None
    number: int | None = getattr(found, f"{last}_id")  # None: of all projects, as a silence may be
    return number


def find(asker: Asker, rows: QuerySet[Row]) -> tuple[int | None] | None:
    """The project of the one row, in a tuple; None where there is none that the asker may know of. One query."""
    path = PROJECT_OF[rows.model._meta.label]  # noqa: SLF001 - as above
    found = visible(asker, rows).values_list("pk", path or "pk").first()
    return None if found is None else ((found[1] if path else None),)
