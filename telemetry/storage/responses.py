"""What routers were told by each replica's answers, summed over a window or each of its steps.

Openings that routers described, out of collected decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from telemetry.metrics.rates import RouterCounts, accounted_ratio
from telemetry.metrics.windows import Window
from telemetry.storage.sums import STEP, during, fetch_rows

_SUMS = """sum(requests)::bigint, sum(usage_reported)::bigint,
    sum(prompt_tokens) filter (where usage_reported > 0)::bigint,
    sum(cached_tokens) filter (where usage_reported > 0)::bigint,
    sum(predicted_answers)::bigint, sum(predicted_prompt_tokens)::bigint, sum(predicted_tokens)::bigint,
    sum(predicted_cached_tokens)::bigint"""
_FROM = """from telemetry_routerreading
    where at > %(start)s and at <= %(end)s and replica <> '' and requests is not null
        and (%(pools)s::text[] is null or pool = any(%(pools)s))"""


@dataclass(frozen=True, slots=True)
class RouterCountsStep:
    """One replica's answers over one step."""

    pool: str
    replica: str
    start: datetime
    answers: RouterCounts


@dataclass(frozen=True, slots=True)
class UsageReports:
    """What one replica's responses said of their tokens over a window; None where no router was read."""

    completed: int | None  # successful responses
    reported: int | None  # of them, those that said how many tokens were cached
    without_details: int | None  # those with usage that did not say

    @property
    def accounted_ratio(self) -> float | None:
        """Share of the successful responses that figures of task groups rest on."""
        return accounted_ratio(self.reported, self.completed)

    @property
    def lacks_details(self) -> bool:
        """Whether the engine reports usage and never how many tokens were cached."""
        return bool(self.without_details) and not self.reported


def usage_reports(pool: str, replica: str, window: Window) -> UsageReports:
    """Of one replica, from readings. One query."""
    rows = fetch_rows(
        """
        select sum(ok_requests)::bigint, sum(usage_reported)::bigint, sum(usage_without_details)::bigint
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and pool = %(pool)s and replica = %(replica)s and requests is not null
        """,
        during(window, whole=True) | {"pool": pool, "replica": replica},
    )
    return UsageReports(*rows[0])


def router_counts_by_replica(pools: Sequence[str] | None, window: Window) -> dict[tuple[str, str], RouterCounts]:
    """By pool and replica, of some pools by name or of all. One query."""
    asked = during(window, whole=True) | {"pools": None if pools is None else list(pools)}
    rows = fetch_rows(f"select pool, replica, {_SUMS} {_FROM} group by pool, replica", asked)
    return {(row[0], row[1]): RouterCounts(*row[2:]) for row in rows}


def router_counts_by_step(pools: Sequence[str], window: Window) -> list[RouterCountsStep]:
    """Per pool, replica and step, ascending; steps without a request are left out. One query."""
    rows = fetch_rows(
        f"select pool, replica, {STEP} as start, {_SUMS} {_FROM} group by pool, replica, start order by pool, replica, start",  # noqa: E501 - constants
        during(window) | {"pools": list(pools)},
    )
    return [RouterCountsStep(pool, replica, start, RouterCounts(*sums)) for pool, replica, start, *sums in rows]


def newest_prompt_structures(
    pools: Sequence[str] | None, window: Window, *, most: int, group: str | None = None
) -> list[tuple[str, str, Any]]:
    """(pool, task group, opening as JSON text) of each group's newest ``most``, in order of time. One query."""
    return [
        (row[0], row[1], row[2])
        for row in fetch_rows(
            """
            select pool, "group", opening::text from (
                select pool, "group", at, opening,
                    row_number() over (partition by pool, "group" order by at desc) as number
                from telemetry_decision
                where at > %(start)s and at <= %(end)s and opening is not null
                    and (%(pools)s::text[] is null or pool = any(%(pools)s))
                    and (%(group)s::text is null or "group" = %(group)s)
            ) as described
            where number <= %(most)s order by pool, "group", at
            """,
            {
                "start": window.start,
                "end": window.end,
                "pools": None if pools is None else list(pools),
                "group": group,
                "most": most,
            },
        )
    ]
