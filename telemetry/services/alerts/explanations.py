"""Finds the causes of hit-rate drops from stored data, and runs one evaluation of all alert rules from end to end."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import F, Q

from controlplane.isolation import isolated_items
from controlplane.models import Event, PeriodicTask, PolicyRevision, Pool, RevisionState
from controlplane.services.policies.lifecycle import clear_recovered, record_alert_cause
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.kinds.hit_rate_drop import DropEvidence
from telemetry.alerts.message import group_name
from telemetry.alerts.notifications import notify_due
from telemetry.alerts.pipeline import evaluate_rules, record_transition
from telemetry.causes import Cause, Evidence, rank
from telemetry.causes.evidence import CauseKind, DescribedPrompt, Period, RelatedEvent, RevisionFacts, find_change_point
from telemetry.lab.breakdown import BIN, TERMS, Breakdown, bin_start
from telemetry.lint.structure import PromptStructure
from telemetry.metrics.windows import Window
from telemetry.models import Alert, AlertState, AlertTransition, SuppressionReason
from telemetry.services.lab.breakdowns import breakdowns_over_time
from telemetry.storage import rule_sums
from telemetry.storage.locks import EVALUATE, advisory_lock
from telemetry.storage.replica_facts import removed_replicas

EVENTS_BEFORE = timedelta(minutes=30)  # events up to this long before a drop may be related to it
BINS = 60  # of baseline and drop together, to find the change point
MIN_BIN_S = 10.0
MIN_OVERLAP = 0.6  # share of a breakdown bin that lies in a period
EVENT_SUBJECTS = ("replica", "replicas", "policy", "rollout", "config", "group")  # first words of event kinds
EXPLAIN_EVERY = timedelta(minutes=3)  # repeated while a drop fires, because evidence arrives late
RETRY_EVERY = timedelta(seconds=15)  # instead, while no likely cause is known
LIKELY = 0.5  # confidence
RETRY_FOR = timedelta(minutes=10)  # after the alert fired; then EXPLAIN_EVERY
RECOVERED_AFTER = timedelta(seconds=30)  # without a breach: what is measured is no longer the drop
REMEDIED_FOR = timedelta(minutes=30)  # after the alert fired; then a replaced revision was not the cause
BASELINE = timedelta(hours=1)  # before the drop
MIN_BASELINE = timedelta(minutes=2)
MAX_AT_ONCE = 5  # alerts in one run: each costs 26 queries; the next run explains the others
DROPS = tuple(kind.name for kind in KINDS.values() if kind.is_drop)
Span = tuple[datetime, datetime]


def explain_drop(
    pool: Pool,
    *,
    group: str | None = None,
    start: datetime,
    end: datetime,
    baseline_start: datetime,
    baseline_end: datetime,
) -> list[Cause]:
    """The causes of a drop between ``start`` and ``end``, most likely first; [] if none is known. 18 queries."""
    return rank(evidence_of(pool, group, (baseline_start, baseline_end), (start, end)))


def evidence_of(pool: Pool, group: str | None, baseline: Span, drop: Span) -> Evidence:
    """Stored data of the baseline and of the drop, and the events around the drop."""
    replicas: dict[int, str] = dict(pool.replicas.values_list("pk", "name"))
    replicas |= {replica.pk: replica.name for replica in removed_replicas(baseline[0], [pool])}
    # without the time between the two, in which there may have been no traffic for a night
    step_s = max(sum((end - start).total_seconds() for start, end in (baseline, drop)) / BINS, MIN_BIN_S)
    bins = [one for span in (baseline, drop) for one in rule_sums.router_bins(pool.name, group, *span, step_s)]
    if not bins and group is None:
        bins = [one for span in (baseline, drop) for one in rule_sums.engine_bins(replicas, *span, step_s)]
    now = _period(pool, group, replicas, *drop, until=drop[1])
    return Evidence(
        now,
        _period(pool, group, replicas, *baseline, until=drop[1]),
        _related_events(pool, drop[0] - EVENTS_BEFORE, drop[1]),
        find_change_point(bins),
        group,
        _revisions({(route.policy, route.revision) for route in now.routes if route.policy}),
    )


def _revisions(keys: set[tuple[str, int]]) -> dict[tuple[str, int], RevisionFacts]:
    """The revisions that placed requests. One query."""
    numbers = {number for _, number in keys}
    rows = PolicyRevision.objects.filter(policy__name__in={policy for policy, _ in keys}, number__in=numbers)
    names = ("policy__name", "number", "settings__strategy", "author__username", "reason", "published_at")
    return {
        (policy, number): RevisionFacts(strategy or "", author or "", reason, published_at)
        for policy, number, strategy, author, reason, published_at in rows.values_list(*names)
        if (policy, number) in keys
    }


def _period(
    pool: Pool, group: str | None, replicas: dict[int, str], start: datetime, end: datetime, *, until: datetime
) -> Period:
    prompts = [
        DescribedPrompt(name, at, structure)
        for name, at, document in rule_sums.described_prompts(pool.name, group, start, end)
        if (structure := PromptStructure.read(json.loads(document))) is not None
    ]
    return Period(
        start,
        end,
        routes=rule_sums.route_totals(pool.name, group, start, end),
        prefixes=rule_sums.prefix_totals(pool.name, group, start, end),
        engines=rule_sums.engine_totals(replicas, start, end) if group is None else [],
        prompts=prompts,
        breakdown=_breakdown_of_period(pool, group, start, end, until),
    )


def _breakdown_of_period(
    pool: Pool, group: str | None, start: datetime, end: datetime, until: datetime
) -> Breakdown | None:
    """The breakdown of a period: the sum of the bins that lie mostly within it; None without such bins. One query.

    A term that is unknown in one bin is unknown in the sum. Requests after ``until`` are not in any bin yet.
    """
    window = Window(bin_start(start), end, BIN.total_seconds())
    bins = []
    for at, breakdown in breakdowns_over_time(pool, window, group):
        filled_s = (min(at + BIN, until) - at).total_seconds()
        if (min(at + BIN, end) - max(at, start)).total_seconds() >= MIN_OVERLAP * filled_s > 0:
            bins.append(breakdown)
    if not bins:
        return None
    terms = {name: [getattr(breakdown, name) for breakdown in bins] for name in TERMS}
    sums: dict[str, Any] = {name: None if None in term else sum(term) for name, term in terms.items()}
    return Breakdown(
        prompt_tokens=sum(breakdown.prompt_tokens for breakdown in bins),
        requests=sum(breakdown.requests for breakdown in bins),
        sample_ratio=min(breakdown.sample_ratio for breakdown in bins),
        **sums,
    )


def _related_events(pool: Pool, since: datetime, until: datetime) -> list[RelatedEvent]:
    """Events of the pool, oldest first. One query."""
    events = Event.objects.filter(at__gte=since, at__lte=until, pool=pool).order_by("at", "pk")
    rows = events.values_list("at", "kind", "summary", "replica__name", "detail")
    return [_related_event(*row) for row in rows if row[1].split("_")[0] in EVENT_SUBJECTS]


def _related_event(at: datetime, kind: str, summary: str, replica: str | None, document: object) -> RelatedEvent:
    detail = document if isinstance(document, dict) else {}
    before = detail.get("before")
    removed = before.get("name", "") if kind == "replica_removed" and isinstance(before, dict) else ""
    revision, policy = detail.get("revision"), detail.get("policy")
    return RelatedEvent(
        at,
        kind,
        summary,
        replica or str(removed),
        revision if isinstance(revision, int) else None,
        policy if isinstance(policy, str) else "",
    )


def explain_drops(now: datetime) -> int:
    """Find the causes of firing drops that are due; how many. One query for none.

    Known causes are kept while a drop recovers. An error does not stop notifications. A new drop waits for its causes
    before it is notified (``CAUSES_WAIT``).
    """
    is_due = Q(explained_at=None) | Q(explained_at__lte=now - EXPLAIN_EVERY)
    is_unclear = Q(causes=[]) | Q(causes__0__confidence__lt=LIKELY)
    is_due |= Q(is_unclear, fired_at__gt=now - RETRY_FOR, explained_at__lte=now - RETRY_EVERY)
    # At every run while it decides on the first notification; later, a restart may stay the reason for hours.
    is_undecided = Q(suppression__isnull=True) | Q(suppression__reason=SuppressionReason.RESTART)
    is_due |= Q(is_undecided, notification_count=0, fired_at__gt=now - RETRY_FOR)
    is_drop = Q(causes=[]) | Q(last_breach_at__gte=now - RECOVERED_AFTER)
    firing = Alert.objects.filter(is_due, is_drop, state=AlertState.FIRING, rule__kind__in=DROPS)
    # New alerts first: those that a restart explains are due at every run.
    ordered = firing.order_by(F("explained_at").asc(nulls_first=True), "pk")
    alerts = list(ordered.select_related("rule", "rule__group", "pool")[:MAX_AT_ONCE])
    clear_recovered(Alert.objects.filter(state=AlertState.FIRING).values_list("pk"))
    explained = 0
    if not alerts:
        return explained
    with isolated_items(PeriodicTask.ALERT_CAUSES) as item:
        for alert in alerts:
            # Stored first, so that the next run explains the other alerts even if this one fails.
            Alert.objects.filter(pk=alert.pk).update(explained_at=now)
            with item(f"alert {alert.pk}"), transaction.atomic():
                if not _is_remedied(alert, now):
                    explain(alert, now)
                    explained += 1
    return explained


def _is_remedied(alert: Alert, now: datetime) -> bool:
    """Whether the revision that a new alert names is no longer in use: this is the recovery. At most one query."""
    if not alert.causes or alert.causes[0]["kind"] != CauseKind.REVISION or alert.fired_at is None:
        return False
    named = alert.causes[0]["evidence"]
    in_use = PolicyRevision.objects.filter(
        policy__name=named["policy"], number=named["revision"], state__in=(RevisionState.CANARY, RevisionState.LIVE)
    )
    return alert.fired_at > now - REMEDIED_FOR and not in_use.exists()


def explain(alert: Alert, now: datetime) -> None:
    """Store the current causes of one drop; the first time that there are some, its timeline gets an entry."""
    start, baseline = _drop_and_baseline(alert)
    causes = explain_drop(
        alert.pool,
        group=group_name(alert.rule) or None,
        start=start,
        end=now,
        baseline_start=baseline[0],
        baseline_end=baseline[1],
    )
    documents = [cause.as_json() for cause in causes]
    Alert.objects.filter(pk=alert.pk, state=AlertState.FIRING).update(causes=documents, explained_at=now)
    named = causes[0].evidence if causes and causes[0].kind == CauseKind.REVISION else {}
    record_alert_cause(alert.pk, named.get("policy", ""), named.get("revision"))
    if documents and not alert.history.filter(transition=AlertTransition.EXPLAINED).exists():
        record_transition(alert, AlertTransition.EXPLAINED, now, text=documents[0]["summary"])


def _drop_and_baseline(alert: Alert) -> tuple[datetime, Span]:
    """Start of the drop, and a baseline before it in which the level did not change and no other drop was.

    The baseline ends where the last traffic before the drop ended: a night may lie between the two.
    """
    window, drop = timedelta(seconds=float(alert.detail.get("window_s") or 60)), DropEvidence.read(alert.detail)
    start = drop.onset or alert.started_at - window
    end = min(drop.steady_until or start, start)
    earliest = end - BASELINE
    return start, (min(max(earliest, drop.comparable_since or earliest), end - MIN_BASELINE), end)


def evaluate_alerts(now: datetime) -> bool:
    """Evaluate rules, find causes, send notifications; False if another evaluator does.

    Each part works from the stored state, so the next run completes an interrupted one.
    """
    with advisory_lock(EVALUATE) as acquired:
        if acquired:
            findings = evaluate_rules(now)
            explain_drops(now)
            notify_due(now, findings)
        return acquired
