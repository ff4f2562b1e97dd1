"""Who is asking, and which roles they hold where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpRequest

from controlplane.models import ApiToken, Role, RoleAssignment, Scope

# The most that a token may do, whatever its user's roles are.
CAPS = {Scope.READ: Role.VIEWER, Scope.WRITE: Role.APPROVER, Scope.ADMIN: Role.ADMIN}


@dataclass(frozen=True, slots=True)
class Asker:
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

    def at_least(self, needed: Role) -> Asker:
        """The same with only those roles that cover what is needed."""
        return Asker({key: role for key, role in self.roles.items() if role.covers(needed)})

    def projects(self, needed: Role = Role.VIEWER) -> frozenset[int] | None:
        """The ids of the projects where the role suffices; None for all there are."""
        if self.may(needed, None):
            return None
        return frozenset(key for key, role in self.roles.items() if key is not None and role.covers(needed))


NOBODY = Asker({})


def asker_of(request: HttpRequest, token: ApiToken | None = None) -> Asker:
    """Who sent this request, asked for once; with a token its scopes bound every role. One query."""
    known: tuple[int | None, Asker] | None = getattr(request, "asker", None)  # by which token, and who
    key = token.pk if token else None
    if known is None or known[0] != key:
        user = token.user if token else getattr(request, "user", None)
        known = key, _capped(roles_of(user), token)
        request.asker = known  # type: ignore[attr-defined]
    return known[1]


def asker_now(user: User, token: ApiToken | None) -> Asker:
    """Who somebody is at this moment, whatever was known when their request began. One query."""
    return _capped(roles_of(user), token)


def roles_of(user: User | AnonymousUser | None) -> Asker:
    """The roles of a person. A superuser, made at the command line, is admin of everything: the way back in."""
    if not isinstance(user, User) or not user.is_active:
        return NOBODY
    if user.is_superuser:
        return Asker({None: Role.ADMIN})
    held: dict[int | None, Role] = {}
    for project_id, role in RoleAssignment.objects.filter(user=user).values_list("project_id", "role"):
        held[project_id] = max(held.get(project_id, Role(role)), Role(role), key=lambda one: one.rank)
    return Asker(held)


def _capped(asker: Asker, token: ApiToken | None) -> Asker:
    if token is None:
        return asker
    most = max((CAPS[Scope(scope)] for scope in token.scopes), key=lambda role: role.rank)
    return Asker({key: min(role, most, key=lambda one: one.rank) for key, role in asker.roles.items()})
