"""What a rule would have done over a stretch of the past. Pure, and the same steps as in an evaluation.

Theory of operation. The view moves through the past step by step; each time the kind judges and the state machine takes
its step, as it would have then. An evaluation comes every few seconds and a replay's steps are longer: where a rule
waits for less than a step before it fires, the answer is taken to have held that long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from telemetry.alerts.history_window import Past
from telemetry.alerts.kinds import Asked, Kind, RuleSettings
from telemetry.alerts.kinds.base import MUTED
from telemetry.alerts.verdict import OpenAlert, Result, Step, Unit, Verdict, next_step, worst


@dataclass(frozen=True, slots=True)
class Point:
    """What a rule saw at one moment; of several subjects the worst one."""

    at: datetime
    value: float | None
    limit: float | None
    unit: Unit = "ratio"


@dataclass(slots=True)
class Episode:
    """One time that the rule would have fired."""

    subject: str
    started_at: datetime
    last_breach_at: datetime
    worst: Verdict
    fired_at: datetime | None = None  # None: not yet, and maybe never
    ended_at: datetime | None = None  # None: it still would
    is_cold: bool = True  # muted all the while, as a restarted replica's own

    @property
    def open(self) -> OpenAlert:
        """What the next step depends on."""
        return OpenAlert(self.fired_at is not None, self.started_at, self.last_breach_at)

    def length_s(self, now: datetime) -> float:
        """Seconds from its beginning to its end, or to now."""
        return ((self.ended_at or now) - self.started_at).total_seconds()


@dataclass(slots=True)
class Replay:
    """Everything that was seen, ascending."""

    points: list[Point] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)  # answer -> at how many moments


def replay(kind: Kind, settings: RuleSettings, past: Past, *, group: str = "", first: int = 0) -> Replay:
    """Move through a past from the step ``first`` on."""
    found = Replay()
    going: dict[str, Episode] = {}
    for index in range(first, past.count):
        seen = past.at(index)
        opened = {subject: episode.started_at for subject, episode in going.items()}
        verdicts = kind.judge(settings, seen, Asked(group, opened))
        for subject, verdict in verdicts.items():
            _advance(settings, subject, verdict, going, found.episodes, seen.now, past.step_s)
        for subject in going.keys() - verdicts.keys():
            going.pop(subject).ended_at = seen.now
        if verdicts:
            overall = worst(verdicts)
            found.answers[overall.result] = found.answers.get(overall.result, 0) + 1
            known = overall.result is not Result.NO_DATA
            found.points.append(Point(seen.now, overall.value if known else None, overall.limit, overall.unit))
    return found


def _advance(
    settings: RuleSettings,
    subject: str,
    verdict: Verdict,
    going: dict[str, Episode],
    episodes: list[Episode],
    now: datetime,
    step_s: float,
) -> None:
    episode = going.get(subject)
    step = next_step(settings.timing, verdict.result, episode.open if episode else None, now)
    if step in {Step.OPEN, Step.OPEN_FIRING}:
        episode = going[subject] = Episode(subject, now, now, verdict)
        if settings.timing.for_s < step_s:  # it would have been looked at again before the next step
            episode.fired_at = now + timedelta(seconds=settings.timing.for_s)
            episodes.append(episode)
    if episode is None:
        return
    if verdict.result is Result.BREACH:
        episode.last_breach_at = now
        episode.worst = worst({"a": episode.worst, "b": verdict})
        episode.is_cold = episode.is_cold and MUTED in verdict.figures
    if step is Step.FIRE:
        episode.fired_at = now
        episodes.append(episode)
    elif step in {Step.DROP, Step.RESOLVE}:
        going.pop(subject).ended_at = now


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many points: of each stretch the one that is farthest beyond its limit, or a gap if that is all."""
    size = -(-len(points) // most) if points else 1
    return [max(points[start : start + size], key=_urgency) for start in range(0, len(points), size)]


def _urgency(point: Point) -> tuple[bool, float]:
    if point.value is None:
        return False, 0.0
    return True, abs(point.value - point.limit) if point.limit is not None else 0.0
