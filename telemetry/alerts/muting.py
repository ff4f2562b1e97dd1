"""Why an alert that fires is not told. Pure, except for ``active_silences``.

Three things mute, in this order: a silence, another alert that explains it (``INHIBITED_BY``), and replicas that
restarted or were away, where that is all there is to a drop (H18). A muted alert fires, is shown, and ends as any
other. What is muted when it begins is told if it still fires when its silence ends; what was explained, once it is
found broken with nothing to explain it: that it has not ended yet, that its cause ended and still counts within the
rule's window, or that nobody can tell now, is no news of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from telemetry.alerts.kinds.cold import MUTED
from telemetry.alerts.verdict import OVER, Answer, Verdict
from telemetry.matchers import Matcher, match_all, stored
from telemetry.models import Alert, RuleKind, Silence

_DROPS = (RuleKind.HIT_RATE_DROP, RuleKind.HIT_RATE_FLOOR)
_FIGURES = (*_DROPS, RuleKind.PREDICTION_GAP, RuleKind.TTFT_OBJECTIVE, RuleKind.KV_PRESSURE, RuleKind.LOAD_SKEW)
_FLEET_WIDE = (RuleKind.ROLLOUT_STUCK, RuleKind.EVALUATOR_LAG)  # one cause for all pools: one pool's alert is notified

# What fires -> the kinds that it explains, in the same pool. README.md has this table for people.
INHIBITED_BY: dict[str, frozenset[str]] = {
    RuleKind.EVALUATOR_LAG: frozenset({*_FIGURES, RuleKind.ERROR_RATIO, RuleKind.REPLICA_DOWN, RuleKind.NO_DATA}),
    RuleKind.NO_DATA: frozenset({*_FIGURES, RuleKind.REPLICA_DOWN, RuleKind.REPLICA_EJECTED}),
    RuleKind.REPLICA_DOWN: frozenset({*_DROPS, RuleKind.PREDICTION_GAP, RuleKind.LOAD_SKEW, RuleKind.REPLICA_EJECTED}),
}
EXPLAINS = timedelta(minutes=10)  # for so long a replica that is gone may be why its pool is not as usual


@dataclass(frozen=True, slots=True)
class Mute:
    """What mutes an alert."""

    why: str  # "silence", "inhibited" or "restart"
    words: str
    by: int | None = None  # the silence's or the alert's id
    until: str | None = None  # ISO; None: as long as it lasts

    def as_json(self) -> dict[str, Any]:
        """What the alert's row keeps of it."""
        return {"why": self.why, "words": self.words, "by": self.by, "until": self.until}


def active_silences(now: datetime) -> list[tuple[Silence, list[Matcher]]]:
    """The silences that hold at a moment, with what they are for. One query."""
    rows = Silence.objects.filter(starts_at__lte=now, ends_at__gt=now)
    return [(row, stored(row.matchers)) for row in rows]


def reaches(silence: Silence, matchers: Sequence[Matcher], alert: Alert) -> bool:
    """Whether a silence is for an alert."""
    is_inside = silence.project_id is None or silence.project_id == alert.pool.project_id
    return is_inside and match_all(matchers, alert.labels)


def mute_of(
    alert: Alert,
    *,
    silences: Iterable[tuple[Silence, Sequence[Matcher]]],
    firing: Iterable[Alert],
    verdict: Verdict | None,
    now: datetime,
) -> Mute | None:
    """What mutes an alert, or nothing. ``verdict`` is the latest on it; None where there was none this time."""
    for silence, matchers in silences:
        if reaches(silence, matchers, alert):
            return Mute("silence", silence.comment, silence.pk, silence.ends_at.isoformat())
    for other in firing:
        if explains(other, alert, now):
            return Mute("inhibited", other.summary, other.pk)
    if verdict is None or verdict.answer is not Answer.BREACH:
        return _as_explained(alert)
    if verdict.figures.get(OVER) and (explained := _as_explained(alert)):
        return explained
    return _cold(verdict)


def explains(other: Alert, alert: Alert, now: datetime) -> bool:
    """Whether one alert is why another fires; where both are of replicas, of the same one."""
    if alert.rule.kind in _FLEET_WIDE and other.rule.kind == alert.rule.kind:
        in_project = other.pool.project_id == alert.pool.project_id
        return in_project and other.pk < alert.pk and other.muted is None
    if other.pool_id != alert.pool_id or alert.rule.kind not in INHIBITED_BY.get(other.rule.kind, frozenset()):
        return False
    if other.subject and not alert.subject:
        return _came_with(other, alert, now)
    return not (other.subject and alert.subject) or other.subject == alert.subject


def _came_with(other: Alert, alert: Alert, now: datetime) -> bool:
    """Whether a replica's alert may tell why its pool is not as usual: not if the pool was so before it, nor for good.

    Two of its limits lie between a replica's last answer and the beginning of its alert, at most.
    """
    gone_at = other.started_at - timedelta(seconds=2 * (other.limit or 0.0))
    return alert.started_at >= gone_at and now < other.started_at + EXPLAINS


def _as_explained(alert: Alert) -> Mute | None:
    """What explained it when it was last found broken."""
    kept = alert.muted
    return Mute(**kept) if kept and kept["why"] != "silence" else None


def _cold(verdict: Verdict) -> Mute | None:
    cold = verdict.figures.get(MUTED)
    if not cold:
        return None
    words = f"{', '.join(cold)} restarted or was away; but for what that costs there is no drop."
    return Mute("restart", words, until=verdict.figures["warm_at"])
