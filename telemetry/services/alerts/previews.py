"""What a rule would have done lately: on stored history, before it is saved, by the evaluation's own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import OperationalError, connection, transaction
from django.utils import timezone
from psycopg.errors import QueryCanceled

from controlplane.errors import InvalidError
from controlplane.models import Pool
from telemetry.alerts.history import Wanted, load_pasts
from telemetry.alerts.history_window import steps_in
from telemetry.alerts.kinds import KINDS, Kind, RuleSettings
from telemetry.alerts.pipeline import settled_until
from telemetry.alerts.replay import Episode, Point, Replay, replay, thinned
from telemetry.services.alerts.rules import group_of

DAYS, MOST_DAYS = 7.0, 30.0
MOST_STEPS = 12_000  # moments that are judged
MOST_JUDGEMENTS = 200_000  # moments times replicas
MOST_POINTS = 400  # of the chart
MOST_EPISODES = 200  # that are told
QUERY_S = 15  # that the database may take for one query


@dataclass(frozen=True, slots=True)
class Preview:
    """What would have been."""

    kind: Kind
    start: datetime  # of what was looked at
    end: datetime
    asked_s: float  # how far back it should have been
    points: list[Point]
    episodes: list[Episode]  # that fired, the latest first; at most MOST_EPISODES
    fired: int  # how many did
    answers: dict[str, int]  # answer -> at how many moments
    reason: str = ""  # why nothing could be looked at

    @property
    def is_shorter(self) -> bool:
        """Whether less was looked at than was asked for."""
        return (self.end - self.start).total_seconds() < self.asked_s * 0.99

    @property
    def sentence(self) -> str:
        """In words."""
        if self.reason:
            return self.reason
        if not self.answers.get("ok", 0) + self.answers.get("breach", 0):
            return f"Could not have told in {_span(self)}: there is too little history or traffic."
        times = {0: "not at all", 1: "once"}.get(self.fired, f"{self.fired} times")
        return f"Would have fired {times} in {_span(self)}."


def _span(preview: Preview) -> str:
    seconds = (preview.end - preview.start).total_seconds()
    if seconds >= 172_800:
        return f"the last {seconds / 86_400:.0f} days"
    return f"the last {seconds / 3600:.0f} h" if seconds >= 7200 else f"the last {seconds / 60:.0f} min"


def preview_rule(
    pool: Pool, *, kind: str, settings: Mapping[str, Any], group: str | None = None, days: float = DAYS
) -> Preview:
    """Replay a rule over the last days; InvalidError. As many queries as an evaluation, each bounded in time."""
    if kind not in KINDS:
        raise InvalidError("$.kind", f"expected one of {', '.join(KINDS)}")
    if not 0 < days <= MOST_DAYS:
        raise InvalidError("$.days", f"expected up to {MOST_DAYS:g}")
    read: RuleSettings = KINDS[kind].read(dict(settings))
    named = group_of(pool, kind, group)
    now = timezone.now()
    return preview_period(
        KINDS[kind], read, pool, group=named.name if named else "", start=now - timedelta(days=days), end=now
    )


def preview_period(
    kind: Kind, settings: RuleSettings, pool: Pool, *, group: str, start: datetime, end: datetime
) -> Preview:
    """Replay a kind over a stretch of a pool's past, or over its end where all of it would be too much."""
    asked_s = (end - start).total_seconds()
    end = min(end, settled_until(timezone.now()))
    if not kind.can_be_replayed:
        return Preview(kind, end, end, asked_s, [], [], 0, {}, "No history is kept of this: there is no preview.")
    replicas = max(pool.replicas.count(), 1)
    steps = min(steps_in(asked_s, settings.step_s), MOST_STEPS, MOST_JUDGEMENTS // replicas)
    lead = steps_in(settings.open_reach_s, settings.step_s)
    first = end - timedelta(seconds=(steps - 1) * settings.step_s)
    wanted = Wanted(
        sources=kind.needs(group),
        step_s=settings.step_s,
        count=steps + lead,
        until=end,
        first=first,
        days_back=settings.days_back,
        series_reach_s=settings.series_reach_s,
        restart_reach_s=settings.warm_up_reach_s,
    )
    with bounded_queries():
        past = load_pasts([pool], wanted)[pool.pk]
    found = replay(kind, settings, past, group=group, first=lead)
    return _shown(found, kind, first - timedelta(seconds=settings.step_s), end, asked_s)


def _shown(found: Replay, kind: Kind, start: datetime, end: datetime, asked_s: float) -> Preview:
    points = thinned(found.points, MOST_POINTS)
    latest = found.episodes[::-1][:MOST_EPISODES]
    return Preview(kind, start, end, asked_s, points, latest, len(found.episodes), found.answers)


@contextmanager
def bounded_queries() -> Iterator[None]:
    """Have the database give up on queries that take too long; InvalidError says so."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"set local statement_timeout = '{QUERY_S}s'")
            yield
            cursor.execute("set local statement_timeout to default")  # of a transaction around this one
    except OperationalError as error:
        if not isinstance(error.__cause__, QueryCanceled):
            raise
        raise InvalidError("$.days", f"reading so much history takes more than {QUERY_S} s; ask for fewer") from None
