"""Who is asking, and which roles they hold where.

Which project a row belongs to, and so who can tell that it exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Model, QuerySet
from django.http import HttpRequest

from controlplane.models import ApiToken, Role, RoleAssignment, Scope

# The most that a token may do, whatever its user's roles are.
CAPS = {Scope.READ: Role.VIEWER, Scope.WRITE: Role.APPROVER, Scope.ADMIN: Role.ADMIN}


@dataclass(frozen=True, slots=True)
class Actor:
    """The roles of whoever sent a request, by project id; ``None`` stands for all projects."""

    roles: Mapping[int | None, Role]

    def role_in(self, project_id: int | None) -> Role | None:
        """The role in a project, or for what belongs to none (``None``); None for nobody there."""
        held = [self.roles[key] for key in {project_id, None} if key in self.roles]
        return max(held, key=lambda role: role.rank, default=None)

    def may(self, needed: Role, project_id: int | None) -> bool:
        """Whether the role in a project, or for what belongs to none, covers what is needed."""
        role = self.role_in(project_id)
        return role is not None and role.covers(needed)

    def may_somewhere(self, needed: Role) -> bool:
        """Whether there is anything at all for which the role suffices."""
        return any(role.covers(needed) for role in self.roles.values())

    def at_least(self, needed: Role) -> Actor:
        """The same with only those roles that cover what is needed."""
        return Actor({key: role for key, role in self.roles.items() if role.covers(needed)})

    def projects(self, needed: Role = Role.VIEWER) -> frozenset[int] | None:
        """The ids of the projects where the role suffices; None for all there are."""
        if self.may(needed, None):
            return None
        return frozenset(key for key, role in self.roles.items() if key is not None and role.covers(needed))


NOBODY = Actor({})


def actor_of(request: HttpRequest, token: ApiToken | None = None) -> Actor:
    """Who sent this request, asked for once; with a token its scopes bound every role. One query."""
    known: tuple[int | None, Actor] | None = getattr(request, "actor", None)  # by which token, and who
    key = token.pk if token else None
    if known is None or known[0] != key:
        user = token.user if token else getattr(request, "user", None)
        known = key, _capped(roles_of(user), token)
        request.actor = known  # type: ignore[attr-defined]
    return known[1]


def current_actor(user: User, token: ApiToken | None) -> Actor:
    """Who somebody is at this moment, whatever was known when their request began. One query."""
    return _capped(roles_of(user), token)


def roles_of(user: User | AnonymousUser | None) -> Actor:
    """The roles of a person. A superuser, made at the command line, is admin of everything: the way back in."""
    if not isinstance(user, User) or not user.is_active:
        return NOBODY
    if user.is_superuser:
        return Actor({None: Role.ADMIN})
    held: dict[int | None, Role] = {}
    for project_id, role in RoleAssignment.objects.filter(user=user).values_list("project_id", "role"):
        held[project_id] = max(held.get(project_id, Role(role)), Role(role), key=lambda one: one.rank)
    return Actor(held)


def _capped(actor: Actor, token: ApiToken | None) -> Actor:
    if token is None:
        return actor
    most = max((CAPS[Scope(scope)] for scope in token.scopes), key=lambda role: role.rank)
    return Actor({key: min(role, most, key=lambda one: one.rank) for key, role in actor.roles.items()})


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


def visible(actor: Actor, rows: QuerySet[Row]) -> QuerySet[Row]:
    """Those of the rows that the actor may know of; KeyError for a kind of row that nobody thought of."""
    path = PROJECT_OF[rows.model._meta.label]  # noqa: SLF001 - Django's documented way to a model's name
    projects = actor.projects()
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


def find(actor: Actor, rows: QuerySet[Row]) -> tuple[int | None] | None:
    """The project of the one row, in a tuple; None where there is none that the actor may know of. One query."""
    path = PROJECT_OF[rows.model._meta.label]  # noqa: SLF001 - as above
    found = visible(actor, rows).values_list("pk", path or "pk").first()
    return None if found is None else ((found[1] if path else None),)
