"""Roles that groups at the identity provider bring."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from allauth.socialaccount.models import SocialAccount
from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction

from controlplane.errors import ConflictError
from controlplane.models import EventKind, Project, Role, RoleAssignment
from controlplane.services.events import record_event
from controlplane.services.holding import hold

log = logging.getLogger(__name__)


def roles_of_groups(groups: Iterable[str]) -> dict[str | None, Role]:
    """The greatest role in each project, by name, that membership of these groups brings; None: in all projects."""
    mine = frozenset(groups)
    found: dict[str | None, Role] = {}
    for mapped in settings.OIDC_GROUP_ROLES:
        if mapped.group in mine:
            role = Role(mapped.role)
            found[mapped.project] = max(found.get(mapped.project, role), role, key=lambda one: one.rank)
    return found


@transaction.atomic
def sync_group_roles(person: User, groups: Iterable[str]) -> None:
    """Make the roles that groups bring what the groups of now say; roles that admins gave stay as they are."""
    hold(User.objects.select_for_update(), person.pk)
    wanted = {place: role for name, role in roles_of_groups(groups).items() for place in _places(name)}
    for held in RoleAssignment.objects.filter(user=person, from_groups=True).select_related("project"):
        if held.project not in wanted:
            held.delete()
            _record(person, held.project, held.role, None)
    for place, role in wanted.items():
        brought = RoleAssignment.objects.filter(user=person, project=place, from_groups=True)
        before = brought.values_list("role", flat=True).first()
        if before != role:
            brought.update_or_create(user=person, project=place, from_groups=True, defaults={"role": role})
            _record(person, place, before, role)


def note_newcomer(person: User) -> None:
    """Somebody came in by single sign-on for the first time."""
    record_event(EventKind.USER_ADDED, f"{person.username} came in by single sign-on for the first time.", by=person)


def note_connection(person: User) -> None:
    """Somebody tied their account to the one that they have at the identity provider."""
    record_event(EventKind.USER_CHANGED, f"{person.username} may also sign in by single sign-on.", by=person)


@transaction.atomic
def disconnect_account(person: User) -> None:
    """Untie it again, and take away what groups brought; ConflictError where there is no password to come back with."""
    if not person.has_usable_password():
        raise ConflictError("You have no password here. Ask an admin to set one first.")
    if SocialAccount.objects.filter(user=person).delete()[0]:
        sync_group_roles(person, ())
        summary = f"{person.username} does not sign in by single sign-on any more."
        record_event(EventKind.USER_CHANGED, summary, by=person)


def _places(name: str | None) -> list[Project | None]:
    """The project of that name; none, and a warning, where there is no such project."""
    if name is None:
        return [None]
    found: list[Project | None] = list(Project.objects.filter(name=name))
    if not found:
        log.warning("WARMPATH_OIDC_GROUP_ROLES names the project %r, which there is not.", name)
    return found


def _record(person: User, project: Project | None, before: str | None, after: str | None) -> None:
    where = f"project {project.name}" if project else "all projects"
    summary = f"{person.username} {f'is {after} of' if after else 'has no role any more in'} {where}, by group."
    change = {"before": {"role": before}, "after": {"role": after}}
    record_event(EventKind.ROLE_CHANGED, summary, project=project, detail=change)
