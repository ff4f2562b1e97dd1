"""Evaluates alert rules and stores the resulting changes of alerts, with their events and timelines.

Theory of operation. Rules with steps of the same length are loaded together, for all pools, so an evaluation costs a
few queries per length and not per rule. Every change of an alert is a conditional update of its row, so of two
evaluators with the same finding only one makes the change; a database constraint allows one open alert
per rule, pool and subject. The event and the timeline entry are written in the transaction of the change. Notifications
are decided afterwards (notifications.py).

A rule's finding is stored when its result or its reason changes, and at every evaluation while the rule has an open
alert. Other figures are only shown: they are stored once a minute if they changed. One row has the time of the last
evaluation. So rules in a steady state cost no writes.

Windows end just before the first reading that is due and not stored. A reading at ``t`` counts the time before ``t``.
It is stored a while later: at once for most replicas, seconds later for slow ones, and shards are scraped one after
another. A window that ended at any time would have the newest interval of some replicas and not of others; with windows
of few intervals, the pool's hit rate would be that of the replicas scraped first. A replica whose scrape failed has a
reading too, which says so. A replica without a reading for two intervals is not waited for, so a window ends at most
one interval before now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Min

from controlplane.isolation import Items, isolated_items
from controlplane.models import Event, EventKind, PeriodicTask, Pool
from controlplane.services.events import record_event
from telemetry.alerts.findings import (
    Action,
    Finding,
    Findings,
    OpenAlert,
    Reason,
    next_action,
    no_data,
    worst_finding,
)
from telemetry.alerts.history import HistoryQuery, load_control_plane_state, load_histories
from telemetry.alerts.history_window import History, Source, whole_steps
from telemetry.alerts.kinds import KINDS, Kind, RuleSettings
from telemetry.alerts.kinds.hit_rate_drop import DropEvidence
from telemetry.alerts.message import alert_labels, describe, group_name, scope_of
from telemetry.models import (
    Alert,
    AlertHistoryEntry,
    AlertRule,
    AlertState,
    AlertTransition,
    EvaluationState,
    ScrapeState,
)
from telemetry.models.alert import OPEN_STATES

MAX_SUBJECTS = 100  # open alerts of one rule; the kind no_data reports a fleet that is down as a whole
FIGURES_EVERY = timedelta(minutes=1)  # how often figures are stored that only pages and REST show
MIX_EVENT_EVERY = timedelta(minutes=30)  # at most one event of a pool, for all its rules
JUST_BEFORE = timedelta(microseconds=1)  # a reading that is due at a time is not in a window that ends before it


def watermark(now: datetime) -> datetime:
    """The newest time up to which all replicas reported: now, or up to an interval before. One query."""
    interval = timedelta(seconds=settings.SCRAPE_INTERVAL_S)
    states = ScrapeState.objects.filter(at__gt=now - 2 * interval, at__lte=now)
    oldest: datetime | None = states.aggregate(at=Min("at"))["at"]
    return now if oldest is None else min(now, oldest + interval - JUST_BEFORE)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A rule with what its evaluation needs."""

    rule: AlertRule
    kind: Kind
    settings: RuleSettings
    alerts: Mapping[str, Alert]  # open alerts, by subject
    until: datetime  # the end of the newest window

    @property
    def group(self) -> str:
        return group_name(self.rule)


def evaluate_rules(now: datetime) -> dict[int, Finding[Any]]:
    """Evaluate every enabled rule once; the finding on each alert that is open afterwards, by its id.

    Five queries; for each length of steps, one more and those of its sources; and the writes.
    """
    return evaluate(AlertRule.objects.filter(enabled=True).select_related("pool", "group"), now)


def evaluate(rules: Iterable[AlertRule], now: datetime, *, note_time: bool = True) -> dict[int, Finding[Any]]:
    """Evaluate some rules; ``note_time`` stores when and with what result."""
    all_rules = list(rules)
    findings: dict[int, Finding[Any]] = {}
    evaluated, alerting = set[int](), set[int]()
    stored = {rule.pk: (rule.verdict or {}, rule.evaluated_at) for rule in all_rules}
    with isolated_items(PeriodicTask.ALERT_RULES, is_complete=note_time) as item:
        for evaluation, history in _load(_evaluations(all_rules, watermark(now), item), now, item):
            with item(_name(evaluation.rule)):
                findings |= _evaluate(evaluation, history, now)
                evaluated.add(evaluation.rule.pk)
                if evaluation.alerts:
                    alerting.add(evaluation.rule.pk)
    if note_time:
        changed = []
        for rule in all_rules:
            if rule.pk not in evaluated:
                rule.verdict = no_data(Reason.FAILED).as_json()
            if rule.pk in alerting or _is_due(rule.verdict, *stored[rule.pk], now):
                rule.evaluated_at = now
                changed.append(rule)
        AlertRule.objects.bulk_update(changed, ["evaluated_at", "verdict"], batch_size=500)
        _record_evaluation(now)
    return findings


def _is_due(finding: Mapping[str, Any], stored: Mapping[str, Any], stored_at: datetime | None, now: datetime) -> bool:
    """Whether a finding must be stored: something that is decided by changed, or figures that are shown are old."""
    if stored_at is None or _decisive(finding) != _decisive(stored):
        return True
    return now - stored_at >= FIGURES_EVERY and finding != stored


def _decisive(finding: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a later evaluation or a person decides by."""
    return finding.get("result"), finding.get("reason"), bool(finding.get("figures", {}).get("mix_since"))


def _record_evaluation(now: datetime) -> None:
    row = EvaluationState(pk=1, at=now)
    EvaluationState.objects.bulk_create([row], update_conflicts=True, unique_fields=["id"], update_fields=["at"])


def last_evaluation() -> datetime | None:
    """When rules were last evaluated; None: never. One query."""
    return EvaluationState.objects.values_list("at", flat=True).first()


def _evaluate(evaluation: Evaluation, history: History, now: datetime) -> dict[int, Finding[Any]]:
    """Evaluate one rule and change its alerts; the finding on each alert that is open afterwards."""
    rule, kind = evaluation.rule, evaluation.kind
    view = history.at(history.count - 1)
    findings = kind.evaluate(evaluation.settings, view, evaluation.group)
    open_findings = _update_alerts(evaluation, findings, now)
    _close_removed(evaluation, findings, now)
    overall = worst_finding(findings) if findings else no_data(Reason.NO_REPLICAS)
    _record_mix_change(rule, (rule.verdict or {}).get("figures", {}), overall, now)
    rule.verdict = overall.as_json()
    return open_findings


def _name(rule: AlertRule) -> str:
    return f"{rule.pool.name}: {rule.name}"


def _evaluations(rules: Sequence[AlertRule], until: datetime, item: Items) -> list[Evaluation]:
    """The rules whose settings are valid, with their open alerts."""
    alerts: dict[int, dict[str, Alert]] = defaultdict(dict)
    for alert in Alert.objects.filter(rule__in=rules, state__in=OPEN_STATES).select_related("pool"):
        alerts[alert.rule_id][alert.subject] = alert
    evaluations = []
    for rule in rules:
        with item(_name(rule)):  # settings that no service wrote, or a kind of a newer release
            kind = KINDS[rule.kind]
            evaluations.append(Evaluation(rule, kind, kind.read(rule.settings), alerts[rule.pk], until))
    return evaluations


def _load(evaluations: Sequence[Evaluation], now: datetime, item: Items) -> Iterator[tuple[Evaluation, History]]:
    """Each rule with its pool's history. Rules with steps of the same length are loaded together."""
    needs_control = any(Source.CONTROL in evaluation.kind.sources for evaluation in evaluations)
    control = load_control_plane_state(now, last_evaluation()) if needs_control else None
    batches: dict[float, list[Evaluation]] = defaultdict(list)
    for evaluation in evaluations:
        batches[evaluation.settings.step_s].append(evaluation)
    for step_s, batch in batches.items():
        rule_settings = [evaluation.settings for evaluation in batch]
        query = HistoryQuery(
            sources=frozenset().union(*(evaluation.kind.needs(evaluation.group) for evaluation in batch)),
            step_s=step_s,
            count=max(whole_steps(each.lookback_s, step_s) for each in rule_settings),
            until=batch[0].until,
            days_back=max(each.days_back for each in rule_settings),
            series_lookback_s=max(each.series_lookback_s for each in rule_settings),
            caches_series=True,
            restart_lookback_s=max(each.warm_up_lookback_s for each in rule_settings),
            control=control,
        )
        pools = {evaluation.rule.pool_id: evaluation.rule.pool for evaluation in batch}
        histories = _load_pools(list(pools.values()), query, item)
        for evaluation in batch:
            if evaluation.rule.pool_id in histories:
                yield evaluation, histories[evaluation.rule.pool_id]


def _load_pools(pools: Sequence[Pool], query: HistoryQuery, item: Items) -> Mapping[int, History]:
    """All pools together; if that fails, pool by pool, so that one pool's data does not stop the rules of others."""
    names = {pool.pk: f"readings of {pool.name}" for pool in pools}
    with item.all_of(list(names.values())):
        return load_histories(pools, query)
    histories: dict[int, History] = {}
    for pool in pools:
        with item(names[pool.pk]):
            histories |= load_histories([pool], query)
    return histories


def _update_alerts(evaluation: Evaluation, findings: Findings, now: datetime) -> dict[int, Finding[Any]]:
    """Change the alert of every subject, up to ``MAX_SUBJECTS``; the finding on each alert that is open afterwards."""
    open_findings: dict[int, Finding[Any]] = {}
    available = MAX_SUBJECTS - len(evaluation.alerts)
    for subject, finding in findings.items():
        alert = evaluation.alerts.get(subject)
        if alert is None and available <= 0:
            continue
        state = alert and OpenAlert(alert.state == AlertState.FIRING, alert.started_at, alert.last_breach_at)
        action = next_action(evaluation.settings.timing, finding.result, state or None, now)
        episode = 1
        if action is Action.EXTEND and alert is not None and (next_episode := _next_episode(alert, finding)):
            again = "recovered and fell again: a new alert has the second drop"
            further = "fell further: a new alert has both falls"
            resolve(alert, now, reason=f"the hit rate {further if finding.evidence.worsened else again}")
            alert, action, episode = None, Action.OPEN_FIRING, next_episode
        if action is Action.NONE:
            updated = alert
        else:
            updated = apply(action, evaluation, subject, finding, alert=alert, now=now, episode=episode)
        if updated is not None:
            open_findings[updated.pk] = finding
            available -= alert is None
    return open_findings


def _next_episode(alert: Alert, finding: Finding[Any]) -> int | None:
    """The episode of a new alert for a second fall, which may have other causes; None: the alert goes on.

    The rate fell further, or it fell again within ``keep_firing_s`` of a recovery. A rate that goes up and down for
    longer stays one alert, that of episode 2.
    """
    drop, fired_about = finding.evidence, DropEvidence.read(alert.detail).onset
    if not isinstance(drop, DropEvidence) or alert.state != AlertState.FIRING:
        return None
    if not (fired_about and drop.onset and drop.comparable_since) or drop.onset <= fired_about:
        return None
    if drop.worsened:
        return alert.episode
    return 2 if drop.comparable_since > fired_about and alert.episode == 1 else None


@transaction.atomic
def apply(
    action: Action,
    evaluation: Evaluation,
    subject: str,
    finding: Finding[Any],
    *,
    alert: Alert | None,
    now: datetime,
    episode: int = 1,
) -> Alert | None:
    """Store an action; the alert that is open afterwards. ``episode`` is that of a new alert."""
    if action in {Action.OPEN, Action.OPEN_FIRING}:
        alert = _open_alert(evaluation, subject, finding, now, episode)
    if alert is None:
        return None
    if action in {Action.FIRE, Action.OPEN_FIRING}:
        _fire(alert, evaluation, finding, now)
    elif action is Action.EXTEND:
        # The sentence and the figures beside it are of the same evaluation.
        changes = {"summary": _summary(evaluation, subject, finding), **_values(finding)}
        lowest = alert.detail.get("lowest_ratio")
        if lowest is not None and finding.value is not None and finding.value < lowest:
            changes["detail"] = alert.detail | {"lowest_ratio": finding.value}
        Alert.objects.filter(pk=alert.pk, state__in=OPEN_STATES).update(last_breach_at=now, **changes)
    elif action is Action.DROP:
        Alert.objects.filter(pk=alert.pk, state=AlertState.PENDING).delete()
        return None
    elif action is Action.RESOLVE:
        resolve(alert, now)
        return None
    return alert


def _open_alert(
    evaluation: Evaluation, subject: str, finding: Finding[Any], now: datetime, episode: int
) -> Alert | None:
    """A new pending alert; None if there is one already, or if the rule was disabled since it was loaded.

    The lock on the rule orders this with ``update_rule``, which resolves the alerts of a rule that it disables.
    """
    rule = evaluation.rule
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
                episode=episode,
                started_at=now,
                last_breach_at=now,
                summary=_summary(evaluation, subject, finding),
                **_values(finding),
            )
    except IntegrityError:
        return None
    record_transition(alert, AlertTransition.PENDING, now)
    return alert


def _fire(alert: Alert, evaluation: Evaluation, finding: Finding[Any], now: datetime) -> None:
    changes = {
        "state": AlertState.FIRING,
        "fired_at": now,
        "last_breach_at": now,
        "summary": _summary(evaluation, alert.subject, finding),
        "detail": describe(evaluation.rule, evaluation.kind, evaluation.settings, finding, evaluation.until),
        **_values(finding),
    }
    if _change_state(alert, AlertState.PENDING, changes):
        record_event(EventKind.ALERT_FIRING, alert.summary, pool=alert.pool, detail={"alert": alert.pk})
        record_transition(alert, AlertTransition.FIRED, now, text=alert.summary)


@transaction.atomic
def resolve(alert: Alert, now: datetime, *, reason: str = "") -> bool:
    """Resolve a firing alert; False if it was not firing any more."""
    if not _change_state(alert, AlertState.FIRING, {"state": AlertState.RESOLVED, "resolved_at": now}):
        return False
    lasted_min = (now - (alert.fired_at or alert.started_at)).total_seconds() / 60
    kind = KINDS.get(alert.rule.kind)  # None: of a later release
    subject = f"{kind.label if kind else alert.rule.name} of {scope_of(alert.rule, alert.subject)}"
    summary = f"{subject}: resolved after {lasted_min:.0f} min{f', because {reason}' if reason else ''}."
    record_event(EventKind.ALERT_RESOLVED, summary, pool=alert.pool, detail={"alert": alert.pk})
    record_transition(alert, AlertTransition.RESOLVED, now, text=f"because {reason}" if reason else "")
    return True


def record_transition(
    alert: Alert, transition: AlertTransition, now: datetime, *, text: str = "", by: Any = None
) -> None:
    """Add an entry to an alert's timeline."""
    AlertHistoryEntry.objects.create(alert=alert, at=now, transition=transition, by=by, note=text[:500])


def _close_removed(evaluation: Evaluation, findings: Collection[str], now: datetime) -> None:
    """Close alerts about replicas that were removed or disabled."""
    for subject in evaluation.alerts.keys() - findings:
        alert = evaluation.alerts[subject]
        if not resolve(alert, now, reason="the replica was removed or disabled"):
            Alert.objects.filter(pk=alert.pk, state=AlertState.PENDING).delete()


def _summary(evaluation: Evaluation, subject: str, finding: Finding[Any]) -> str:
    return evaluation.kind.summarize(scope_of(evaluation.rule, subject), evaluation.settings, finding)[:300]


def _values(finding: Finding[Any]) -> dict[str, Any]:
    is_ratio = finding.unit == "ratio"
    return {
        "value": finding.value,
        "limit": finding.limit,
        "baseline": finding.baseline,
        "unit": finding.unit,
        "value_ratio": finding.value if is_ratio else None,
        "baseline_ratio": finding.baseline if is_ratio else None,
    }


def _change_state(alert: Alert, before: AlertState, changes: Mapping[str, Any]) -> bool:
    """Update an alert's row and the object if the row is in state ``before``; False if it is in another state."""
    if not Alert.objects.filter(pk=alert.pk, state=before).update(**changes):
        return False
    for name, value in changes.items():
        setattr(alert, name, value)
    return True


def _record_mix_change(rule: AlertRule, before: Mapping[str, Any], finding: Finding[Any], now: datetime) -> None:
    """Record an event if the traffic mix between task groups changed since the last evaluation. One query then."""
    evidence = finding.evidence
    if not isinstance(evidence, DropEvidence) or evidence.mix_since is None or evidence.mix_points is None:
        return
    if before.get("mix_since") or rule.group_id is not None:
        return
    recent = Event.objects.filter(kind=EventKind.TRAFFIC_MIX_CHANGED, pool=rule.pool, at__gt=now - MIX_EVENT_EVERY)
    if recent.exists():
        return
    shares = ", ".join(
        f"{group.name or 'no task group'} {group.baseline_ratio * 100:.0f} to {group.share_ratio * 100:.0f} %"
        for group in evidence.mix_groups
    )
    changes = f"this changes the hit rate by {evidence.mix_points:+.0f} points"
    summary = f"The mix of task groups changed ({shares} of the tokens); {changes}."
    figures = finding.figures()
    detail = {"mix_points": evidence.mix_points, "since": figures["mix_since"], "groups": figures["mix_groups"]}
    record_event(EventKind.TRAFFIC_MIX_CHANGED, summary, pool=rule.pool, detail=detail, at=now)
