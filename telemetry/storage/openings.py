"""Openings that routers described, out of collected decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from telemetry.metrics.windows import Window
from telemetry.storage.sums import rows_of


def newest_openings(
    pools: Sequence[str] | None, window: Window, *, most: int, group: str | None = None
) -> list[tuple[str, str, Any]]:
    """(pool, task group, opening as JSON text) of each group's newest ``most``, in order of time. One query."""
    return [
        (row[0], row[1], row[2])
        for row in rows_of(
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
