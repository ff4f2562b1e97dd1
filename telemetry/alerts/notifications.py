"""Why an alert that fires is not told. Pure, except for ``active_silences``.

Three things mute, in this order: a silence, another alert that explains it (``INHIBITED_BY``), and replicas that
restarted or were away, where that is all there is to a drop (H18). A muted alert fires, is shown, and ends as any
other. What is muted when it begins is told if it still fires when its silence ends; what was explained, once it is
found broken with nothing to explain it: that it has not ended yet, that its cause ended and still counts within the
rule's window, or that nobody can tell now, is no news of its own.

Whom to tell of what: once per transition, together with what belongs together, again if nobody takes it.

Theory of operation. Nothing here waits or remembers: each run looks at the alerts as they are and tells what is due.
An alert that fires is due once it fired ``ALERT_GROUP_WAIT_S`` ago and nothing mutes it; all others of its pool that
were not told yet go into the same message. It is due again every ``repeat_s`` of its rule until it ends, unless it is
muted or somebody acknowledged it. Whoever was told of a beginning is told of the end, muted or not. What is told is
claimed by a conditional update of the alert in the transaction that writes the messages: of several evaluators one
tells, and one that dies in between tells nothing or everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet

from controlplane.isolation import Items, isolated_items
from controlplane.models import PeriodicTask
from telemetry.alerts.kinds.base import MUTED
from telemetry.alerts.message import payload_of
from telemetry.alerts.pipeline import note
from telemetry.alerts.verdict import OVER, Result, Verdict
from telemetry.channels.enqueue import enqueue
from telemetry.matchers import Matcher, match_all, stored
from telemetry.models import Alert, AlertState, AlertTransition, NotificationKind, RuleKind, Silence

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
    if verdict is None or verdict.result is not Result.BREACH:
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


Claim = Callable[[Alert], bool]


def notify_due(now: datetime, verdicts: Mapping[int, Verdict] | None = None) -> int:
    """Tell everything that is due; how many alerts were told of. ``verdicts`` are this evaluation's, by alert.

    Three queries where nothing is.
    """
    firing = list(_alerts().filter(state=AlertState.FIRING).order_by("pk"))
    with isolated_items(PeriodicTask.NOTIFICATIONS, is_complete=True) as item:
        settle_mutes(firing, now, verdicts or {}, item)
        return _tell_all(firing, now, item)


def _tell_all(firing: list[Alert], now: datetime, item: Items) -> int:
    audible = [alert for alert in firing if alert.muted is None]
    fresh = [alert for alert in audible if alert.notified_at is None]
    ripe = {alert.pool_id for alert in fresh if _waited(alert, now)}
    again = [alert for alert in audible if _is_due_again(alert, now)]
    return (
        _tell([it for it in fresh if it.pool_id in ripe], NotificationKind.FIRING, _claim_telling(now), now, item)
        + _tell(again, NotificationKind.REPEATED, _claim_telling(now), now, item)
        + notify_resolved(_alerts(), now, item)
    )


def notify_resolved(among: QuerySet[Alert], now: datetime, item: Items | None = None) -> int:
    """Tell the end of those of some alerts that are over and were told; how many. One query where there is none.

    Without ``item`` errors pass through.
    """
    over = among.filter(state=AlertState.RESOLVED, resolved_notified_at=None, notification_count__gt=0).order_by("pk")
    return _tell(over, NotificationKind.RESOLVED, _claim_end(now), now, item)


def settle_mutes(firing: list[Alert], now: datetime, verdicts: Mapping[int, Verdict], item: Items) -> None:
    """Write down what mutes each alert now, and each change of that as a step of its life."""
    silences = active_silences(now) if firing else []
    for alert in firing:
        with item(f"{alert.pool.name}: alert {alert.pk}"):
            mute = mute_of(alert, silences=silences, firing=firing, verdict=verdicts.get(alert.pk), now=now)
            found = mute.as_json() if mute else None
            if found != alert.muted:
                _settle(alert, found, now)


@transaction.atomic
def _settle(alert: Alert, found: dict[str, object] | None, now: datetime) -> None:
    was = alert.muted
    as_it_was = Q(muted__isnull=True) if was is None else Q(muted=was)
    if not Alert.objects.filter(as_it_was, pk=alert.pk, state=AlertState.FIRING).update(muted=found):
        return
    alert.muted = found
    if found is None:
        note(alert, AlertTransition.UNSUPPRESSED, now)
    elif was is None or was["why"] != found["why"] or was["by"] != found["by"]:
        note(alert, AlertTransition.SUPPRESSED, now, text=str(found["words"]))


def _alerts() -> QuerySet[Alert]:
    return Alert.objects.select_related("rule", "rule__group", "pool")


def _waited(alert: Alert, now: datetime) -> bool:
    """Whether others that belong to it had time to fire as well."""
    return alert.fired_at is not None and now >= alert.fired_at + timedelta(seconds=settings.ALERT_GROUP_WAIT_S)


def _is_due_again(alert: Alert, now: datetime) -> bool:
    repeat_s = alert.rule.repeat_s
    if alert.notified_at is None or alert.acknowledged_at is not None or not repeat_s:
        return False
    return now >= alert.notified_at + timedelta(seconds=repeat_s)


def _tell(alerts: Iterable[Alert], kind: NotificationKind, claim: Claim, now: datetime, item: Items | None) -> int:
    """A message for each pool, of the alerts that we claim; how many. Without ``item`` errors pass through."""
    of_pool: dict[int, list[Alert]] = defaultdict(list)
    for alert in alerts:
        of_pool[alert.pool_id].append(alert)
    told = 0
    for together in of_pool.values():
        with item(f"{together[0].pool.name}: {kind}") if item else nullcontext():
            told += _tell_together(together, kind, claim, now)
    return told


@transaction.atomic
def _tell_together(alerts: list[Alert], kind: NotificationKind, claim: Claim, now: datetime) -> int:
    told = [alert for alert in alerts if claim(alert)]
    if not told:
        return 0
    move = _MOVES[kind]
    for alert in told:
        note(alert, move, now, text=f"together with others of its pool: {len(told) - 1}" if len(told) > 1 else "")
    counts = {alert.pk: alert.notification_count for alert in told} if kind is NotificationKind.REPEATED else {}
    enqueue({alert.pk: payload_of(alert, kind, now) for alert in told}, kind, now, sequences=counts)
    return len(told)


_MOVES = {
    NotificationKind.FIRING: AlertTransition.NOTIFIED,
    NotificationKind.REPEATED: AlertTransition.REPEATED,
    NotificationKind.RESOLVED: AlertTransition.RESOLVED_NOTIFIED,
}


def _claim_telling(now: datetime) -> Claim:
    def claim(alert: Alert) -> bool:
        untold = Alert.objects.filter(pk=alert.pk, state=AlertState.FIRING, notification_count=alert.notification_count)
        if not untold.update(notification_count=alert.notification_count + 1, notified_at=now):
            return False
        alert.notification_count, alert.notified_at = alert.notification_count + 1, now
        return True

    return claim


def _claim_end(now: datetime) -> Claim:
    def claim(alert: Alert) -> bool:
        return bool(Alert.objects.filter(pk=alert.pk, resolved_notified_at=None).update(resolved_notified_at=now))

    return claim
