"""Where reused tokens came from: hits by tier as shares of the queries (H4). They stack up to the total reuse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime

from telemetry.metrics.rates import ratio
from telemetry.metrics.windows import PointState, Series, Window
from telemetry.services.figures.overview import Pools, replicas_of
from telemetry.services.figures.series import Point, line_of
from telemetry.storage.roles import rated
from telemetry.storage.sums import EngineSums, engine_sums, point_state

LABELS = {
    "device_tokens": "device",
    "host_tokens": "host memory",
    "p2p_tokens": "another replica",
    "disk_tokens": "disk",
    "other_tokens": "other",
}


def reuse_by_tier(pools: Pools, window: Window) -> list[Series]:
    """A line per tier that anything came from, the device first: its tokens / queried tokens, 0 to 1.

    Of replicas that report tiers, decode replicas left out (H19).
    """
    rows: dict[datetime, list[EngineSums]] = defaultdict(list)
    for row in engine_sums([replica.pk for replica in rated(replicas_of(pools))], window):
        rows[row.start].append(row)
    used = [tier for tier in LABELS if any(getattr(row, tier) for of_step in rows.values() for row in of_step)]
    tiers = used or [next(iter(LABELS))]
    return [line_of(LABELS[tier], window, _points(tier, rows)) for tier in tiers]


def _points(tier: str, rows: Mapping[datetime, list[EngineSums]]) -> dict[datetime, Point]:
    return {start: _share(tier, of_step) for start, of_step in rows.items()}


def _share(tier: str, rows: list[EngineSums]) -> Point:
    telling = [row for row in rows if row.queries is not None and getattr(row, tier) is not None]
    queries = sum(row.queries or 0 for row in telling) if telling else None
    part = sum(getattr(row, tier) for row in telling)
    counted = any(row.queries is not None for row in rows)
    state = point_state(queries, stale=any(row.stale for row in rows), not_reported=counted)
    return ratio(part, queries), PointState(state)
