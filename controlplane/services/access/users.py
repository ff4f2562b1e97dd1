"""Users: accounts, sessions, second factors and roles, including roles by groups of the identity provider.

API tokens are not sessions: ``tokens.py``.
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
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from controlplane.errors import ConflictError, InvalidError, NameTakenError
from controlplane.models import EventKind, Project, Role, RoleAssignment, UserSession
from controlplane.services.checks import lock_row, unique_or
from controlplane.services.events import record_event

MAX_SHOWN = 100
_UNUSED_FOR = timedelta(days=1)  # longer than a new session takes to be stored

log = logging.getLogger(__name__)


# --- accounts -------------------------------------------------------------------------------------------


@transaction.atomic
def add_user(username: str, *, password: str, email: str = "", by: User | None = None) -> User:
    """Create a user without any role. InvalidError, NameTakenError."""
    user = User(username=username, email=email)
    try:
        user.clean_fields(exclude=["password"])
    except ValidationError as error:
        field, reasons = next(iter(error.message_dict.items()))
        raise InvalidError(f"$.{field}", reasons[0]) from None
    _set_password(user, password)
    with unique_or(lambda _: NameTakenError("user", username)):
        user.save()
    record_event(EventKind.USER_ADDED, f"User {username} was added.", by=by, detail={"after": {"email": email}})
    return user


@transaction.atomic
def set_active(user: User, active: bool, *, by: User | None = None) -> User:
    """Enable or disable an account; disabling ends sessions and tokens at once. ConflictError for the last admin."""
    user = lock_row(User.objects.select_for_update(), user.pk)
    if user.is_active == active:
        return user
    user.is_active = active
    user.save(update_fields=["is_active"])
    if not active:
        _require_admin()
        end_sessions(user, by=by)
    summary = f"The account of {user.username} was {'enabled' if active else 'disabled'}."
    change = {"before": {"active": not active}, "after": {"active": active}}
    record_event(EventKind.USER_CHANGED, summary, by=by, detail=change)
    return user


@transaction.atomic
def set_password(user: User, password: str, *, by: User | None = None) -> None:
    """Replace a forgotten password and end the user's sessions. InvalidError for a weak password."""
    user = lock_row(User.objects.select_for_update(), user.pk)
    _set_password(user, password)
    user.save(update_fields=["password"])
    end_sessions(user, by=by)
    record_event(EventKind.USER_CHANGED, f"The password of {user.username} was changed.", by=by)


def _set_password(user: User, password: str) -> None:
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise InvalidError("$.password", " ".join(error.messages)) from None
    user.set_password(password)


def _require_admin() -> None:
    """ConflictError unless an active admin of all projects is left. Locks the admins against concurrent removals."""
    admins = RoleAssignment.objects.filter(project=None, role=Role.ADMIN).values("user")
    active = User.objects.filter(Q(is_superuser=True) | Q(pk__in=admins), is_active=True)
    if not list(active.select_for_update().order_by("pk").values_list("pk")):
        raise ConflictError("No admin of all projects would be left. Make another user admin first.")


# --- sessions -------------------------------------------------------------------------------------------


def record_session(user: User, key: str, *, former_key: str = "", address: str = "", agent: str = "") -> None:
    """Record a request of a session, whose key was ``former_key`` before it changed."""
    rows = UserSession.objects
    request = {"address": address[:45], "agent": agent[:200], "seen_at": timezone.now()}
    if rows.filter(key=key).update(**request) or (
        former_key and rows.filter(key=former_key).update(key=key, **request)
    ):
        return
    rows.bulk_create([UserSession(user=user, key=key, **request)], ignore_conflicts=True)  # of concurrent requests


def sessions_of(user: User) -> QuerySet[UserSession]:
    """The user's active sessions, most recently used first. One query."""
    active = Session.objects.filter(session_key=OuterRef("key"), expire_date__gt=timezone.now())
    return UserSession.objects.filter(Exists(active), user=user)


@transaction.atomic
def end_session(session: UserSession, *, by: User) -> None:
    """End one session now: its next request requires sign-in."""
    _delete_sessions(UserSession.objects.filter(pk=session.pk))
    ended = "one of their sessions" if session.user_id == by.pk else f"a session of {session.user.username}"
    record_event(EventKind.USER_CHANGED, f"{by.username} ended {ended}.", by=by, detail=_session_detail([session]))


@transaction.atomic
def end_sessions(user: User, *, except_key: str = "", by: User | None = None) -> int:
    """End all sessions of a user now, except the one with ``except_key``; returns how many ended."""
    ended = list(sessions_of(user).exclude(key=except_key))
    _delete_sessions(UserSession.objects.filter(user=user).exclude(key=except_key))
    if ended:
        sessions = f"{'other ' if except_key else ''}session{'s' if len(ended) > 1 else ''}"
        summary = f"{len(ended)} {sessions} of {user.username} ended."
        record_event(EventKind.USER_CHANGED, summary, by=by, detail=_session_detail(ended))
    return len(ended)


def delete_ended_sessions() -> None:
    """Delete expired sessions, and rows whose session was deleted."""
    now = timezone.now()
    Session.objects.filter(expire_date__lt=now).delete()
    ended = ~Exists(Session.objects.filter(session_key=OuterRef("key")))
    UserSession.objects.filter(ended, seen_at__lt=now - _UNUSED_FOR).delete()


def _delete_sessions(rows: QuerySet[UserSession]) -> None:
    Session.objects.filter(session_key__in=list(rows.values_list("key", flat=True))).delete()
    rows.delete()


def _session_detail(ended: list[UserSession]) -> dict[str, object]:
    """Event details of ended sessions, without their keys."""
    return {"before": [{"address": row.address, "started_at": row.started_at.isoformat()} for row in ended[:MAX_SHOWN]]}


# --- second factor --------------------------------------------------------------------------------------


@transaction.atomic
def reset_second_factor(user: User, *, by: User | None = None) -> None:
    """Remove a lost second factor, so that the password alone suffices; ConflictError if there is none."""
    if not Authenticator.objects.filter(user=user).delete()[0]:
        raise ConflictError(f"{user.username} has no second factor.")
    record_event(EventKind.SECOND_FACTOR_CHANGED, f"The second factor of {user.username} was reset.", by=by)


def record_second_factor_change(user: User, change: str) -> None:
    """Record a change by the user; ``change`` follows the username."""
    record_event(EventKind.SECOND_FACTOR_CHANGED, f"{user.username} {change}.", by=user)


# --- roles ----------------------------------------------------------------------------------------------


@transaction.atomic
def set_role(user: User, role: Role | None, project: Project | None, *, by: User | None = None) -> None:
    """Assign a role in a project, or in all projects (``project`` None); ``role`` None removes it.

    ConflictError if no admin of all projects would be left.
    """
    user = lock_row(User.objects.select_for_update(), user.pk)
    before = _assign(user, role, project, from_groups=False)
    if before == role:
        return
    if before == Role.ADMIN and project is None:
        _require_admin()
    _record_role(user, before, role, project, by=by)


def roles_of_groups(groups: Iterable[str]) -> dict[str | None, Role]:
    """The highest role per project name that these groups grant; None: all projects."""
    names, roles = frozenset(groups), dict[str | None, Role]()
    for mapping in settings.OIDC_GROUP_ROLES:
        role = Role(mapping.role)
        if mapping.group in names and role.covers(roles.get(mapping.project, role)):
            roles[mapping.project] = role
    return roles


@transaction.atomic
def sync_group_roles(user: User, groups: Iterable[str]) -> None:
    """Replace the roles granted by groups; roles assigned by admins stay."""
    lock_row(User.objects.select_for_update(), user.pk)
    granted: dict[Project | None, Role] = {}
    for name, role in roles_of_groups(groups).items():
        project = Project.objects.filter(name=name).first() if name is not None else None
        if name is not None and project is None:
            log.warning("WARMPATH_OIDC_GROUP_ROLES names project %r, which does not exist.", name)
        else:
            granted[project] = role
    current = RoleAssignment.objects.filter(user=user, from_groups=True).select_related("project")
    for project in dict.fromkeys((*(row.project for row in current), *granted)):
        before = _assign(user, granted.get(project), project, from_groups=True)
        if before != granted.get(project):
            _record_role(user, before, granted.get(project), project, suffix=", by group")


def _assign(user: User, role: Role | None, project: Project | None, *, from_groups: bool) -> str | None:
    """Store a role assignment, or delete it if ``role`` is None; returns the previous role."""
    rows = RoleAssignment.objects.filter(user=user, project=project, from_groups=from_groups)
    before = rows.values_list("role", flat=True).first()
    if role is None:
        rows.delete()
    elif role != before:
        rows.update_or_create(user=user, project=project, from_groups=from_groups, defaults={"role": role})
    return before


def _record_role(
    user: User,
    before: str | None,
    role: Role | None,
    project: Project | None,
    *,
    suffix: str = "",
    by: User | None = None,
) -> None:
    scope = f"project {project.name}" if project else "all projects"
    text = f"is {role} of {scope}" if role else f"no longer has a role in {scope}"
    detail = {"before": {"role": before}, "after": {"role": role}}
    record_event(EventKind.ROLE_CHANGED, f"{user.username} {text}{suffix}.", project=project, by=by, detail=detail)


# --- single sign-on -------------------------------------------------------------------------------------


def record_first_single_sign_on(user: User) -> None:
    record_event(EventKind.USER_ADDED, f"{user.username} signed in by single sign-on for the first time.", by=user)


def record_account_connected(user: User) -> None:
    record_event(EventKind.USER_CHANGED, f"{user.username} can now sign in by single sign-on.", by=user)


@transaction.atomic
def disconnect_single_sign_on(user: User) -> None:
    """Disconnect an account from the identity provider and remove the roles granted by its groups.

    ConflictError without a password, because the user could not sign in any more.
    """
    if not user.has_usable_password():
        raise ConflictError("You have no password in Warmpath. Ask an admin to set one first.")
    if SocialAccount.objects.filter(user=user).delete()[0]:
        sync_group_roles(user, ())
        summary = f"{user.username} can no longer sign in by single sign-on."
        record_event(EventKind.USER_CHANGED, summary, by=user)
