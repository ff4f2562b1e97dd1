"""Too many first tokens came late: an objective with its error budget, and how fast that burns (T6).

Theory of operation. The objective is a share of requests whose first token comes within some seconds; what is left of
the whole is the error budget. The burn rate is the share of late requests over the budget: 1 would use it up exactly.
A breach needs the burn rate in a long window, so that a moment's slowness does not page, and in a short one, so that
the alert ends soon after its cause. The share is read at an edge of the histogram, where it is exact; the seconds are
taken to the nearest edge, which the verdict names.
Source: Beyer et al., "The Site Reliability Workbook", 2018, chapter 5: multiwindow, multi-burn-rate alerts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from telemetry.alerts.history_window import Seen, Source
from telemetry.alerts.kinds.base import (
    Asked,
    Fault,
    ForS,
    KeepFiringS,
    Kind,
    MinRequests,
    RuleSettings,
    Where,
    length,
    percent,
)
from telemetry.alerts.verdict import POOL, Reason, Result, Timing, Verdict, Verdicts, no_data
from telemetry.metrics.histograms import Buckets, merge


class TtftObjectiveSettings(RuleSettings, frozen=True):
    """Settings of ``ttft_objective``."""

    within_s: Annotated[
        float,
        Meta(gt=0, le=600, description="A first token that comes later is late.", extra={"unit": "seconds"}),
    ] = 1.0
    objective_ratio: Annotated[
        float, Meta(ge=0.5, le=0.9999, description="Requests that should not be late.", extra={"unit": "ratio"})
    ] = 0.95
    burn_rate: Annotated[
        float,
        Meta(ge=1, le=1000, description="So many times the budget's pace is too fast.", extra={"unit": "times"}),
    ] = 6.0
    long_s: Annotated[
        float, Meta(ge=60, le=21_600, description="The window that must burn too fast.", extra={"unit": "seconds"})
    ] = 3600.0
    short_s: Annotated[
        float,
        Meta(ge=10, le=3600, description="The window that must still burn too fast.", extra={"unit": "seconds"}),
    ] = 300.0
    min_requests: MinRequests = 50.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 300.0

    @property
    def step_s(self) -> float:
        """The short window."""
        return self.short_s

    @property
    def reach_s(self) -> float:
        """The long one."""
        return self.long_s

    @property
    def timing(self) -> Timing:
        """How long an answer must hold."""
        return Timing(self.for_s, self.keep_firing_s, self.long_s)

    @property
    def late_ratio(self) -> float:
        """The share of late requests that is too large."""
        return self.burn_rate * (1 - self.objective_ratio)

    def fault(self) -> Fault | None:
        """The long window is made of short ones, and the rule must be able to fire."""
        if self.long_s < 2 * self.short_s or not math.isclose(self.long_s % self.short_s, 0, abs_tol=1e-6):
            return "long_s", "expected a multiple of short_s, at least twice as long"
        if self.late_ratio > 1:
            return "burn_rate", f"expected at most {1 / (1 - self.objective_ratio):.4g}: all requests late burn as fast"
        return None


def judge(settings: TtftObjectiveSettings, seen: Seen, asked: Asked) -> Verdicts:
    """Compare the share of late requests in both windows with what burns too fast."""
    steps = round(settings.long_s / settings.short_s)
    long = _late(settings, seen.first_tokens(asked.group, steps))
    short = _late(settings, seen.first_tokens(asked.group, 1))
    if long is None or short is None:
        return {POOL: no_data(Reason.NO_READINGS)}
    requests = long[1]
    figures = {"requests": requests, "late_short_ratio": short[0], "edge_s": long[2]}
    if requests < settings.min_requests or not short[1]:
        return {POOL: no_data(Reason.LITTLE_TRAFFIC, **figures)}
    breach = min(long[0], short[0]) >= settings.late_ratio - 1e-9
    answer, reason = (Result.BREACH, Reason.ABOVE) if breach else (Result.OK, Reason.WITHIN)
    return {POOL: Verdict(answer, reason, long[0], settings.late_ratio, figures=figures)}


def _late(settings: TtftObjectiveSettings, parts: Sequence[Buckets]) -> tuple[float, int, float] | None:
    """(share of late requests, requests, edge in seconds); None where nothing was observed."""
    merged = merge(parts)
    if merged is None or not merged.buckets.total or not merged.buckets.edges:
        return None
    edges = merged.buckets.edges
    position = min(range(len(edges)), key=lambda one: abs(edges[one] - settings.within_s))
    late = sum(count for at, count in merged.buckets.counts.items() if at > position)
    return late / merged.buckets.total, merged.buckets.total, edges[position]


def sentence(where: Where, settings: TtftObjectiveSettings, verdict: Verdict) -> str:
    """What is wrong."""
    late = f"{percent(verdict.value)} of the first tokens of {where.words} came after {length(settings.within_s)}"
    burn = f"{(verdict.value or 0) / (1 - settings.objective_ratio):.1f} times"
    return f"{late} in {length(settings.long_s)}: the error budget burns at {burn} its pace."


def finds(settings: TtftObjectiveSettings) -> str:
    """What it looks for."""
    return (
        f"{percent(settings.late_ratio)} of first tokens after {length(settings.within_s)}, over "
        f"{length(settings.long_s)} and still over {length(settings.short_s)}"
    )


KIND = Kind(
    name="ttft_objective",
    label="TTFT objective",
    about="Watches an objective such as: 95 % of first tokens within a second. It fires when late answers use up the "
    "error budget several times too fast, over a long window and still over a short one. Seconds are taken to the "
    "nearest edge of the histogram, where the share is exact. Routers time streamed responses; where none is streamed, "
    "engines time all requests.",
    settings=TtftObjectiveSettings,
    sources=frozenset({Source.FIRST_TOKENS}),
    group_sources=frozenset({Source.FIRST_TOKENS}),
    unit="ratio",
    judge=judge,
    sentence=sentence,
    finds=finds,
    figure="Late first tokens",
)
