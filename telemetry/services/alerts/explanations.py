"""Why a pool's hit rate fell: what was stored of both sides, and what the judges make of it.

Why a drop that fires does so: asked when it begins, and again while it lasts, because evidence comes in late.

One evaluation from end to end: judge the rules, look for causes, tell what is due.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Q

from controlplane.isolation import isolated_items
from controlplane.models import Event, PeriodicTask, Pool
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.notifications import notify_due
from telemetry.alerts.pipeline import evaluate_rules, note
from telemetry.causes import Cause, Evidence, rank
from telemetry.causes.evidence import RelatedEvent, Seen, Side, onset
from telemetry.lab.ladder import BIN, TERMS, Ladder, bin_start
from telemetry.lint import PromptStructure
from telemetry.metrics.windows import Window
from telemetry.models import Alert, AlertState, AlertTransition
from telemetry.services.lab.ladders import ladders_over_time
from telemetry.storage import rule_sums
from telemetry.storage.locks import EVALUATE, advisory_lock

LOOK_BACK = timedelta(minutes=30)  # events before the drop that may have to do with it
STEPS = 60  # that both sides together are cut into, to see when the rate fell
LEAST_STEP_S = 10.0
MOSTLY = 0.6  # of a ladder's bin that has to be of a side's time
SUBJECTS = ("replica", "replicas", "policy", "rollout", "config", "group")  # first words of the kinds of events


def explain_drop(
    pool: Pool,
    *,
    group: str | None = None,
    start: datetime,
    end: datetime,
    baseline_start: datetime,
    baseline_end: datetime,
) -> list[Cause]:
    """The causes of a drop between ``start`` and ``end``, likeliest first; [] where nothing can be said. 16 queries."""
    return rank(evidence_of(pool, group, (baseline_start, baseline_end), (start, end)))


def evidence_of(
    pool: Pool, group: str | None, before: tuple[datetime, datetime], now: tuple[datetime, datetime]
) -> Evidence:
    """Everything stored of two spans of time, and of what happened between them."""
    replicas = dict(pool.replicas.values_list("pk", "name"))
    step_s = max((now[1] - before[0]).total_seconds() / STEPS, LEAST_STEP_S)
    series = rule_sums.router_bins(pool.name, group, before[0], now[1], step_s)
    if not series and group is None:
        series = rule_sums.engine_bins(replicas, before[0], now[1], step_s)
    return Evidence(
        _side(pool, group, replicas, *now, until=now[1]),
        _side(pool, group, replicas, *before, until=now[1]),
        _happenings(pool, now[0] - LOOK_BACK, now[1]),
        onset(series),
        group,
    )


def _ladder(pool: Pool, group: str | None, start: datetime, end: datetime, until: datetime) -> Ladder | None:
    """All together of the bins that are mostly of this time; None where there is none. One query.

    A term that is unknown in one of them is unknown. Bins hold requests up to ``until``, ``end`` or later.
    """
    window = Window(bin_start(start), end, BIN.total_seconds())
    bins = [ladder for at, ladder in ladders_over_time(pool, window, group) if _is_mostly_of(at, start, end, until)]
    if not bins:
        return None
    terms = {name: [getattr(ladder, name) for ladder in bins] for name in TERMS}
    sums: dict[str, Any] = {name: None if None in term else sum(term) for name, term in terms.items()}
    return Ladder(
        prompt_tokens=sum(ladder.prompt_tokens for ladder in bins),
        requests=sum(ladder.requests for ladder in bins),
        sample_ratio=min(ladder.sample_ratio for ladder in bins),
        **sums,
    )


def _is_mostly_of(at: datetime, start: datetime, end: datetime, until: datetime) -> bool:
    """Whether most of a bin, as far as it is filled by ``until``, is of the time from ``start`` to ``end``."""
    filled_s = (min(at + BIN, until) - at).total_seconds()
    return (min(at + BIN, end) - max(at, start)).total_seconds() >= MOSTLY * filled_s > 0


def _side(
    pool: Pool, group: str | None, replicas: dict[int, str], start: datetime, end: datetime, *, until: datetime
) -> Side:
    seen = [
        Seen(name, at, opening)
        for name, at, document in rule_sums.described_prompts(pool.name, group, start, end)
        if (opening := PromptStructure.read(json.loads(document))) is not None
    ]
    return Side(
        start,
        end,
        routes=rule_sums.route_totals(pool.name, group, start, end),
        prefixes=rule_sums.prefix_totals(pool.name, group, start, end),
        engines=rule_sums.engine_totals(replicas, start, end) if group is None else [],
        openings=seen,
        ladder=_ladder(pool, group, start, end, until),
    )


def _happenings(pool: Pool, since: datetime, until: datetime) -> list[RelatedEvent]:
    """Events of the pool, oldest first, and those of routers' configurations. One query."""
    events = Event.objects.filter(at__gte=since, at__lte=until, pool=pool)
    rows = events.order_by("at", "pk").values_list("at", "kind", "summary", "replica__name", "detail")
    return [_happening(*row) for row in rows if row[1].split("_")[0] in SUBJECTS]


def _happening(at: datetime, kind: str, summary: str, replica: str | None, detail: object) -> RelatedEvent:
    told = detail if isinstance(detail, dict) else {}
    before = told.get("before")
    gone = before.get("name", "") if kind == "replica_removed" and isinstance(before, dict) else ""
    revision, policy = told.get("revision"), told.get("policy")
    return RelatedEvent(
        at,
        kind,
        summary,
        replica or str(gone),
        revision if isinstance(revision, int) else None,
        policy if isinstance(policy, str) else "",
    )


AGAIN = timedelta(minutes=3)
BASELINE = timedelta(hours=1)  # before the drop, that it is compared with
LEAST_BASELINE = timedelta(minutes=2)
MOST_AT_ONCE = 5  # alerts of one run: each costs 14 queries; the others' turn comes with the next
DROPS = tuple(kind.name for kind in KINDS.values() if kind.is_drop)


def explain_drops(now: datetime) -> int:
    """Look for the causes of drops that fire and were not explained lately; of how many. A query where none is.

    Nothing that goes wrong there keeps an alert from being told.
    """
    stale = Q(explained_at=None) | Q(explained_at__lte=now - AGAIN)
    firing = Alert.objects.filter(stale, state=AlertState.FIRING, rule__kind__in=DROPS)
    due = list(firing.select_related("rule", "rule__group", "pool").order_by("explained_at", "pk")[:MOST_AT_ONCE])
    explained = 0
    if not due:
        return explained
    with isolated_items(PeriodicTask.ALERT_CAUSES) as item:
        for alert in due:
            Alert.objects.filter(pk=alert.pk).update(explained_at=now)  # also if that fails: the others' turn comes
            with item(f"alert {alert.pk}"), transaction.atomic():
                explain(alert, now)
                explained += 1
    return explained


def explain(alert: Alert, now: datetime) -> None:
    """Store the causes of one drop as they look now; the first that are found are a step of its life."""
    start, baseline_start = _spans(alert)
    causes = explain_drop(
        alert.pool,
        group=alert.rule.group.name if alert.rule.group else None,
        start=start,
        end=now,
        baseline_start=baseline_start,
        baseline_end=start,
    )
    found = [cause.as_json() for cause in causes]
    Alert.objects.filter(pk=alert.pk, state=AlertState.FIRING).update(causes=found, explained_at=now)
    if found and not alert.causes:
        note(alert, AlertTransition.EXPLAINED, now, text=found[0]["summary"])


def _spans(alert: Alert) -> tuple[datetime, datetime]:
    """When the drop began, and since when its level held: a side before it that is of one level."""
    onset, since = alert.detail.get("onset"), alert.detail.get("level_since")
    window = timedelta(seconds=float(alert.detail.get("window_s") or 60))
    start = datetime.fromisoformat(onset) if onset else alert.started_at - window
    earliest = start - BASELINE
    level_since = datetime.fromisoformat(since) if since else earliest
    return start, min(max(earliest, level_since), start - LEAST_BASELINE)


def evaluate_alerts(now: datetime) -> bool:
    """Do all of it; False where another evaluator is at it.

    Each part works off what the database says, so one that is cut short is completed by the next.
    """
    with advisory_lock(EVALUATE) as ours:
        if ours:
            verdicts = evaluate_rules(now)
            explain_drops(now)
            notify_due(now, verdicts)
        return ours
