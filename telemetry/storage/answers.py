"""What routers were told by each replica's answers, summed over a window."""

from __future__ import annotations

from collections.abc import Sequence

from telemetry.metrics.reconciling import AnswerSide
from telemetry.metrics.windows import Window
from telemetry.storage.sums import during, rows_of


def answers_by_replica(pools: Sequence[str] | None, window: Window) -> dict[tuple[str, str], AnswerSide]:
    """By pool and replica, of some pools by name or of all. One query."""
    rows = rows_of(
        """
        select pool, replica, sum(requests)::bigint, sum(usage_reported)::bigint,
            sum(prompt_tokens) filter (where usage_reported > 0)::bigint,
            sum(cached_tokens) filter (where usage_reported > 0)::bigint, sum(cacheable_tokens)::bigint,
            sum(prompt_tokens) filter (where cacheable_tokens is not null)::bigint,
            sum(predicted_answers)::bigint, sum(predicted_prompt_tokens)::bigint, sum(predicted_tokens)::bigint,
            sum(predicted_cached_tokens)::bigint
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and replica <> '' and requests is not null
            and (%(pools)s::text[] is null or pool = any(%(pools)s))
        group by pool, replica
        """,
        during(window, whole=True) | {"pools": None if pools is None else list(pools)},
    )
    return {(row[0], row[1]): AnswerSide(*row[2:]) for row in rows}
