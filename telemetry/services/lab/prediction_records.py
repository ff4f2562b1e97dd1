"""Records what was predicted for each rollout and what became of it, and summarizes the errors of all predictions.

What was predicted is the newest what-if of the revision's settings that had ended when it was published. What became
of it are the routers' figures of the whole pool, as in the what-if, from ``SETTLE`` after the rollout's completion:
until then caches fill. The measured time is ``MEASURED_TIME``, longer where fewer than ``MIN_REQUESTS`` were counted,
and it ends at the next change of the pool's policies, task groups or replicas. The traffic of that time is not the
traffic that was replayed, so the error contains its change.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from controlplane.isolation import isolated_items
from controlplane.models import Event, EventKind, PeriodicTask, Pool, Rollout, RolloutState
from telemetry.lab.predictions import MAX_HIT_ERROR, MAX_TTFT_ERROR
from telemetry.metrics.rates import accounted_ratio, ratio, sum_known
from telemetry.metrics.windows import Window
from telemetry.models import OPEN_PREDICTIONS, Prediction, PredictionState, WhatIf
from telemetry.services.figures.overview import quantile_s
from telemetry.services.lab.what_ifs import what_ifs_of_settings
from telemetry.storage import sums
from telemetry.storage.locks import PREDICTIONS, advisory_lock

RECORDED_FOR = timedelta(days=7)  # rollouts without a record that are older get none
SETTLE = timedelta(minutes=5)  # after the rollout is complete
MEASURED_TIME = timedelta(minutes=30)
SHORTEST_TIME = timedelta(minutes=5)
LONGEST_TIME = timedelta(hours=24)
MIN_REQUESTS = 200
LAG = timedelta(seconds=30)  # readings of a time are stored this late
MINUTE = timedelta(minutes=1)

# Changes of a pool after which figures no longer show the effect of the rollout before.
CHANGES = (
    EventKind.POLICY_PUBLISHED,
    EventKind.POLICY_REMOVED,
    EventKind.ROLLOUT_STARTED,
    EventKind.ROLLOUT_PROMOTED,
    EventKind.GROUP_CREATED,
    EventKind.GROUP_CHANGED,
    EventKind.GROUP_REMOVED,
    EventKind.REPLICA_ADDED,
    EventKind.REPLICA_REMOVED,
    EventKind.REPLICA_STATE_CHANGED,
    EventKind.REPLICA_DOWN,
    EventKind.REPLICA_RESTARTED,
)


@dataclass(frozen=True, slots=True)
class PredictedOutcome:
    """What a what-if predicted of the whole pool; None: unknown."""

    hit_rate: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    difference: dict[str, Any] | None  # from the active policy, with 95 % intervals
    verdict: str
    is_calibrated: bool
    requests: int  # counted
    traffic_until: str  # ISO 8601


@dataclass(frozen=True, slots=True)
class MeasuredOutcome:
    """What routers measured of the whole pool; None: unknown."""

    requests: int
    hit_rate: float | None
    accounted_ratio: float | None  # share of successful responses that the hit rate includes
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    timed_requests: int  # streamed responses, which have a TTFT


def record_predictions(now: datetime) -> int:
    """Create records of new rollouts and fill the open ones; how many were visited, 0 if another worker runs."""
    visited = 0
    with advisory_lock(PREDICTIONS) as acquired, isolated_items(PeriodicTask.PREDICTIONS) as item:
        for rollout in _unrecorded(now) if acquired else ():
            with item(f"{rollout.pk}: {rollout.revision}"):
                create_record(rollout)
        for record in list(_records().filter(state__in=OPEN_PREDICTIONS)) if acquired else ():
            visited += 1
            with item(f"{record.rollout_id}: {record.rollout.revision}"):
                _fill(record, now)
    return visited


def _unrecorded(now: datetime) -> list[Rollout]:
    rows = Rollout.objects.filter(prediction=None, started_at__gte=now - RECORDED_FOR)
    rows = rows.select_related("revision__policy__pool", "revision__policy__group")
    return list(rows.order_by("pk"))


def _records() -> QuerySet[Prediction]:
    return Prediction.objects.select_related("rollout__revision__policy__pool")


def records_of(pools: QuerySet[Pool], limit: int) -> list[Prediction]:
    """The newest records of some pools, with rollout, revision, policy and pool loaded. One query."""
    return list(_records().filter(rollout__revision__policy__pool__in=pools)[:limit])


def create_record(rollout: Rollout) -> Prediction:
    """Store what was predicted when the rollout was published. Once: a second call changes nothing."""
    what_if, predicted, reason = _prediction_of(rollout)
    values = {"what_if": what_if, "predicted": predicted and asdict(predicted), "reason": reason[:500]}
    return Prediction.objects.get_or_create(rollout=rollout, defaults=values)[0]


def _prediction_of(rollout: Rollout) -> tuple[WhatIf | None, PredictedOutcome | None, str]:
    """(the what-if, its prediction, why there is none)."""
    for what_if, number in what_ifs_of_settings(rollout.revision):
        if what_if.ended_at is None or what_if.ended_at > rollout.started_at:
            continue
        if what_if.result is None:
            return what_if, None, f"Its what-if failed: {what_if.reason}"
        candidate = what_if.replays[number + 1]
        if candidate["figures"] is None:
            return what_if, None, f"It could not be replayed: {candidate['reason']}"
        return what_if, _outcome(what_if, candidate), ""
    return None, None, "No what-if of these settings had ended when it was published."


def _outcome(what_if: WhatIf, candidate: dict[str, Any]) -> PredictedOutcome:
    result: dict[str, Any] = what_if.result or {}
    figures = candidate["figures"]
    return PredictedOutcome(
        figures["hit_rate"],
        figures["ttft_p50_s"],
        figures["ttft_p95_s"],
        candidate["difference"],
        candidate["verdict"],
        result["calibration"]["is_calibrated"],
        figures["requests"],
        what_if.end.isoformat(),
    )


# --- what became of it ----------------------------------------------------------------------------------


def _fill(record: Prediction, now: datetime) -> None:
    """Measure the outcome so far, or say why there is none. At most 5 queries."""
    rollout = record.rollout
    if rollout.is_open:
        return
    if rollout.state != RolloutState.COMPLETE or rollout.finished_at is None:
        why = f": {rollout.why}" if rollout.why else "."
        _store(record, PredictionState.UNMEASURED, f"The rollout was {rollout.get_state_display().lower()}{why}")
        return
    pool, start = rollout.revision.policy.pool, _next_minute(rollout.finished_at + SETTLE)
    change = _next_change(pool, rollout.finished_at)
    end = _last_minute(min(now - LAG, start + LONGEST_TIME, change.at if change else now))
    is_last = change is not None or end >= start + LONGEST_TIME
    if end < start + SHORTEST_TIME:
        reason = f"Another change came first: {change.summary}" if change else ""
        _store(record, PredictionState.UNMEASURED if change else PredictionState.MEASURING, reason)
        return
    _measure(record, pool, start, end, is_last=is_last)


def _measure(record: Prediction, pool: Pool, start: datetime, end: datetime, *, is_last: bool) -> None:
    """Measure ``MEASURED_TIME``, or up to ``end`` if it has too few requests. ``is_last``: ``end`` moves no further."""
    usual_end = min(end, start + MEASURED_TIME)
    measured = measured_outcome(pool, start, usual_end)
    if measured.requests < MIN_REQUESTS and usual_end < end:
        measured, usual_end = measured_outcome(pool, start, end), end
    if measured.requests >= MIN_REQUESTS:
        is_done = is_last or usual_end >= start + MEASURED_TIME
        state = PredictionState.MEASURED if is_done else PredictionState.MEASURING
        _store(record, state, "", (start, usual_end, measured))
    elif is_last:
        reason = f"Only {measured.requests} requests were counted; {MIN_REQUESTS} are needed."
        _store(record, PredictionState.UNMEASURED, reason)
    else:
        _store(record, PredictionState.MEASURING, "")


def _store(
    record: Prediction,
    state: PredictionState,
    reason: str,
    outcome: tuple[datetime, datetime, MeasuredOutcome] | None = None,
) -> None:
    start, end, measured = outcome or (None, None, None)
    Prediction.objects.filter(pk=record.pk, state__in=OPEN_PREDICTIONS).update(
        state=state,
        measured_reason=reason[:500],
        measured_from=start,
        measured_to=end,
        measured=measured and asdict(measured),
    )


def _next_change(pool: Pool, after: datetime) -> Event | None:
    return Event.objects.filter(pool=pool, kind__in=CHANGES, at__gt=after).order_by("at", "pk").first()


def _next_minute(at: datetime) -> datetime:
    """The first whole minute at or after a time, so that rollups contain the window."""
    whole = _last_minute(at)
    return whole if whole == at else whole + MINUTE


def _last_minute(at: datetime) -> datetime:
    return at.replace(second=0, microsecond=0)


def measured_outcome(pool: Pool, start: datetime, end: datetime) -> MeasuredOutcome:
    """The routers' figures of a pool between two times. At most four queries."""
    window = Window(start, end, (end - start).total_seconds())
    rows, _ = sums.router_sums([pool.name], window, whole=True)
    ttft = sums.merge_histograms(sums.router_ttft([pool.name], window, whole=True).values())
    return MeasuredOutcome(
        sum_known(row.requests for row in rows) or 0,
        ratio(sum_known(row.cached_tokens for row in rows), sum_known(row.prompt_tokens for row in rows)),
        accounted_ratio(sum_known(row.usage_reported for row in rows), sum_known(row.ok_requests for row in rows)),
        quantile_s(ttft, 0.5),
        quantile_s(ttft, 0.95),
        int(ttft.buckets.total) if ttft else 0,
    )


# --- the record of all predictions ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordSummary:
    """How good the predictions of some records were; None: nothing to compare."""

    rollouts: int
    without_prediction: int
    not_calibrated: int  # predicted, but without a verdict; not compared
    open: int  # calibrated, and still being measured
    unmeasured: int  # calibrated, but nothing was measured
    compared: int  # calibrated and measured
    median_hit_rate_error: float | None  # absolute
    within_hit_rate: float | None  # share of those with a known error within ``MAX_HIT_ERROR``
    median_ttft_error: float | None  # absolute, of TTFT p50
    within_ttft: float | None  # share within ``MAX_TTFT_ERROR``


def summarize(records: Sequence[Prediction]) -> RecordSummary:
    """Errors of the calibrated predictions whose outcome was measured."""
    calibrated = [record for record in records if record.is_calibrated]
    compared = [record for record in calibrated if record.state == PredictionState.MEASURED]
    hit_rate = _absolute(record.hit_rate_error for record in compared)
    ttft = _absolute(record.ttft_p50_error for record in compared)
    return RecordSummary(
        len(records),
        sum(record.predicted is None for record in records),
        sum(record.predicted is not None and not record.is_calibrated for record in records),
        sum(record.is_open for record in calibrated),
        sum(record.state == PredictionState.UNMEASURED for record in calibrated),
        len(compared),
        statistics.median(hit_rate) if hit_rate else None,
        _share_within(hit_rate, MAX_HIT_ERROR),
        statistics.median(ttft) if ttft else None,
        _share_within(ttft, MAX_TTFT_ERROR),
    )


def _absolute(errors: Iterable[float | None]) -> list[float]:
    return [abs(error) for error in errors if error is not None]


def _share_within(errors: Sequence[float], limit: float) -> float | None:
    return sum(error <= limit for error in errors) / len(errors) if errors else None


def is_recorded_later(rollout: Rollout) -> bool:
    """Whether a rollout without a record will get one with the next run."""
    return rollout.started_at >= timezone.now() - RECORDED_FOR
