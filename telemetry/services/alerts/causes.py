"""Why a pool's hit rate fell: what was stored of both sides, and what the judges make of it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from controlplane.models import Event, Pool
from telemetry.causes import Cause, Evidence, rank
from telemetry.causes.evidence import Happening, Seen, Side
from telemetry.causes.onset import onset
from telemetry.lab.bins import BIN, bin_start
from telemetry.lab.ladder import TERMS, Ladder
from telemetry.lint.openings import Opening
from telemetry.metrics.windows import Window
from telemetry.services.lab.ladders import ladders_over_time
from telemetry.storage import drops

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
    series = drops.bins(pool.name, group, before[0], now[1], step_s)
    if not series and group is None:
        series = drops.engine_bins(replicas, before[0], now[1], step_s)
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
        for name, at, document in drops.described(pool.name, group, start, end)
        if (opening := Opening.read(json.loads(document))) is not None
    ]
    return Side(
        start,
        end,
        routes=drops.routes(pool.name, group, start, end),
        prefixes=drops.prefixes(pool.name, group, start, end),
        engines=drops.engines(replicas, start, end) if group is None else [],
        openings=seen,
        ladder=_ladder(pool, group, start, end, until),
    )


def _happenings(pool: Pool, since: datetime, until: datetime) -> list[Happening]:
    """Events of the pool, oldest first, and those of routers' configurations. One query."""
    events = Event.objects.filter(at__gte=since, at__lte=until, pool=pool)
    rows = events.order_by("at", "pk").values_list("at", "kind", "summary", "replica__name", "detail")
    return [_happening(*row) for row in rows if row[1].split("_")[0] in SUBJECTS]


def _happening(at: datetime, kind: str, summary: str, replica: str | None, detail: object) -> Happening:
    told = detail if isinstance(detail, dict) else {}
    before = told.get("before")
    gone = before.get("name", "") if kind == "replica_removed" and isinstance(before, dict) else ""
    revision, policy = told.get("revision"), told.get("policy")
    return Happening(
        at,
        kind,
        summary,
        replica or str(gone),
        revision if isinstance(revision, int) else None,
        policy if isinstance(policy, str) else "",
    )
