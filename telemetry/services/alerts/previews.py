"""Replays a rule over stored history with the evaluation's own code: when it would have fired.

Theory of operation. The replay evaluates one step of the history after the other, and the state machine takes the
action that it would have taken then. An evaluation runs every few seconds and the steps of a replay are longer: where a
rule fires after less than a step, the result is taken to have lasted that long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import OperationalError, connection, transaction
from django.utils import timezone
from psycopg.errors import QueryCanceled

from controlplane.errors import InvalidError
from controlplane.models import Pool
from telemetry.alerts.findings import Action, Finding, Findings, OpenAlert, Result, Unit, next_action, worst_finding
from telemetry.alerts.history import HistoryQuery, load_histories
from telemetry.alerts.history_window import History, whole_steps
from telemetry.alerts.kinds import KINDS, Kind, RuleSettings
from telemetry.alerts.pipeline import watermark
from telemetry.services.alerts.rules import group_of

DAYS, MAX_DAYS = 7.0, 30.0
MAX_STEPS = 12_000
MAX_EVALUATIONS = 200_000  # steps times replicas
MAX_POINTS = 400  # on the chart
MAX_EPISODES = 200
QUERY_TIMEOUT_S = 15


@dataclass(frozen=True, slots=True)
class Point:
    """The value of a rule at one time: that of the subject farthest beyond its limit."""

    at: datetime
    value: float | None
    limit: float | None
    unit: Unit = "ratio"


@dataclass(slots=True)
class Episode:
    """One alert that the rule would have opened."""

    subject: str
    started_at: datetime
    last_breach_at: datetime
    worst: Finding[Any]
    fired_at: datetime | None = None  # None: pending
    ended_at: datetime | None = None  # None: still open
    is_suppressed: bool = True  # every breach was shortly after a restart or outage, and not notified if that caused it

    def length_s(self, now: datetime) -> float:
        return ((self.ended_at or now) - self.started_at).total_seconds()


@dataclass(slots=True)
class Replay:
    """Results of a replay: points and episodes, ascending."""

    points: list[Point] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)  # episodes that fired
    results: Counter[str] = field(default_factory=Counter)  # number of steps by result
    _open: dict[str, Episode] = field(default_factory=dict)  # by subject

    def add(self, settings: RuleSettings, findings: Findings, now: datetime, step_s: float) -> None:
        """Record the findings of one step and the actions that follow from them."""
        for subject, finding in findings.items():
            self._add_finding(settings, subject, finding, now, step_s)
        for subject in self._open.keys() - findings.keys():
            self._open.pop(subject).ended_at = now
        if findings:
            worst = worst_finding(findings)
            self.results[worst.result] += 1
            value = None if worst.result is Result.NO_DATA else worst.value
            self.points.append(Point(now, value, worst.limit, worst.unit))

    def _add_finding(
        self, settings: RuleSettings, subject: str, finding: Finding[Any], now: datetime, step_s: float
    ) -> None:
        episode = self._open.get(subject)
        state = OpenAlert(episode.fired_at is not None, episode.started_at, episode.last_breach_at) if episode else None
        action = next_action(settings.timing, finding.result, state, now)
        if action in {Action.OPEN, Action.OPEN_FIRING}:
            episode = self._open[subject] = Episode(subject, now, now, finding)
            if settings.timing.for_s < step_s:  # an evaluation would have fired it before the next step
                episode.fired_at = now + timedelta(seconds=settings.timing.for_s)
                self.episodes.append(episode)
        if episode is None:
            return
        if finding.result is Result.BREACH:
            episode.last_breach_at = now
            episode.worst = worst_finding({"worst": episode.worst, "this": finding})
            episode.is_suppressed = episode.is_suppressed and finding.restarts is not None
        if action is Action.FIRE:
            episode.fired_at = now
            self.episodes.append(episode)
        elif action in {Action.DROP, Action.RESOLVE}:
            self._open.pop(subject).ended_at = now


def replay(kind: Kind, settings: RuleSettings, history: History, *, group: str = "", first: int = 0) -> Replay:
    """Evaluate the steps of a history from ``first`` on."""
    result = Replay()
    for index in range(first, history.count):
        view = history.at(index)
        result.add(settings, kind.evaluate(settings, view, group), view.now, history.step_s)
    return result


def thin_out(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` points: of each run of points the one farthest from its limit, or a gap if all are unknown."""
    size = -(-len(points) // limit) if points else 1
    return [max(points[start : start + size], key=_distance_key) for start in range(0, len(points), size)]


def _distance_key(point: Point) -> tuple[bool, float]:
    if point.value is None:
        return False, 0.0
    return True, abs(point.value - point.limit) if point.limit is not None else 0.0


@dataclass(frozen=True, slots=True)
class Preview:
    """What a rule would have done."""

    kind: Kind
    start: datetime  # of the period that was evaluated
    end: datetime
    requested_s: float  # length of the requested period
    points: Sequence[Point] = ()
    episodes: Sequence[Episode] = ()  # episodes that fired, the latest first; at most MAX_EPISODES
    fired: int = 0  # all episodes
    results: Mapping[str, int] = field(default_factory=dict)  # number of steps by result
    reason: str = ""  # why there is no preview

    @property
    def is_shorter(self) -> bool:
        """Whether less than the requested period was evaluated."""
        return (self.end - self.start).total_seconds() < self.requested_s * 0.99

    @property
    def summary(self) -> str:
        if self.reason:
            return self.reason
        if not self.results.get("ok", 0) + self.results.get("breach", 0):
            return f"No result in {_period_text(self)}: there is too little history or traffic."
        times = {0: "not at all", 1: "once"}.get(self.fired, f"{self.fired} times")
        return f"Would have fired {times} in {_period_text(self)}."


def _period_text(preview: Preview) -> str:
    seconds = (preview.end - preview.start).total_seconds()
    if seconds >= 172_800:
        return f"the last {seconds / 86_400:.0f} days"
    return f"the last {seconds / 3600:.0f} h" if seconds >= 7200 else f"the last {seconds / 60:.0f} min"


def preview_rule(
    pool: Pool, *, kind: str, settings: Mapping[str, Any], group: str | None = None, days: float = DAYS
) -> Preview:
    """Replay a rule over the last days; InvalidError. As many queries as an evaluation, each with a time limit."""
    if kind not in KINDS:
        raise InvalidError("$.kind", f"expected one of {', '.join(KINDS)}")
    if not 0 < days <= MAX_DAYS:
        raise InvalidError("$.days", f"expected up to {MAX_DAYS:g}")
    parsed: RuleSettings = KINDS[kind].read(dict(settings))
    task_group = group_of(pool, kind, group)
    now = timezone.now()
    return preview_period(
        KINDS[kind],
        parsed,
        pool,
        group=task_group.name if task_group else "",
        start=now - timedelta(days=days),
        end=now,
    )


def preview_period(
    kind: Kind, settings: RuleSettings, pool: Pool, *, group: str, start: datetime, end: datetime
) -> Preview:
    """Replay a kind over a period, or over the last part of a period that is too long."""
    requested_s = (end - start).total_seconds()
    end = min(end, watermark(timezone.now()))
    if not kind.can_be_replayed:
        reason = "There is no preview: this kind evaluates current state, of which no history is stored."
        return Preview(kind, end, end, requested_s, reason=reason)
    replicas = max(pool.replicas.count(), 1)
    steps = min(whole_steps(requested_s, settings.step_s), MAX_STEPS, MAX_EVALUATIONS // replicas)
    lead_steps = whole_steps(settings.lookback_s, settings.step_s)
    first = end - timedelta(seconds=(steps - 1) * settings.step_s)
    query = HistoryQuery(
        sources=kind.needs(group),
        step_s=settings.step_s,
        count=steps + lead_steps,
        until=end,
        first=first,
        days_back=settings.days_back,
        series_lookback_s=settings.series_lookback_s,
        restart_lookback_s=settings.warm_up_lookback_s,
    )
    with _query_time_limit():
        history = load_histories([pool], query)[pool.pk]
    result = replay(kind, settings, history, group=group, first=lead_steps)
    return Preview(
        kind,
        first - timedelta(seconds=settings.step_s),
        end,
        requested_s,
        thin_out(result.points, MAX_POINTS),
        result.episodes[::-1][:MAX_EPISODES],
        len(result.episodes),
        dict(result.results),
    )


@contextmanager
def _query_time_limit() -> Iterator[None]:
    """Cancel queries that take over ``QUERY_TIMEOUT_S``; InvalidError then."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"set local statement_timeout = '{QUERY_TIMEOUT_S}s'")
            yield
            cursor.execute("set local statement_timeout to default")  # of a transaction around this one
    except OperationalError as error:
        if not isinstance(error.__cause__, QueryCanceled):
            raise
        raise InvalidError(
            "$.days", f"reading this much history takes over {QUERY_TIMEOUT_S} s; choose fewer days"
        ) from None
