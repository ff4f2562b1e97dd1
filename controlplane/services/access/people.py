"""Where people are signed in, and ending that. Tokens are not sessions: ``tokens.py``.

The second factor, as others may change it: it is taken away; only its owner sets it up.

People, and the roles that they hold.

Roles that groups at the identity provider bring.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import timedelta

from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount
from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.auth.password_validation import validate_password
from django.contrib.sessions.models import Session
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from controlplane.errors import ConflictError, InvalidError, NameTakenError
from controlplane.models import EventKind, PersonSession, Project, Role, RoleAssignment
from controlplane.services.checks import lock_row
from controlplane.services.events import record_event

MAX_SHOWN = 100
_UNUSED_FOR = timedelta(days=1)  # long after a session that is being made has been stored


def record_session(user: User, key: str, *, former: str = "", address: str = "", agent: str = "") -> None:
    """Somebody is there, in this session, which was called ``former`` before its key changed."""
    rows = PersonSession.objects
    seen = {"address": address[:45], "agent": agent[:200], "seen_at": timezone.now()}
    if rows.filter(key=key).update(**seen) or (former and rows.filter(key=former).update(key=key, **seen)):
        return
    rows.bulk_create([PersonSession(user=user, key=key, **seen)], ignore_conflicts=True)  # of requests side by side


def sessions_of(person: User) -> QuerySet[PersonSession]:
    """Where somebody is signed in now, latest seen first. One query."""
    alive = Session.objects.filter(session_key=OuterRef("key"), expire_date__gt=timezone.now())
    return PersonSession.objects.filter(Exists(alive), user=person)


@transaction.atomic
def end_session(session: PersonSession, *, by: User) -> None:
    """End one now: its next request asks to sign in."""
    _end(PersonSession.objects.filter(pk=session.pk))
    whose = "one of their sessions" if session.user_id == by.pk else f"a session of {session.user.username}"
    record_event(EventKind.USER_CHANGED, f"{by.username} ended {whose}.", by=by, detail=_told([session]))


@transaction.atomic
def end_sessions(person: User, *, but: str = "", by: User | None = None) -> int:
    """End all of somebody's sessions now, except the one with the key ``but``; how many were ended."""
    ended = list(sessions_of(person).exclude(key=but))
    _end(PersonSession.objects.filter(user=person).exclude(key=but))
    if ended:
        which = "sessions ended" if len(ended) > 1 else "session ended"
        summary = f"{len(ended)} {'other ' if but else ''}{which} of {person.username}."
        record_event(EventKind.USER_CHANGED, summary, by=by, detail=_told(ended))
    return len(ended)


def delete_ended_sessions() -> None:
    """Sweep away sessions that expired, and what told of sessions that are gone."""
    now = timezone.now()
    Session.objects.filter(expire_date__lt=now).delete()
    gone = ~Exists(Session.objects.filter(session_key=OuterRef("key")))
    PersonSession.objects.filter(gone, seen_at__lt=now - _UNUSED_FOR).delete()


def _end(rows: QuerySet[PersonSession]) -> None:
    Session.objects.filter(session_key__in=list(rows.values_list("key", flat=True))).delete()
    rows.delete()


def _told(ended: list[PersonSession]) -> dict[str, object]:
    """What the audit log says of those that ended: where, never by which key."""
    return {"before": [{"address": one.address, "began_at": one.began_at.isoformat()} for one in ended[:MAX_SHOWN]]}


@transaction.atomic
def reset_second_factor(person: User, *, by: User | None = None) -> None:
    """Let somebody who lost their phone sign in with the password alone; ConflictError if there is nothing to reset."""
    if not Authenticator.objects.filter(user=person).delete()[0]:
        raise ConflictError(f"{person.username} has no second factor.")
    summary = f"The second factor of {person.username} was reset."
    record_event(EventKind.SECOND_FACTOR_CHANGED, summary, by=by)


def record_second_factor_change(person: User, what: str) -> None:
    """Its owner changed it."""
    record_event(EventKind.SECOND_FACTOR_CHANGED, f"{person.username} {what}.", by=person)


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
    person = lock_row(User.objects.select_for_update(), person.pk)
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
    person = lock_row(User.objects.select_for_update(), person.pk)
    _set_password(person, password)
    person.save(update_fields=["password"])
    end_sessions(person, by=by)
    record_event(EventKind.USER_CHANGED, f"{person.username} got a new password.", by=by)


@transaction.atomic
def set_role(person: User, role: Role | None, project: Project | None, *, by: User | None = None) -> None:
    """Give a role in a project, or in all and for what belongs to none (``None``), in place of the one before.

    A ``role`` of None takes it away. ConflictError where nobody would be left who is admin of everything.
    """
    person = lock_row(User.objects.select_for_update(), person.pk)
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
    lock_row(User.objects.select_for_update(), person.pk)
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


def record_first_single_sign_on(person: User) -> None:
    """Somebody came in by single sign-on for the first time."""
    record_event(EventKind.USER_ADDED, f"{person.username} came in by single sign-on for the first time.", by=person)


def record_account_connected(person: User) -> None:
    """Somebody tied their account to the one that they have at the identity provider."""
    record_event(EventKind.USER_CHANGED, f"{person.username} may also sign in by single sign-on.", by=person)


@transaction.atomic
def disconnect_single_sign_on(person: User) -> None:
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
