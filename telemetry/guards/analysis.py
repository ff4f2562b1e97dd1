"""Analyzes a canary: a verdict on each figure, and one on the canary. Pure.

Theory of operation. Each figure compares the requests that the canary placed with those that the active revision placed
in the same time, and both with their own past: prompts differ, and what differed before is not caused by the canary
(difference in differences, ``confidence``). A figure has *failed* if the canary is certainly worse than before, and
worse by more than allowed as far as is known. It has *passed* if the canary is certainly not worse than allowed, and is
*inconclusive* in between or with too little data, which more time can change. It has *no verdict* where more time
changes nothing: too few prompts, nothing reported, no past to compare with. The canary fails when one figure does, and
passes when one does and no other one failed or is inconclusive.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from controlplane.services.policies.rollout_plans import GuardLimits
from controlplane.services.policies.rollouts import NO_VERDICT, Verdict
from telemetry.guards.confidence import MIN_BINS, Cell, Floats, Integers, difference

TAIL = 0.95  # the quantile of TTFT or latency that is compared
MIN_STREAMED = 0.05  # share of a side's responses below which TTFT is not representative
MIN_OTHERS = 2.0  # effective prompts of a side besides the largest: so few say more about themselves than the revision
MIN_PAST = 50  # requests of a side before the rollout
OFF = "off"


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one side in one period, as columns in order of time."""

    bins: Integers  # number of its bin, from 0
    prompts: Integers  # number of its tier-1 prefix, the same on both sides and in both periods
    answered: Floats  # 1: successful, or failed because of a replica or router; else 0
    failed: Floats  # 1: because of a replica or router
    prompt_tokens: Floats  # of responses that reported cached tokens; otherwise 0
    cached_tokens: Floats
    ttft_s: Floats  # router's clock, of streamed responses; NaN: unknown
    plain_latency_s: Floats  # of other responses, to their last byte; NaN: unknown

    def __len__(self) -> int:
        return len(self.bins)

    def take(self, chosen: Any) -> Requests:
        """The requests of a slice or mask."""
        return Requests(*(getattr(self, field.name)[chosen] for field in fields(self)))


class Side(NamedTuple):
    """The canary or the baseline."""

    now: Requests
    before: Requests  # that this side would have placed under the same stage


class Measured(NamedTuple):
    """The data of an analysis."""

    canary: Side
    baseline: Side
    is_split_by_prompt: bool = True  # which side a prompt is on is random; False: by router or task group
    has_common_prompts: bool = False  # sides differ in their routers only

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.canary, self.baseline


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure and its limit, as rollouts store it and pages show it."""

    name: str
    unit: str
    baseline: float | None
    canary: float | None
    limit: float | None
    verdict: str  # a Verdict, NO_VERDICT or "off"
    detail: str


def analyze(limits: GuardLimits, measured: Measured) -> tuple[Verdict, list[dict[str, Any]]]:
    """The verdict on a canary, and every figure with its own."""
    compared = _Comparison(limits, measured)
    figures = [compared.hit_rate(), compared.latency(), compared.error_ratio()]
    return overall(figure.verdict for figure in figures), [asdict(figure) | compared.counts for figure in figures]


def overall(verdicts: Iterable[str]) -> Verdict:
    """The worst verdict; figures that are off or without a verdict leave it to the others."""
    present = set(verdicts)
    if Verdict.FAILED in present:
        return Verdict.FAILED
    if Verdict.INCONCLUSIVE in present or (NO_VERDICT in present and Verdict.PASSED not in present):
        return Verdict.INCONCLUSIVE
    return Verdict.PASSED


class _Cells(NamedTuple):
    """A ratio's cells: (canary, baseline)."""

    now: tuple[Cell, Cell]
    before: tuple[Cell, Cell] | None

    @property
    def offset(self) -> float:
        """How far the canary was above the baseline before."""
        first, second = (cell.ratio or 0.0 for cell in self.before) if self.before else (0.0, 0.0)
        return first - second


class _Comparison:
    """The comparison of both sides."""

    def __init__(self, limits: GuardLimits, measured: Measured) -> None:
        self._limits, self._measured = limits, measured
        self._has_past = min(len(side.before) for side in measured.sides) >= MIN_PAST
        self._by_prompts = not measured.has_common_prompts
        canary, baseline = (side.now for side in measured.sides)
        bins = min(int(np.count_nonzero(np.bincount(now.bins))) for now in (canary, baseline))
        self.counts = {"canary_requests": len(canary), "baseline_requests": len(baseline), "bins": bins}
        self._missing = self._find_missing()

    def hit_rate(self) -> Figure:
        """Cached tokens of prompt tokens.

        A few long prompts have most of the tokens, and with them most of chance's share. Whether the rate is certainly
        lower is judged by the mean of the requests' own hit rates, which halves that error.
        """
        tokens = self._cells(lambda requests: requests.cached_tokens, lambda requests: requests.prompt_tokens)
        mean = self._cells(
            lambda requests: requests.cached_tokens / np.maximum(requests.prompt_tokens, 1.0),
            lambda requests: np.sign(requests.prompt_tokens),
        )
        without = "do not report cached tokens: no verdict by hit rate."
        allowed = self._limits.max_hit_rate_drop
        return self._compare_ratios("hit_rate", "Hit rate", tokens, mean, allowed, without, worse=-1)

    def error_ratio(self) -> Figure:
        """Failed requests of those that were answered."""
        cells = self._cells(lambda requests: requests.failed, lambda requests: requests.answered)
        without = "are unknown: no verdict by errors."
        allowed = self._limits.max_error_ratio
        return self._compare_ratios("error_ratio", "Failed requests", cells, cells, allowed, without, worse=1)

    def _compare_ratios(
        self, name: str, label: str, cells: _Cells, mean: _Cells, allowed: float | None, without: str, *, worse: int
    ) -> Figure:
        """A ratio of the canary and the baseline; ``worse`` is +1 if higher is worse, else -1."""
        canary, baseline = (cell.ratio for cell in cells.now)
        if allowed is None:
            return Figure(name, "ratio", baseline, canary, None, OFF, "No limit is set.")
        limit = None if baseline is None else baseline + cells.offset + worse * allowed
        reason = self._reason(name, cells, without)
        if reason is not None:
            return Figure(name, "ratio", baseline, canary, limit, *reason)
        is_of_events = name == "error_ratio"
        compare = partial(difference, by_prompts=self._by_prompts and not is_of_events, counts_events=is_of_events)
        certain, whole = compare(*mean), compare(*cells, effect=worse * allowed)
        values = (
            f"{label} {_percent(canary)}{_past(cells.before, 0)}, baseline {_percent(baseline)}{_past(cells.before, 1)}"
        )
        points = f"{abs(whole.value) * 100:.1f} points {'more' if whole.value > 0 else 'less'} than expected"
        detail = f"{values}: {points} (certain above {certain.margin * 100:.1f})."
        is_worse = worse * whole.value >= allowed and worse * certain.value > certain.margin
        verdict = _verdict(is_worse=is_worse, is_fine=worse * whole.value + whole.margin < allowed)
        return Figure(name, "ratio", baseline, canary, limit, verdict, detail)

    def latency(self) -> Figure:
        """The tail of TTFT, or of the latency of whole responses if neither side streams.

        The verdict is on the share of slow responses, because the error of a share is known. Each cell's share is that
        above its own p95, and the canary's now that above what is expected of it: its own p95 before, times the growth
        of the baseline's since. It is certainly not too slow if 5 % at most are above the limit.
        """
        if all(_is_plain(side.now) for side in self._measured.sides):
            name, label, responses, until = "plain_latency_p95_s", "latency", "non-streamed responses", ""
            waits = operator.attrgetter("plain_latency_s")
        else:
            name, label, responses, until = "ttft_p95_s", "TTFT", "streamed responses", " to their first token"
            waits = operator.attrgetter("ttft_s")
        canary, base = (_tail(waits(side.now)) for side in self._measured.sides)
        allowed = self._limits.max_ttft_p95_growth
        if allowed is None:
            return Figure(name, "seconds", base, canary, None, OFF, "No limit is set.")
        past = [_tail(waits(side.before)) if self._has_past else None for side in self._measured.sides]
        expected = (base or 0.0) * (past[0] / past[1] if past[0] and past[1] else 1.0)
        limit = None if base is None else expected * (1 + allowed)
        periods = [requests for side in self._measured.sides for requests in side]

        def slower_than(threshold: float | None) -> _Cells:
            thresholds = dict(zip(map(id, periods), (threshold, past[0], base, past[1]), strict=True))
            return self._cells(
                lambda requests: (waits(requests) > (thresholds[id(requests)] or 0.0)) * 1.0,
                lambda requests: ~np.isnan(waits(requests)) * 1.0,
            )

        slower, too_slow = slower_than(expected), slower_than(limit)
        reason = self._reason(name, slower, f"have no {label}: no verdict by it.")
        if reason is not None:
            return Figure(name, "seconds", base, canary, limit, *reason)
        certain, whole = (
            difference(*cells, by_prompts=self._by_prompts, counts_events=True) for cells in (slower, too_slow)
        )
        slow = slower.now[0].ratio or 0.0
        usual = slow - certain.value
        share = f"{_percent(slow)} of the canary's {responses} take longer than {expected:.2g} s{until}"
        detail = f"{share}: {_percent(usual)} are expected, over {_percent(usual + certain.margin)} certainly slower."
        is_worse = (canary or 0.0) >= expected * (1 + allowed) and certain.value > certain.margin
        verdict = _verdict(is_worse=is_worse, is_fine=whole.value + whole.margin < 0)
        return Figure(name, "seconds", base, canary, limit, verdict, detail)

    def _cells(self, numerators: Callable[[Requests], Floats], denominators: Callable[[Requests], Floats]) -> _Cells:
        def cell(requests: Requests) -> Cell:
            return Cell(numerators(requests), denominators(requests), requests.bins, requests.prompts)

        canary, baseline = self._measured.sides
        before = (cell(canary.before), cell(baseline.before)) if self._has_past else None
        if before and None in (before[0].ratio, before[1].ratio):
            before = None
        return _Cells((cell(canary.now), cell(baseline.now)), before)

    def _find_missing(self) -> str:
        """What every figure needs first, and gets with time; "" for nothing."""
        for name in ("canary", "baseline"):
            if (count := self.counts[f"{name}_requests"]) < self._limits.min_requests:
                return f"The {name} has {count} of at least {self._limits.min_requests} requests."
        if self.counts["bins"] < MIN_BINS:
            return f"Fewer than {MIN_BINS} time bins have requests on both sides."
        return ""

    def _reason(self, name: str, cells: _Cells, without: str) -> tuple[str, str] | None:
        """Why a figure has no result: (verdict, detail)."""
        if self._missing:
            return Verdict.INCONCLUSIVE, self._missing
        for side, cell in zip(("canary's", "baseline's"), cells.now, strict=True):
            if cell.ratio is None:
                return NO_VERDICT, f"The {side} responses {without}"
        if name == "error_ratio":
            return None
        by = "hit rate" if name == "hit_rate" else "latency"
        if cells.before is None and not self._measured.is_split_by_prompt:
            return NO_VERDICT, f"Too few requests of both sides are known from before the rollout: no verdict by {by}."
        if not self._measured.has_common_prompts:
            for side, cell in zip(("canary", "baseline"), cells.now, strict=True):
                if cell.other_prompts <= MIN_OTHERS:
                    return NO_VERDICT, _too_few(cell, side, by)
        return None


def _is_plain(requests: Requests) -> bool:
    """Whether almost no response was streamed; False without data."""
    streamed, others = (
        int(np.count_nonzero(~np.isnan(waits))) for waits in (requests.ttft_s, requests.plain_latency_s)
    )
    return others > 0 and streamed < MIN_STREAMED * (streamed + others)


def _too_few(cell: Cell, side: str, by: str) -> str:
    count = int(np.count_nonzero(cell.prompt_shares))
    most = ", of which few have most of the work" if count > MIN_OTHERS + 1 else ""
    return f"{count} prompt{'s' if count > 1 else ''} in the {side}{most}: no verdict by {by}."


def _verdict(*, is_worse: bool, is_fine: bool) -> Verdict:
    if is_worse:
        return Verdict.FAILED
    return Verdict.PASSED if is_fine else Verdict.INCONCLUSIVE


def _tail(waits: Floats) -> float | None:
    known = waits[~np.isnan(waits)]
    if not len(known):
        return None
    rank = min(int(TAIL * len(known)), len(known) - 1)
    return float(np.partition(known, rank)[rank])


def _past(before: tuple[Cell, Cell] | None, side: int) -> str:
    return "" if before is None else f" ({_percent(before[side].ratio)} before)"


def _percent(ratio: float | None) -> str:
    return "an unknown share" if ratio is None else f"{ratio * 100:.1f} %"
