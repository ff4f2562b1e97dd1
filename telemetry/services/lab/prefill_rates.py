"""The prefill rate of a pool's replicas: learnt slowly from fits, one for all figures of time and money.

A fit to the responses of an hour comes first (``telemetry.lab.captured``). Without one, as where no response is
streamed, the engines' own prefill time counts.
"""

from __future__ import annotations

from controlplane.models import Pool, Replica, ReplicaRole
from telemetry.lab.captured import EngineFit
from telemetry.lab.costs import LearntRate, PrefillRate
from telemetry.metrics.rates import ratio
from telemetry.metrics.windows import Window
from telemetry.models import CapacityCurve
from telemetry.storage.dimension_sums import counter_sums_by_replica


def prefill_rate_of(pool: Pool) -> PrefillRate:
    """The pool's learnt rate. One query."""
    curve = (
        CapacityCurve.objects.filter(pool=pool)
        .only("prefill_rate", "prefill_deviation", "prefill_fits", "fitted_requests", "at")
        .first()
    )
    if curve is None or curve.prefill_rate is None:
        count = curve.fitted_requests if curve else 0
        return PrefillRate(
            None,
            f"The prefill rate is unknown: {count} responses with cached tokens in the last hour. Stream responses, "
            "and start vLLM with --enable-prompt-tokens-details.",
        )
    return PrefillRate(
        curve.prefill_rate,
        f"Learnt from {curve.prefill_fits:,} fits of an hour each until {curve.at:%d %b %H:%M} UTC, the last one of "
        f"{curve.fitted_requests:,} responses; the range is that of the fits.",
        curve.prefill_deviation,
    )


def learnt_rate(pool: Pool, fit: EngineFit, window: Window) -> dict[str, float | int]:
    """The pool's prefill rate as columns of its curve after a fit to a window's responses; {}: nothing was learnt."""
    rate = fit.prefill_rate or engines_prefill_rate(pool, window)
    if rate is None:
        return {}
    row = CapacityCurve.objects.filter(pool=pool, prefill_rate__isnull=False, prefill_fits__gt=0).first()
    earlier = LearntRate(row.prefill_rate or rate, row.prefill_deviation, row.prefill_fits) if row else None
    learnt = LearntRate.after(earlier, rate, fit.rate_error)
    return {
        "prefill_rate": learnt.tokens_per_s,
        "prefill_deviation": learnt.deviation,
        "prefill_fits": learnt.fits,
    }


def engines_prefill_rate(pool: Pool, window: Window) -> float | None:
    """Computed tokens / seconds of prefill, as engines count them; None if no engine reports both.

    Prompts that are computed at the same time count the same seconds, so a busy engine computes more than this.
    """
    serving = Replica.objects.filter(pool=pool).exclude(role=ReplicaRole.DECODE).values_list("pk", flat=True)
    rows = counter_sums_by_replica(list(serving), window, ("computed_prompt_tokens", "prefill_ms"))
    known = [row.totals.values for row in rows if None not in row.totals.values.values()]
    tokens, prefill_ms = (sum(row[name] or 0 for row in known) for name in ("computed_prompt_tokens", "prefill_ms"))
    return ratio(1000 * tokens, prefill_ms)
