"""Records that the traffic moved between task groups: it changes a pool's hit rate, and is no drop.

Up to when what was counted is known of everybody: where a rule's newest window ends.

Theory of operation. A reading at ``t`` tells of the time before ``t``. It is stored a while after, at once for most
replicas and seconds later for those that answer slowly, and shards have their turns one after another. A window that
ended at any moment would have the newest interval of some replicas and not of others: with windows of few intervals
the hit rate of the pool would be that of whoever was read first. Windows therefore end just before the first reading
that is due and not there. A replica that fails has a reading too, which says so; who has had none for longer than two
intervals is not waited for, so a window ends an interval before now at the earliest.

From rules to alerts: load, judge, step, write down.

Theory of operation. Rules that look at steps of the same length are loaded together, whichever pools they are of, so an
evaluation costs a few queries for each length and not for each rule. Every change of an alert is a conditional update
of its row, so of two evaluators that see the same thing one makes the change and the other finds nothing to do; the
database itself allows one open alert per rule, pool and subject. The event and the step of its life are written in the
transaction of the change: they exist exactly if it does. Whom to tell is decided afterwards (notifications.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Min

from controlplane.isolation import Items, isolated_items
from controlplane.models import Event, EventKind, PeriodicTask, Pool
from controlplane.services.events import record_event
from telemetry.alerts.expected_drops import Watched, unless_its_own
from telemetry.alerts.history import Wanted, load_pasts
from telemetry.alerts.history_window import Past, Source, control_now, steps_in
from telemetry.alerts.kinds import KINDS, Asked, Kind, RuleSettings
from telemetry.alerts.message import alert_labels, describe, scope_of
from telemetry.alerts.verdict import OpenAlert, Reason, Step, Verdict, Verdicts, next_step, no_data, worst
from telemetry.models import Alert, AlertRule, AlertState, AlertStep, AlertTransition, ScrapeState
from telemetry.models.alert import OPEN_STATES

ONCE_IN = timedelta(minutes=30)  # of a pool, whatever the number of its rules


def record_mix_change(rule: AlertRule, before: Mapping[str, Any], figures: Mapping[str, Any], now: datetime) -> bool:
    """Record an event where a rule's figures tell of a new mix and those of the evaluation before did not.

    Returns whether one was recorded. One query where there is a new mix, and what is written.
    """
    is_new = figures.get("mix_since") and not before.get("mix_since")
    if not is_new or rule.group_id is not None:
        return False
    lately = Event.objects.filter(kind=EventKind.TRAFFIC_MIX_CHANGED, pool=rule.pool, at__gt=now - ONCE_IN)
    if lately.exists():
        return False
    points, groups = figures["mix_points"], figures["mix_groups"]
    detail = {"mix_points": points, "since": figures["mix_since"], "groups": groups}
    record_event(EventKind.TRAFFIC_MIX_CHANGED, _mix_sentence(points, groups), pool=rule.pool, detail=detail, at=now)
    return True


def _mix_sentence(points: float, groups: list[dict[str, Any]]) -> str:
    moved = ", ".join(
        f"{one['name'] or 'no task group'} {one['usual_ratio'] * 100:.0f} to {one['share_ratio'] * 100:.0f} %"
        for one in groups
    )
    return f"The mix of task groups changed ({moved} of the tokens); this moves the hit rate by {points:+.0f} points."


JUST_BEFORE = timedelta(microseconds=1)  # what is due at a moment is no part of a window that ends before it


def settled_until(now: datetime) -> datetime:
    """The newest moment up to which all who report have reported: now, or up to an interval before. One query."""
    interval = timedelta(seconds=settings.SCRAPE_INTERVAL_S)
    report = ScrapeState.objects.filter(at__gt=now - 2 * interval, at__lte=now)
    behind: datetime | None = report.aggregate(at=Min("at"))["at"]
    return now if behind is None else min(now, behind + interval - JUST_BEFORE)


MOST_SUBJECTS = 100  # open alerts of one rule; a fleet that is down as a whole is told of by other means
Open = Mapping[str, Alert]  # by subject


@dataclass(frozen=True, slots=True)
class Ready:
    """A rule with what its evaluation needs."""

    rule: AlertRule
    kind: Kind
    settings: RuleSettings
    open: Open
    until: datetime  # where its newest window ends

    @property
    def group(self) -> str:
        """The task group that it is narrowed to."""
        return self.rule.group.name if self.rule.group else ""

    @property
    def reach_s(self) -> float:
        """How far back it looks now."""
        return self.settings.open_reach_s if self.open else self.settings.reach_s


def evaluate_rules(now: datetime) -> dict[int, Verdict]:
    """Evaluate every enabled rule once; the verdict on each alert that is open afterwards, by its id.

    Five queries, and for each length of steps one more and those of its sources; and what is written.
    """
    return evaluate(AlertRule.objects.filter(enabled=True).select_related("pool", "group"), now)


def evaluate(rules: Iterable[AlertRule], now: datetime, *, note_time: bool = True) -> dict[int, Verdict]:
    """Evaluate some rules. Without ``note_time`` they stay as late as they were."""
    found: dict[int, Verdict] = {}
    every, judged = list(rules), set[int]()
    with isolated_items(PeriodicTask.ALERT_RULES, is_complete=note_time) as item:
        for ready, past in _loaded(_ready(every, settled_until(now), item), now, item):
            with item(_name(ready.rule)):
                found |= _evaluate(ready, past, now)
                judged.add(ready.rule.pk)
    if note_time:
        _note_evaluated(every, judged, now)
    return found


def _note_evaluated(rules: Sequence[AlertRule], judged: Collection[int], now: datetime) -> None:
    """Store when rules were evaluated and with what result; a rule whose evaluation failed has none."""
    for rule in rules:
        rule.evaluated_at = now
        if rule.pk not in judged:
            rule.verdict = no_data(Reason.FAILED).as_json()
    AlertRule.objects.bulk_update(rules, ["evaluated_at", "verdict"], batch_size=500)


def _evaluate(ready: Ready, past: Past, now: datetime) -> dict[int, Verdict]:
    """Evaluate one rule and take its steps; the verdict on each alert that is open afterwards."""
    opened = {subject: alert.started_at for subject, alert in ready.open.items()}
    seen, asked = past.at(past.count - 1), Asked(ready.group, opened)
    verdicts = ready.kind.judge(ready.settings, seen, asked)
    if ready.kind.is_drop:
        watched = Watched(ready.rule.pool, ready.kind, ready.settings, asked, seen)
        verdicts = {name: unless_its_own(watched, verdict) for name, verdict in verdicts.items()}
    found = _advance_all(ready, verdicts, now)
    _end_gone(ready, verdicts, now)
    overall = worst(verdicts) if verdicts else no_data(Reason.NOBODY)
    record_mix_change(ready.rule, (ready.rule.verdict or {}).get("figures", {}), overall.figures, now)
    ready.rule.verdict = overall.as_json()
    return found


def _name(rule: AlertRule) -> str:
    """A rule in the log and among failing items."""
    return f"{rule.pool.name}: {rule.name}"


def _ready(rules: Sequence[AlertRule], until: datetime, item: Items) -> list[Ready]:
    """The rules whose settings can be read, with their open alerts."""
    of_rule: dict[int, dict[str, Alert]] = defaultdict(dict)
    for alert in Alert.objects.filter(rule__in=rules, state__in=OPEN_STATES).select_related("pool"):
        of_rule[alert.rule_id][alert.subject] = alert
    ready = []
    for rule in rules:
        with item(_name(rule)):  # settings that were not written by the services, or a kind of a newer release
            kind = KINDS[rule.kind]
            ready.append(Ready(rule, kind, kind.read(rule.settings), of_rule[rule.pk], until))
    return ready


def _loaded(ready: Sequence[Ready], now: datetime, item: Items) -> Iterable[tuple[Ready, Past]]:
    """Each rule with its pool's past; what looks at steps of the same length is loaded together."""
    before = max((one.rule.evaluated_at for one in ready if one.rule.evaluated_at), default=None)
    wants_control = any(Source.CONTROL in one.kind.needs(one.group) for one in ready)
    control = control_now(now, before) if wants_control else None
    batches: dict[float, list[Ready]] = defaultdict(list)
    for one in ready:
        batches[one.settings.step_s].append(one)
    for step_s, batch in batches.items():
        pools = {one.rule.pool_id: one.rule.pool for one in batch}
        wanted = Wanted(
            sources=frozenset().union(*(one.kind.needs(one.group) for one in batch)),
            step_s=step_s,
            count=max(steps_in(one.reach_s, step_s) for one in batch),
            until=batch[0].until,
            days_back=max(one.settings.days_back for one in batch),
            series_reach_s=max(one.settings.series_reach_s for one in batch),
            keeps_series=True,
            restart_reach_s=max(one.settings.warm_up_reach_s for one in batch),
            control=control,
        )
        pasts = _load(list(pools.values()), wanted, item)
        for one in batch:
            if one.rule.pool_id in pasts:
                yield one, pasts[one.rule.pool_id]


def _load(pools: Sequence[Pool], wanted: Wanted, item: Items) -> Mapping[int, Past]:
    """The pools' pasts together; where that fails, pool by pool, so that one pool's data stop no other's rules."""
    names = {pool.pk: f"readings of {pool.name}" for pool in pools}
    with item.all_of(list(names.values())):
        return load_pasts(pools, wanted)
    found: dict[int, Past] = {}
    for pool in pools:
        with item(names[pool.pk]):
            found |= load_pasts([pool], wanted)
    return found


def _advance_all(ready: Ready, verdicts: Verdicts, now: datetime) -> dict[int, Verdict]:
    """Take every subject's step; the verdict on each alert that is open afterwards. No more are opened than may be."""
    found: dict[int, Verdict] = {}
    room = MOST_SUBJECTS - len(ready.open)
    for subject, verdict in verdicts.items():
        is_new = subject not in ready.open
        if is_new and room <= 0:
            continue
        alert = _advance(ready, subject, verdict, now)
        if alert is not None:
            found[alert.pk] = verdict
            room -= is_new
    return found


def _advance(ready: Ready, subject: str, verdict: Verdict, now: datetime) -> Alert | None:
    """Take the step that a verdict leads to; the alert that is open afterwards."""
    alert = ready.open.get(subject)
    known = alert and OpenAlert(alert.state == AlertState.FIRING, alert.started_at, alert.last_breach_at)
    step = next_step(ready.settings.timing, verdict.result, known or None, now)
    if step is Step.NOTHING:
        return alert
    return take(step, ready, subject, verdict, alert=alert, now=now)


@transaction.atomic
def take(
    step: Step, ready: Ready, subject: str, verdict: Verdict, *, alert: Alert | None, now: datetime
) -> Alert | None:
    """Write a step down; the alert that is open afterwards."""
    if step in {Step.OPEN, Step.OPEN_FIRING}:
        alert = open_alert(ready, subject, verdict, now)
    if alert is None:
        return None
    if step in {Step.FIRE, Step.OPEN_FIRING}:
        fire(alert, ready, verdict, now)
    elif step is Step.EXTEND:
        Alert.objects.filter(pk=alert.pk, state__in=OPEN_STATES).update(last_breach_at=now, **_figures(verdict))
    elif step is Step.DROP:
        Alert.objects.filter(pk=alert.pk, state=AlertState.PENDING).delete()
        return None
    elif step is Step.RESOLVE:
        resolve(alert, now)
        return None
    return alert


def open_alert(ready: Ready, subject: str, verdict: Verdict, now: datetime) -> Alert | None:
    """A pending alert; None where somebody else opened one first, or the rule was disabled since it was loaded.

    In a transaction: whoever disables the rule comes before this, or waits and ends the alert.
    """
    rule = ready.rule
    if not AlertRule.objects.select_for_update(no_key=True).filter(pk=rule.pk, enabled=True).exists():
        return None
    try:
        with transaction.atomic():
            alert = Alert.objects.create(
                rule=rule,
                pool=rule.pool,
                subject=subject,
                severity=rule.severity,
                labels=alert_labels(rule, subject),
                started_at=now,
                last_breach_at=now,
                summary=_sentence(ready, subject, verdict),
                **_figures(verdict),
            )
    except IntegrityError:
        return None
    note(alert, AlertTransition.PENDING, now)
    return alert


def fire(alert: Alert, ready: Ready, verdict: Verdict, now: datetime) -> None:
    """Have a pending alert fire, unless somebody else did."""
    detail = describe(ready.rule, ready.kind, ready.settings, verdict, ready.until)
    changes = {
        "state": AlertState.FIRING,
        "fired_at": now,
        "last_breach_at": now,
        "summary": _sentence(ready, alert.subject, verdict),
        "detail": detail,
        **_figures(verdict),
    }
    if _change(alert, AlertState.PENDING, changes):
        record_event(EventKind.ALERT_FIRING, alert.summary, pool=alert.pool, detail={"alert": alert.pk})
        note(alert, AlertTransition.FIRED, now, text=alert.summary)


@transaction.atomic
def resolve(alert: Alert, now: datetime, *, because: str = "") -> bool:
    """End a firing alert; whether it was we who ended it."""
    if not _change(alert, AlertState.FIRING, {"state": AlertState.RESOLVED, "resolved_at": now}):
        return False
    lasted_min = (now - (alert.fired_at or alert.started_at)).total_seconds() / 60
    whose = scope_of(alert.rule, alert.subject).words
    summary = f"{KINDS[alert.rule.kind].label} of {whose}: the alert ended after {lasted_min:.0f} min{because}."
    record_event(EventKind.ALERT_RESOLVED, summary, pool=alert.pool, detail={"alert": alert.pk})
    note(alert, AlertTransition.RESOLVED, now, text=because.removeprefix(", "))
    return True


def note(alert: Alert, move: AlertTransition, now: datetime, *, text: str = "", by: Any = None) -> None:
    """Write down a move of an alert's life."""
    AlertStep.objects.create(alert=alert, at=now, move=move, by=by, note=text[:500])


def _end_gone(ready: Ready, verdicts: Verdicts, now: datetime) -> None:
    """End alerts of what is no longer looked at: a replica that was removed or disabled."""
    for subject in ready.open.keys() - verdicts.keys():
        alert = ready.open[subject]
        if not resolve(alert, now, because=", because nobody looks at it any more"):
            Alert.objects.filter(pk=alert.pk, state=AlertState.PENDING).delete()


def _sentence(ready: Ready, subject: str, verdict: Verdict) -> str:
    return ready.kind.sentence(scope_of(ready.rule, subject), ready.settings, verdict)[:300]


def _figures(verdict: Verdict) -> dict[str, Any]:
    is_ratio = verdict.unit == "ratio"
    return {
        "value": verdict.value,
        "limit": verdict.limit,
        "baseline": verdict.baseline,
        "unit": verdict.unit,
        "value_ratio": verdict.value if is_ratio else None,
        "baseline_ratio": verdict.baseline if is_ratio else None,
    }


def _change(alert: Alert, before: AlertState, changes: dict[str, object]) -> bool:
    """The conditional update of a transition; the object follows the row."""
    if not Alert.objects.filter(pk=alert.pk, state=before).update(**changes):
        return False
    for name, value in changes.items():
        setattr(alert, name, value)
    return True
