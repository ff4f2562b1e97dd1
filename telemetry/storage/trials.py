"""What routers counted by the revision of a policy that placed a request: sums of readings, for the guard of a trial.

The steps and the sums are those of ``sums``; a row here says which router and which task group it is of.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from telemetry.metrics.histograms import Buckets
from telemetry.metrics.windows import Window
from telemetry.storage.sums import STEP, during, merged_layouts, rows_of


class Timed(StrEnum):
    """What routers time: columns of their readings. Streamed responses have the one, plain ones the other (T1b)."""

    TTFT = "ttft"
    PLAIN_LATENCY = "plain_latency"


@dataclass(frozen=True, slots=True)
class Placed:
    """Additions of one router for one task group and revision over one step; whole numbers until they are weighed."""

    start: datetime
    router_id: int
    group: str
    revision: int
    requests: int
    answered: float  # those that ended well or by our fault: not the client's, not cancelled
    failed: float  # by a replica's or the router's fault
    prompt_tokens: float  # of answers that reported their cached tokens (H16)
    cached_tokens: float


@dataclass(frozen=True, slots=True)
class Waited:
    """What one router timed for one task group over one step; ``revision`` is None where it was not told apart."""

    start: datetime
    router_id: int
    group: str
    revision: int | None
    waits: Buckets  # seconds


def placed(policy: str, window: Window) -> list[Placed]:
    """What the revisions of a policy placed, ascending by step. One query."""
    rows = rows_of(
        f"""
        select {STEP} as start, router_id, "group", revision, sum(requests)::bigint,
            sum(coalesce(ok_requests, 0) + coalesce(replica_error_requests, 0)
                + coalesce(router_error_requests, 0))::bigint,
            sum(coalesce(replica_error_requests, 0) + coalesce(router_error_requests, 0))::bigint,
            coalesce(sum(prompt_tokens) filter (where usage_reported > 0), 0)::bigint,
            coalesce(sum(cached_tokens) filter (where usage_reported > 0), 0)::bigint
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and policy = %(policy)s and requests is not null
        group by start, router_id, "group", revision order by start, router_id, "group", revision
        """,  # noqa: S608 - no part of it comes from outside
        during(window) | {"policy": policy},
    )
    return [Placed(*row) for row in rows]


def waited(pool: str, policy: str, window: Window, of: Timed) -> list[Waited]:
    """A histogram of what a policy placed, by revision; with ``policy`` "" of all that the pool served. Two queries."""
    rows = rows_of(
        f"""
        select {STEP} as start, router_id, "group", revision, {of}_layout_id, position, sum(n)::bigint
        from telemetry_routerreading, unnest({of}_at, {of}_counts) as bucket(position, n)
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and policy = %(policy)s
            and reuse = '' and {of}_layout_id is not null
        group by 1, 2, 3, 4, 5, 6 order by 1, 2, 3, 4
        """,  # noqa: S608 - no part of it comes from outside
        during(window) | {"pool": pool, "policy": policy},
    )
    merged = merged_layouts(((*key,), layout, position, count) for *key, layout, position, count in rows)
    return [
        Waited(start, router_id, group, revision if policy else None, histogram.buckets)
        for (start, router_id, group, revision), histogram in merged.items()
    ]


def requests_by_replica(pool: str, window: Window) -> dict[str, int]:
    """Requests that a pool's replicas were given. One query."""
    rows = rows_of(
        """
        select replica, sum(requests)::bigint from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and replica <> '' and requests is not null
        group by replica
        """,
        during(window) | {"pool": pool},
    )
    return dict(rows)
