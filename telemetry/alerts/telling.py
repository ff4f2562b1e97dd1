"""Whom to tell of what: once per transition, together with what belongs together, again if nobody takes it.

Theory of operation. Nothing here waits or remembers: each run looks at the alerts as they are and tells what is due.
An alert that fires is due once it fired ``ALERT_GROUP_WAIT_S`` ago and nothing mutes it; all others of its pool that
were not told yet go into the same message. It is due again every ``repeat_s`` of its rule until it ends, unless it is
muted or somebody acknowledged it. Whoever was told of a beginning is told of the end, muted or not. What is told is
claimed by a conditional update of the alert in the transaction that writes the messages: of several evaluators one
tells, and one that dies in between tells nothing or everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet

from controlplane.isolation import Items, isolated_items
from controlplane.models import PeriodicTask
from telemetry.alerts.message import payload_of
from telemetry.alerts.muting import active_silences, mute_of
from telemetry.alerts.pipeline import note
from telemetry.alerts.verdict import Verdict
from telemetry.channels.enqueue import enqueue
from telemetry.models import Alert, AlertMove, AlertState, NotificationKind

Claim = Callable[[Alert], bool]


def tell_due(now: datetime, verdicts: Mapping[int, Verdict] | None = None) -> int:
    """Tell everything that is due; how many alerts were told of. ``verdicts`` are this evaluation's, by alert.

    Three queries where nothing is.
    """
    firing = list(_alerts().filter(state=AlertState.FIRING).order_by("pk"))
    with isolated_items(PeriodicTask.NOTIFICATIONS, is_complete=True) as item:
        settle_mutes(firing, now, verdicts or {}, item)
        return _tell_all(firing, now, item)


def _tell_all(firing: list[Alert], now: datetime, item: Items) -> int:
    audible = [alert for alert in firing if alert.muted is None]
    fresh = [alert for alert in audible if alert.told_at is None]
    ripe = {alert.pool_id for alert in fresh if _waited(alert, now)}
    again = [alert for alert in audible if _is_due_again(alert, now)]
    return (
        _tell([it for it in fresh if it.pool_id in ripe], NotificationKind.FIRING, _claim_telling(now), now, item)
        + _tell(again, NotificationKind.REPEATED, _claim_telling(now), now, item)
        + tell_ends(_alerts(), now, item)
    )


def tell_ends(among: QuerySet[Alert], now: datetime, item: Items | None = None) -> int:
    """Tell the end of those of some alerts that are over and were told; how many. One query where there is none.

    Without ``item`` errors pass through.
    """
    over = among.filter(state=AlertState.RESOLVED, end_told_at=None, tellings__gt=0).order_by("pk")
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
        note(alert, AlertMove.UNMUTED, now)
    elif was is None or was["why"] != found["why"] or was["by"] != found["by"]:
        note(alert, AlertMove.MUTED, now, text=str(found["words"]))


def _alerts() -> QuerySet[Alert]:
    return Alert.objects.select_related("rule", "rule__group", "pool")


def _waited(alert: Alert, now: datetime) -> bool:
    """Whether others that belong to it had time to fire as well."""
    return alert.fired_at is not None and now >= alert.fired_at + timedelta(seconds=settings.ALERT_GROUP_WAIT_S)


def _is_due_again(alert: Alert, now: datetime) -> bool:
    repeat_s = alert.rule.repeat_s
    if alert.told_at is None or alert.acknowledged_at is not None or not repeat_s:
        return False
    return now >= alert.told_at + timedelta(seconds=repeat_s)


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
    counts = {alert.pk: alert.tellings for alert in told} if kind is NotificationKind.REPEATED else {}
    enqueue({alert.pk: payload_of(alert, kind, now) for alert in told}, kind, now, sequences=counts)
    return len(told)


_MOVES = {
    NotificationKind.FIRING: AlertMove.TOLD,
    NotificationKind.REPEATED: AlertMove.REPEATED,
    NotificationKind.RESOLVED: AlertMove.END_TOLD,
}


def _claim_telling(now: datetime) -> Claim:
    def claim(alert: Alert) -> bool:
        untold = Alert.objects.filter(pk=alert.pk, state=AlertState.FIRING, tellings=alert.tellings)
        if not untold.update(tellings=alert.tellings + 1, told_at=now):
            return False
        alert.tellings, alert.told_at = alert.tellings + 1, now
        return True

    return claim


def _claim_end(now: datetime) -> Claim:
    def claim(alert: Alert) -> bool:
        return bool(Alert.objects.filter(pk=alert.pk, end_told_at=None).update(end_told_at=now))

    return claim
