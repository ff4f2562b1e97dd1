"""Signing in as the audit log tells it, and holding back those who guess."""

from __future__ import annotations

import logging
from datetime import timedelta

from django.conf import settings
from django.contrib.auth.models import User
from django.core.cache import cache
from django.db import transaction
from django.utils import timezone

from controlplane.accounts.throttle import forget_failures, forget_wrong_codes, key_of
from controlplane.encryption import keyed_digest
from controlplane.models import AuditEntry, EventKind, SignInLock
from controlplane.services.audit_log import append_entry
from controlplane.services.events import record_event

log = logging.getLogger(__name__)
SIGNED_IN, SIGN_IN_FAILED = "signed_in", "sign_in_refused"
REFUSALS_NOTED_AN_HOUR = 500  # of all people and addresses together: no attack fills the audit log


def record_sign_in(user: User) -> None:
    """Somebody came in."""
    append_entry(SIGNED_IN, f"{user.get_username()} signed in.", by=user)


@transaction.atomic
def record_sign_in_failure(name: str, *, what: str = "") -> None:
    """Somebody did not come in. A ``name`` is what was typed, and may be a password typed in the wrong field: only
    names of people who exist are kept.
    """
    if _is_flooded():
        log.warning("A sign-in was refused; more than %d an hour are not noted one by one.", REFUSALS_NOTED_AN_HOUR)
        return
    person = find_person(name)
    who = person.get_username() if person else "somebody unknown"
    append_entry(SIGN_IN_FAILED, f"Signing in as {who} was refused{what}.")


@transaction.atomic
def record_lockout(name: str, address: str) -> None:
    """Somebody failed too often; noted once for as long as it lasts."""
    if not cache.add(_noted(name, address), value=True, timeout=settings.SIGN_IN_LOCK_S):
        return
    until = timezone.now() + timedelta(seconds=settings.SIGN_IN_LOCK_S)
    person = find_person(name)
    if person is None:
        record_sign_in_failure("", what=": too many failures")
        return
    SignInLock.objects.update_or_create(user=person, address=address, defaults={"until": until})
    summary = f"{person.username} may not sign in from {address} for a while: it failed too often."
    record_event(EventKind.SIGN_IN_LOCKED, summary, detail={"after": {"until": until.isoformat()}})


@transaction.atomic
def unlock_sign_in(person: User, *, by: User | None = None) -> int:
    """Let somebody try again at once, from every address; how many locks were lifted."""
    forget_wrong_codes(person.pk)
    locks = list(SignInLock.objects.select_for_update().filter(user=person))
    for lock in locks:
        forget_failures(person.username, lock.address)
        cache.delete(_noted(person.username, lock.address))
        lock.delete()
    addresses = ", ".join(lock.address for lock in locks) or "anywhere"
    record_event(EventKind.SIGN_IN_UNLOCKED, f"{person.username} may try to sign in again from {addresses}.", by=by)
    return len(locks)


def find_person(name: str) -> User | None:
    """Who signs in under that name, however it is capitalised."""
    return None if "\0" in name or not name else User.objects.filter(username__iexact=name.strip()).first()


def _noted(name: str, address: str) -> str:
    """Under which the cache remembers that a lockout was noted."""
    return f"sign-in-lock:{keyed_digest('sign-in lock', key_of(name, address))}"


def _is_flooded() -> bool:
    """Whether the hour's share of refusals is in the log already. One query of one row."""
    refusals = AuditEntry.objects.filter(kind=SIGN_IN_FAILED).order_by("-number").values_list("at", flat=True)
    oldest = refusals[REFUSALS_NOTED_AN_HOUR - 1 : REFUSALS_NOTED_AN_HOUR].first()
    return oldest is not None and oldest > timezone.now() - timedelta(hours=1)
