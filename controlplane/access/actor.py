"""The roles of the client that sent a request, and the project that each row belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Model, QuerySet
from django.http import HttpRequest

from controlplane.models import ApiToken, Role, RoleAssignment, Scope

# The highest role that a token of this scope may use, whatever its user's roles are.
HIGHEST_ROLE = {Scope.READ: Role.VIEWER, Scope.WRITE: Role.APPROVER, Scope.ADMIN: Role.ADMIN}


@dataclass(frozen=True, slots=True)
class Actor:
    """Roles by project id; the key ``None`` stands for all projects."""

    roles: Mapping[int | None, Role]

    def role_in(self, project_id: int | None) -> Role | None:
        """The role in a project, or for rows that belong to no project (``None``); None without any role there."""
        roles = [self.roles[key] for key in {project_id, None} if key in self.roles]
        return max(roles, key=_rank, default=None)

    def may(self, needed: Role, project_id: int | None) -> bool:
        """Whether the role in a project, or for rows that belong to no project, covers the needed one."""
        role = self.role_in(project_id)
        return role is not None and role.covers(needed)

    def may_somewhere(self, needed: Role) -> bool:
        """Whether the role suffices in at least one project."""
        return any(role.covers(needed) for role in self.roles.values())

    def at_least(self, needed: Role) -> Actor:
        """The same actor with only those roles that cover the needed one."""
        return Actor({key: role for key, role in self.roles.items() if role.covers(needed)})

    def projects(self, needed: Role = Role.VIEWER) -> frozenset[int] | None:
        """The ids of the projects where the role suffices; None for all projects."""
        if self.may(needed, None):
            return None
        return frozenset(key for key, role in self.roles.items() if key is not None and role.covers(needed))


WITHOUT_ROLES = Actor({})


def actor_of(request: HttpRequest, token: ApiToken | None = None) -> Actor:
    """The actor of this request, cached on it; a token's scopes bound every role. One query at most."""
    cached: tuple[int | None, Actor] | None = getattr(request, "actor", None)  # token id, actor
    token_id = token.pk if token else None
    if cached is None or cached[0] != token_id:
        user = token.user if token else getattr(request, "user", None)
        cached = token_id, current_actor(user, token)
        request.actor = cached  # type: ignore[attr-defined]
    return cached[1]


def current_actor(user: User | AnonymousUser | None, token: ApiToken | None) -> Actor:
    """The user's roles at this moment, bounded by the token's scopes. One query."""
    actor = roles_of(user)
    if token is None:
        return actor
    highest = highest_role(token)
    return Actor({key: min(role, highest, key=_rank) for key, role in actor.roles.items()})


def highest_role(token: ApiToken) -> Role:
    """The highest role that the scopes of a token allow."""
    return max((HIGHEST_ROLE[Scope(scope)] for scope in token.scopes), key=_rank)


def roles_of(user: User | AnonymousUser | None) -> Actor:
    """The roles of a user. A superuser, created at the command line, is admin of all projects."""
    if not isinstance(user, User) or not user.is_active:
        return WITHOUT_ROLES
    if user.is_superuser:
        return Actor({None: Role.ADMIN})
    roles: dict[int | None, Role] = {}
    for project_id, role in RoleAssignment.objects.filter(user=user).values_list("project_id", "role"):
        roles[project_id] = max(roles.get(project_id, Role(role)), Role(role), key=_rank)
    return Actor(roles)


def _rank(role: Role) -> int:
    return role.rank


# The lookup from a row to its project. None: the row belongs to no project and needs a role in all projects.
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
    "controlplane.UserSession": None,
    "controlplane.SignInLock": None,
    "auth.User": None,
    "telemetry.AlertRule": "pool__project",
    "telemetry.Alert": "pool__project",
    "telemetry.AlertHistoryEntry": "alert__pool__project",
    "telemetry.Silence": "project",
    "telemetry.Channel": None,
    "telemetry.Heartbeat": None,
    "telemetry.MetricsServer": None,
    "telemetry.Notification": "alert__pool__project",
    "telemetry.WhatIf": "pool__project",
    "telemetry.SharedLink": "pool__project",
}

Row = TypeVar("Row", bound=Model)


def visible(actor: Actor, rows: QuerySet[Row]) -> QuerySet[Row]:
    """The rows that the actor may see. KeyError for a model that is missing in ``PROJECT_OF``."""
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
    *relations, foreign_key = path.split("__")
    parent: Any = row
    for relation in relations:
        parent = getattr(parent, relation)
        if parent is None:
            return None
    project_id: int | None = getattr(parent, f"{foreign_key}_id")  # None: applies to all projects, as a silence may
    return project_id


def visible_project(actor: Actor, rows: QuerySet[Row]) -> tuple[int | None] | None:
    """The project id of the first row, in a tuple; None where the actor sees no row. One query."""
    path = PROJECT_OF[rows.model._meta.label]  # noqa: SLF001 - as above
    row = visible(actor, rows).values_list("pk", path or "pk").first()
    return None if row is None else ((row[1] if path else None),)
