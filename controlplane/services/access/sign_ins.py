"""Audit entries of sign-ins, and temporary locks after too many failures."""

from __future__ import annotations

import logging
from datetime import timedelta

from django.conf import settings
from django.contrib.auth.models import User
from django.core.cache import cache
from django.db import transaction
from django.utils import timezone

from controlplane.accounts.sign_in_methods import clear_failures, clear_second_factor_failures, failure_key
from controlplane.encryption import keyed_digest
from controlplane.models import AuditEntry, EventKind, SignInLock
from controlplane.services.audit_log import append_entry
from controlplane.services.events import record_event

SIGNED_IN, SIGN_IN_FAILED = "signed_in", "sign_in_refused"
MAX_FAILURES_PER_HOUR = 500  # audit entries for all users and addresses: no attack fills the audit log

log = logging.getLogger(__name__)


def record_sign_in(user: User) -> None:
    append_entry(SIGNED_IN, f"{user.get_username()} signed in.", by=user)


@transaction.atomic
def record_sign_in_failure(name: str, *, detail: str = "") -> None:
    """Record a failed sign-in. Only names of existing users are stored: the input may be a mistyped password."""
    failures = AuditEntry.objects.filter(kind=SIGN_IN_FAILED).order_by("-number").values_list("at", flat=True)
    oldest = failures[MAX_FAILURES_PER_HOUR - 1 : MAX_FAILURES_PER_HOUR].first()
    if oldest is not None and oldest > timezone.now() - timedelta(hours=1):
        log.warning("sign_in_failure_not_audited: more than %d in one hour", MAX_FAILURES_PER_HOUR)
        return
    user = find_user(name)
    username = user.get_username() if user else "an unknown user"
    append_entry(SIGN_IN_FAILED, f"Sign-in as {username} failed{detail}.")


@transaction.atomic
def record_lockout(name: str, address: str) -> None:
    """Record too many failures of a name from an address, once while the lock lasts."""
    if not cache.add(_lockout_key(name, address), value=True, timeout=settings.SIGN_IN_LOCK_S):
        return
    until = timezone.now() + timedelta(seconds=settings.SIGN_IN_LOCK_S)
    user = find_user(name)
    if user is None:
        record_sign_in_failure("", detail=": too many failures")
        return
    SignInLock.objects.update_or_create(user=user, address=address, defaults={"until": until})
    summary = f"Sign-in of {user.username} from {address} is locked after too many failures."
    record_event(EventKind.SIGN_IN_LOCKED, summary, detail={"after": {"until": until.isoformat()}})


@transaction.atomic
def unlock_sign_in(user: User, *, by: User | None = None) -> int:
    """Remove the user's locks at all addresses; their number."""
    clear_second_factor_failures(user.pk)
    locks = list(SignInLock.objects.select_for_update().filter(user=user))
    for lock in locks:
        clear_failures(user.username, lock.address)
        cache.delete(_lockout_key(user.username, lock.address))
        lock.delete()
    addresses = ", ".join(lock.address for lock in locks) or "any address"
    record_event(EventKind.SIGN_IN_UNLOCKED, f"Sign-in of {user.username} from {addresses} was unlocked.", by=by)
    return len(locks)


def find_user(name: str) -> User | None:
    """The user of a name, ignoring case."""
    return None if "\0" in name or not name else User.objects.filter(username__iexact=name.strip()).first()


def _lockout_key(name: str, address: str) -> str:
    """Cache key of a recorded lockout."""
    return f"sign-in-lock:{keyed_digest('sign-in lock', failure_key(name, address))}"
