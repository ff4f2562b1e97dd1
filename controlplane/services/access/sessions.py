"""Where people are signed in, and ending that. Tokens are not sessions: ``tokens.py``."""

from __future__ import annotations

from datetime import timedelta

from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.utils import timezone

from controlplane.models import EventKind, PersonSession
from controlplane.services.events import record_event

MOST_SHOWN = 100
_UNUSED_FOR = timedelta(days=1)  # long after a session that is being made has been stored


def note_session(user: User, key: str, *, former: str = "", address: str = "", agent: str = "") -> None:
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


def forget_ended_sessions() -> None:
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
    return {"before": [{"address": one.address, "began_at": one.began_at.isoformat()} for one in ended[:MOST_SHOWN]]}
