"""People, and the roles that they hold."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Q

from controlplane.errors import ConflictError, InvalidError, NameTakenError
from controlplane.models import EventKind, Project, Role, RoleAssignment
from controlplane.services.access.sessions import end_sessions
from controlplane.services.events import record_event
from controlplane.services.holding import hold


@transaction.atomic
def add_person(username: str, *, password: str, email: str = "", by: User | None = None) -> User:
    """Somebody who may sign in, and sees nothing until they are given a role. InvalidError, NameTakenError."""
    person = User(username=username, email=email)
    try:
        person.clean_fields(exclude=["password"])
    except ValidationError as error:
        field, reasons = next(iter(error.message_dict.items()))
        raise InvalidError(f"$.{field}", reasons[0]) from None
    _set_password(person, password)
    try:
        with transaction.atomic():
            person.save()
    except IntegrityError:
        raise NameTakenError("person", username) from None
    record_event(EventKind.USER_ADDED, f"{username} may sign in.", by=by, detail={"after": {"email": email}})
    return person


@transaction.atomic
def set_active(person: User, active: bool, *, by: User | None = None) -> User:
    """Let somebody sign in again, or no more: sessions and tokens end at once. ConflictError for the last admin."""
    person = hold(User.objects.select_for_update(), person.pk)
    if person.is_active == active:
        return person
    person.is_active = active
    person.save(update_fields=["is_active"])
    if not active:
        _keep_an_admin()
        end_sessions(person, by=by)
    summary = f"{person.username} may sign in again." if active else f"{person.username} may not sign in any more."
    change = {"before": {"active": not active}, "after": {"active": active}}
    record_event(EventKind.USER_CHANGED, summary, by=by, detail=change)
    return person


@transaction.atomic
def set_password(person: User, password: str, *, by: User | None = None) -> None:
    """Give somebody a new password, who forgot theirs; their sessions end. InvalidError for a weak one."""
    person = hold(User.objects.select_for_update(), person.pk)
    _set_password(person, password)
    person.save(update_fields=["password"])
    end_sessions(person, by=by)
    record_event(EventKind.USER_CHANGED, f"{person.username} got a new password.", by=by)


@transaction.atomic
def set_role(person: User, role: Role | None, project: Project | None, *, by: User | None = None) -> None:
    """Give a role in a project, or in all and for what belongs to none (``None``), in place of the one before.

    A ``role`` of None takes it away. ConflictError where nobody would be left who is admin of everything.
    """
    person = hold(User.objects.select_for_update(), person.pk)
    given = RoleAssignment.objects.filter(user=person, project=project, from_groups=False)
    held = given.first()
    before = held.role if held else None
    if before == role:
        return
    if role is None:
        given.delete()
    else:
        given.update_or_create(user=person, project=project, from_groups=False, defaults={"role": role})
    if before == Role.ADMIN and project is None:
        _keep_an_admin()
    where = f"project {project.name}" if project else "all projects"
    summary = f"{person.username} is {role} of {where}." if role else f"{person.username} has no role in {where}."
    change = {"before": {"role": before}, "after": {"role": role}}
    record_event(EventKind.ROLE_CHANGED, summary, project=project, by=by, detail=change)


def _set_password(person: User, password: str) -> None:
    try:
        validate_password(password, person)
    except ValidationError as error:
        raise InvalidError("$.password", " ".join(error.messages)) from None
    person.set_password(password)


def _keep_an_admin() -> None:
    """ConflictError unless somebody is left who can give roles back. Locks them, so that two cannot leave at once."""
    held = RoleAssignment.objects.filter(project=None, role=Role.ADMIN).values("user")
    ruling = User.objects.filter(Q(is_superuser=True) | Q(pk__in=held), is_active=True)
    if not list(ruling.select_for_update().order_by("pk").values_list("pk")):
        raise ConflictError("Nobody would be left who is admin of all projects. Make somebody else admin first.")
