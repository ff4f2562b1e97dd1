"""Decides which notifications to send: one per state change, grouped by pool, repeated until acknowledged.

Theory of operation. No state is kept between runs: each run looks at the alerts as they are and sends what is due. A
firing alert is due once it fired ``ALERT_GROUP_WAIT_S`` ago and is not suppressed; all other alerts of its pool
without a notification go into the same message. It is due again every ``repeat_s`` of its rule until it resolves,
unless it is suppressed or acknowledged, and earlier if its most likely cause is one that no message named. Every
channel that was notified of an alert is notified of its resolution, suppressed or not. A channel that is added or
enabled gets what was notified before and still fires. A notification is claimed by a
conditional update of the alert in the transaction that writes the messages: of several evaluators one sends it, and an
evaluator that dies in between sends nothing or everything.

Three things suppress notifications, in this order: a silence, another alert that explains this one
(``Kind.inhibited_by``), and replicas that restarted or were down, if these alone explain a drop. A suppressed alert
fires, is shown and resolves as any other. A silenced alert that still fires when its silence ends is then notified. An
inhibited alert is notified once it breaches again with nothing to explain it. It stays inhibited while it only has not
resolved yet, while its cause ended but still counts within the rule's window, and while there is no data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet

from controlplane.isolation import Items, isolated_items
from controlplane.models import PeriodicTask
from telemetry.alerts.detection.detector import ALARM_SHARE
from telemetry.alerts.findings import Finding, Result
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.kinds.hit_rate_drop import DropEvidence
from telemetry.alerts.message import alert_payload
from telemetry.alerts.pipeline import record_transition
from telemetry.causes.evidence import OUTAGES, cause_key
from telemetry.channels.enqueue import channels_to_catch_up, enqueue, enqueue_missed
from telemetry.channels.message_text import MAX_CAUSES
from telemetry.matchers import Matcher, match_all, parse_stored
from telemetry.models import (
    Alert,
    AlertState,
    AlertTransition,
    NotificationKind,
    RuleKind,
    Severity,
    Silence,
    SuppressionReason,
)

MIN_NEW_CAUSE = 0.5  # confidence of a cause that is notified although it was found after the last message
CAUSES_WAIT = timedelta(minutes=1)  # the longest that a new drop waits for the look for its causes
NEW_CAUSE_FOR = timedelta(minutes=15)  # after an alert fired; later a new cause waits for the next message
MAX_EXPLAINED = timedelta(minutes=10)  # after a replica went down, this may explain alerts of its pool
_TRANSITIONS = {
    NotificationKind.FIRING: AlertTransition.NOTIFIED,
    NotificationKind.REPEATED: AlertTransition.REPEATED,
    NotificationKind.RESOLVED: AlertTransition.RESOLUTION_NOTIFIED,
}
Claim = Callable[[Alert], bool]


@dataclass(frozen=True, slots=True)
class Suppression:
    """Why an alert is not notified, as its row stores it."""

    reason: str  # a SuppressionReason
    text: str
    by: int | None = None  # the silence's or the alert's id
    until: str | None = None  # ISO; None: unknown


@dataclass(frozen=True, slots=True)
class Context:
    """What decides whether alerts are notified."""

    now: datetime
    firing: Sequence[Alert]
    silences: Sequence[tuple[Silence, Sequence[Matcher]]] = ()
    findings: Mapping[int, Finding[Any]] = field(default_factory=dict)  # of this evaluation, by alert


def silence_applies(silence: Silence, matchers: Sequence[Matcher], alert: Alert) -> bool:
    """Whether a silence matches an alert of its project, or of any project if it has none."""
    in_project = silence.project_id is None or silence.project_id == alert.pool.project_id
    return in_project and match_all(matchers, alert.labels)


def suppression_by_silence(alert: Alert, context: Context) -> Suppression | None:
    for silence, matchers in context.silences:
        if silence_applies(silence, matchers, alert):
            return Suppression(SuppressionReason.SILENCE, silence.comment, silence.pk, silence.ends_at.isoformat())
    return None


def suppression_by_other_alert(alert: Alert, context: Context) -> Suppression | None:
    source = next((other for other in context.firing if inhibits(other, alert, context.now)), None)
    return None if source is None else Suppression(SuppressionReason.INHIBITED, source.summary, source.pk)


def suppression_before(alert: Alert, context: Context) -> Suppression | None:
    """The suppression before, unless it was a silence: it stays until the alert breaches without its cause."""
    stored, finding = alert.suppression, context.findings.get(alert.pk)
    if not stored or stored["reason"] == SuppressionReason.SILENCE:
        return None
    has_new_breach = finding is not None and finding.result is Result.BREACH and not finding.has_ended
    return None if has_new_breach else Suppression(**stored)


def suppression_by_restart(alert: Alert, context: Context) -> Suppression | None:
    """A restart or an outage of replicas is the most likely cause, and without its cost there is no breach."""
    finding, first = context.findings.get(alert.pk), next(iter(alert.causes), None)
    if finding is None or finding.restarts is None or first is None or first["kind"] not in OUTAGES:
        return None
    regained = first["evidence"].get("regained_ratio")
    if regained is None or finding.value is None or finding.limit is None:
        return None
    least = finding.limit
    if finding.baseline is not None:
        least = finding.baseline - ALARM_SHARE * (finding.baseline - finding.limit)
    if finding.value + regained < least:
        return None
    replicas = first["evidence"].get("replicas") or finding.restarts.replicas
    text = f"{', '.join(replicas)} restarted or was down, which alone explains the drop."
    return Suppression(SuppressionReason.RESTART, text, until=finding.restarts.warm_at.isoformat())


# Each says why an alert is not notified, or None. The first one decides.
STAGES: tuple[Callable[[Alert, Context], Suppression | None], ...] = (
    suppression_by_silence,
    suppression_by_other_alert,
    suppression_before,
    suppression_by_restart,
)


def inhibits(source: Alert, alert: Alert, now: datetime) -> bool:
    """Whether one alert explains another; of two alerts about replicas, only for the same replica."""
    kind = KINDS.get(alert.rule.kind)
    if kind is None:  # of a later release
        return False
    if kind.is_fleet_wide and source.rule.kind == alert.rule.kind:
        in_project = source.pool.project_id == alert.pool.project_id
        return in_project and _precedence(source) < _precedence(alert) and source.suppression is None
    if source.pool_id == alert.pool_id and _drop_includes(source, alert):
        return True
    if source.pool_id != alert.pool_id or source.rule.kind not in kind.inhibited_by:
        return False
    if source.subject and not alert.subject:
        # A replica's alert explains one of its pool only if the pool's began later, and only for a while. A
        # replica's last successful scrape is at most two limits before the start of its alert.
        down_at = source.started_at - timedelta(seconds=2 * (source.limit or 0.0))
        return alert.started_at >= down_at and now < source.started_at + MAX_EXPLAINED
    return not (source.subject and alert.subject) or source.subject == alert.subject


def _precedence(alert: Alert) -> tuple[bool, int]:
    """Of alerts of the same kind with one cause: the critical ones first, then the earliest."""
    return alert.severity != Severity.CRITICAL, alert.pk


def _drop_includes(source: Alert, alert: Alert) -> bool:
    """Whether a drop of the pool that is notified is partly that of a task group."""
    kinds = {source.rule.kind, alert.rule.kind}
    if kinds != {RuleKind.HIT_RATE_DROP} or source.suppression or source.rule.group or not alert.rule.group:
        return False
    return alert.rule.group.name in {group.name for group in DropEvidence.read(source.detail).groups}


def notify_due(now: datetime, findings: Mapping[int, Finding[Any]] | None = None) -> int:
    """Send all notifications that are due; the number of alerts notified. ``findings`` are this evaluation's, by alert.

    Four queries if nothing is due.
    """
    firing = list(_alerts().filter(state=AlertState.FIRING).order_by("pk"))
    with isolated_items(PeriodicTask.NOTIFICATIONS, is_complete=True) as item:
        update_suppressions(firing, now, findings or {}, item)
        not_suppressed = [alert for alert in firing if alert.suppression is None]
        new = [alert for alert in not_suppressed if alert.notified_at is None and not _waits_for_causes(alert, now)]
        due_pools = {alert.pool_id for alert in new if _has_waited(alert, now)}
        due = [alert for alert in new if alert.pool_id in due_pools]
        repeated = [alert for alert in not_suppressed if _is_repeat_due(alert, now) or _has_new_cause(alert, now)]
        if channels_to_catch_up().exists():
            with item("channels that were added"):
                _notify_added_channels([alert for alert in not_suppressed if alert.notification_count], now)
        return (
            _notify(due, NotificationKind.FIRING, _claim_notification(now), now, item)
            + _notify(repeated, NotificationKind.REPEATED, _claim_notification(now), now, item)
            + notify_resolved(_alerts(), now, item)
        )


def notify_resolved(among: QuerySet[Alert], now: datetime, item: Items | None = None) -> int:
    """Notify the resolution of alerts that were notified; the number of them. One query if there is none.

    Without ``item`` errors are raised.
    """
    resolved = among.filter(state=AlertState.RESOLVED, resolution_notified_at=None, notification_count__gt=0)

    def claim(alert: Alert) -> bool:
        return bool(Alert.objects.filter(pk=alert.pk, resolution_notified_at=None).update(resolution_notified_at=now))

    return _notify(resolved.order_by("pk"), NotificationKind.RESOLVED, claim, now, item)


def update_suppressions(firing: list[Alert], now: datetime, findings: Mapping[int, Finding[Any]], item: Items) -> None:
    """Store the current suppression of each alert, and each change of it in the alert's timeline."""
    rows = Silence.objects.filter(starts_at__lte=now, ends_at__gt=now) if firing else ()
    silences = [(silence, parse_stored(silence.matchers)) for silence in rows]
    context = Context(now, firing, silences, findings)
    for alert in firing:
        with item(f"{alert.pool.name}: alert {alert.pk}"):
            current = next((found for stage in STAGES if (found := stage(alert, context))), None)
            document = asdict(current) if current else None
            if _without_text(document) != _without_text(alert.suppression):
                _store_suppression(alert, document, now)


def _without_text(document: Mapping[str, object] | None) -> dict[str, object] | None:
    """A suppression without its text, which may be a summary whose figures change."""
    return None if document is None else {**document, "text": ""}


@transaction.atomic
def _store_suppression(alert: Alert, document: dict[str, object] | None, now: datetime) -> None:
    before = alert.suppression
    unchanged = Q(suppression__isnull=True) if before is None else Q(suppression=before)
    if not Alert.objects.filter(unchanged, pk=alert.pk, state=AlertState.FIRING).update(suppression=document):
        return
    alert.suppression = document
    if document is None:
        record_transition(alert, AlertTransition.UNSUPPRESSED, now)
    elif before is None or before["reason"] != document["reason"] or before["by"] != document["by"]:
        record_transition(alert, AlertTransition.SUPPRESSED, now, text=str(document["text"]))


def _alerts() -> QuerySet[Alert]:
    return Alert.objects.select_related("rule", "rule__group", "pool")


def _has_waited(alert: Alert, now: datetime) -> bool:
    """Whether the group wait of an alert is over, so that related alerts join its message."""
    return alert.fired_at is not None and now >= alert.fired_at + timedelta(seconds=settings.ALERT_GROUP_WAIT_S)


def _waits_for_causes(alert: Alert, now: datetime) -> bool:
    """Whether the causes of a drop, which may suppress it, were not looked for yet, and will be soon."""
    kind = KINDS.get(alert.rule.kind)
    is_new = alert.fired_at is not None and now < alert.fired_at + CAUSES_WAIT
    return kind is not None and kind.is_drop and alert.explained_at is None and is_new


def _is_repeat_due(alert: Alert, now: datetime) -> bool:
    repeat_s = alert.rule.repeat_s
    if alert.notified_at is None or alert.acknowledged_at is not None or not repeat_s:
        return False
    return now >= alert.notified_at + timedelta(seconds=repeat_s)


def _has_new_cause(alert: Alert, now: datetime) -> bool:
    """Whether the most likely cause is one that the messages so far did not name."""
    if alert.acknowledged_at is not None or alert.notified_causes is None or not alert.causes:
        return False
    if alert.fired_at is None or now > alert.fired_at + NEW_CAUSE_FOR:
        return False
    first = alert.causes[0]
    notified = {cause["key"] for cause in alert.notified_causes}
    return first["confidence"] >= MIN_NEW_CAUSE and cause_key(first) not in notified


def _store_notified_causes(alert: Alert) -> None:
    """Note the causes of a message, the newest first, after those of the messages before."""
    causes = [{"key": cause_key(cause), "summary": cause["summary"]} for cause in alert.causes[:MAX_CAUSES]]
    keys = {cause["key"] for cause in causes}
    alert.notified_causes = [*causes, *(cause for cause in alert.notified_causes or () if cause["key"] not in keys)]
    Alert.objects.filter(pk=alert.pk).update(notified_causes=alert.notified_causes)


def _notify(alerts: Iterable[Alert], kind: NotificationKind, claim: Claim, now: datetime, item: Items | None) -> int:
    """Write a message for each pool with the alerts that this run claims; the number of these alerts."""
    by_pool: dict[int, list[Alert]] = defaultdict(list)
    for alert in alerts:
        by_pool[alert.pool_id].append(alert)
    count = 0
    for group in by_pool.values():
        with item(f"{group[0].pool.name}: {kind}") if item else nullcontext():
            count += _notify_group(group, kind, claim, now)
    return count


@transaction.atomic
def _notify_group(alerts: list[Alert], kind: NotificationKind, claim: Claim, now: datetime) -> int:
    claimed = [alert for alert in alerts if claim(alert)]
    if not claimed:
        return 0
    payloads = {alert.pk: alert_payload(alert, kind, now, _replaced_cause(alert, kind, now)) for alert in claimed}
    counts = {alert.pk: alert.notification_count for alert in claimed} if kind is NotificationKind.REPEATED else {}
    sent = enqueue(payloads, kind, now, sequences=counts)
    for alert in claimed:
        if alert.pk in sent:  # else no channel is set up, or none matches
            record_transition(alert, _TRANSITIONS[kind], now, text=_note(alert, kind, len(sent) - 1, now))
    if kind is not NotificationKind.RESOLVED:
        for alert in claimed:
            _store_notified_causes(alert)
    return len(claimed)


@transaction.atomic
def _notify_added_channels(notified: list[Alert], now: datetime) -> None:
    """Send channels that were added or enabled the alerts that other channels were notified of before."""
    payloads = {alert.pk: alert_payload(alert, NotificationKind.FIRING, now) for alert in notified}
    # Another sequence than that of a first message to the same channel, which may have failed.
    sent = enqueue_missed(payloads, now, sequences={alert.pk: alert.notification_count for alert in notified})
    for alert in notified:
        if alert.pk in sent:
            record_transition(alert, AlertTransition.NOTIFIED, now, text="to a channel that was added or changed")


def _note(alert: Alert, kind: NotificationKind, other_count: int, now: datetime) -> str:
    """The note of a message in the timeline of one of its alerts."""
    if kind is NotificationKind.REPEATED and _has_new_cause(alert, now):
        return f"the likely cause is now: {alert.causes[0]['summary']}"
    plural = "s" if other_count > 1 else ""
    return f"together with {other_count} other alert{plural} of its pool" if other_count else ""


def _replaced_cause(alert: Alert, kind: NotificationKind, now: datetime) -> str | None:
    """The most likely cause of the message before, if this one has a new one instead."""
    if kind is not NotificationKind.REPEATED or not alert.notified_causes or not _has_new_cause(alert, now):
        return None
    summary: str = alert.notified_causes[0]["summary"]
    return summary


def _claim_notification(now: datetime) -> Claim:
    def claim(alert: Alert) -> bool:
        count = alert.notification_count
        unclaimed = Alert.objects.filter(pk=alert.pk, state=AlertState.FIRING, notification_count=count)
        if not unclaimed.update(notification_count=count + 1, notified_at=now):
            return False
        alert.notification_count, alert.notified_at = count + 1, now
        return True

    return claim
