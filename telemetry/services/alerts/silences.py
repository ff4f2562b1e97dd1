"""Silences: what nobody wants to be told for a while. They end by themselves; what was is kept."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.errors import InvalidError
from controlplane.models import EventKind, Project
from controlplane.services.checks import lock_row
from controlplane.services.events import record_event
from telemetry.alerts.notifications import reaches
from telemetry.matchers import Given, read_matchers, stored
from telemetry.models import Alert, AlertState, Silence

LONGEST = timedelta(days=90)


def silences(*, ended: bool = False) -> QuerySet[Silence]:
    """Silences that hold or will, those that end first first; or those that are over, the latest first."""
    found = Silence.objects.select_related("project", "created_by")
    now = timezone.now()
    return found.filter(ends_at__lte=now) if ended else found.filter(ends_at__gt=now).order_by("ends_at", "pk")


def matched(matchers: Sequence[Given], *, project: Project | None, among: QuerySet[Alert]) -> list[Alert]:
    """The alerts that a silence would be for, of those that fire or are suspected; InvalidError. One query."""
    read = read_matchers(matchers, everything=False)
    probe = Silence(project=project)
    return [alert for alert in among.exclude(state=AlertState.RESOLVED) if reaches(probe, read, alert)]


@transaction.atomic
def create_silence(
    *,
    matchers: Sequence[Given],
    ends_at: datetime,
    comment: str,
    starts_at: datetime | None = None,
    project: Project | None = None,
    by: User | None = None,
) -> Silence:
    """Silence alerts with these labels, of a project or of all; InvalidError."""
    now = timezone.now()
    starts_at = starts_at or now
    _check_times(starts_at, ends_at, now)
    read = read_matchers(matchers, everything=False)
    silence = Silence.objects.create(
        project=project,
        matchers=[str(matcher) for matcher in read],
        starts_at=starts_at,
        ends_at=ends_at,
        comment=_checked_comment(comment),
        created_by=by,
    )
    _tell(EventKind.SILENCE_CREATED, silence, "was created", by, {"after": facts(silence)})
    return silence


@transaction.atomic
def update_silence(
    silence: Silence, *, ends_at: datetime | None = None, comment: str | None = None, by: User | None = None
) -> Silence:
    """Have a silence end at another time, or say another thing; whom it is for stays. InvalidError."""
    silence = lock_row(Silence.objects.select_for_update(of=("self",)).select_related("project"), silence.pk)
    before, now = facts(silence), timezone.now()
    if silence.ends_at <= now:
        raise InvalidError("$.ends_at", "this silence is over; make another one")
    if ends_at is not None:
        _check_times(silence.starts_at, ends_at, now)
        silence.ends_at = ends_at
    if comment is not None:
        silence.comment = _checked_comment(comment)
    silence.save()
    if (after := facts(silence)) != before:
        _tell(EventKind.SILENCE_CHANGED, silence, "was changed", by, {"before": before, "after": after})
    return silence


@transaction.atomic
def end_silence(silence: Silence, *, by: User | None = None) -> Silence:
    """End a silence now; one that is over stays as it was."""
    silence = lock_row(Silence.objects.select_for_update(of=("self",)).select_related("project"), silence.pk)
    now = timezone.now()
    if silence.ends_at <= now:
        return silence
    before = facts(silence)
    silence.starts_at, silence.ends_at = min(silence.starts_at, now), now
    silence.save()
    _tell(EventKind.SILENCE_ENDED, silence, "was ended", by, {"before": before, "after": facts(silence)})
    return silence


def conditions(silence: Silence) -> list[str]:
    """What alerts have to meet, as it is written."""
    return [str(matcher) for matcher in stored(silence.matchers)]


def words(silence: Silence) -> str:
    """Whom a silence is for."""
    return " and ".join(conditions(silence))


def facts(silence: Silence) -> dict[str, Any]:
    """What an event shows of a silence."""
    return {
        "matchers": conditions(silence),
        "project": silence.project.name if silence.project else None,
        "starts_at": silence.starts_at.isoformat(),
        "ends_at": silence.ends_at.isoformat(),
        "comment": silence.comment,
    }


def _check_times(starts_at: datetime, ends_at: datetime, now: datetime) -> None:
    if ends_at <= max(starts_at, now):
        raise InvalidError("$.ends_at", "expected a time after it starts, and after now")
    if ends_at - max(starts_at, now) > LONGEST:
        raise InvalidError("$.ends_at", f"expected at most {LONGEST.days} days: switch the rule off instead")


def _checked_comment(comment: str) -> str:
    if not comment.strip() or len(comment) > 500:
        raise InvalidError("$.comment", "expected 1 to 500 characters that say why")
    return comment.strip()


def _tell(kind: EventKind, silence: Silence, what: str, by: User | None, detail: dict[str, Any]) -> None:
    summary = f"A silence of {words(silence)} {what}."
    record_event(kind, summary, project=silence.project, by=by, detail=detail)
