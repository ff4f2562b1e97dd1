"""The analysis of a rollout as its page shows it: charts of canary and active revision, and what the verdict needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from controlplane.models import Rollout, RolloutState
from controlplane.services.policies.rollout_plans import read_stage
from controlplane.services.policies.rollouts import Verdict
from controlplane.web.tags import count, seconds
from telemetry.guards.confidence import MIN_BINS
from telemetry.guards.measurement import COLLECTED_S, analyzed_since, bin_length_s, next_analysis_at
from telemetry.web.breakdown_figures import Sketch, draw_lines
from telemetry.web.charts import figure_text

TITLES = {
    "hit_rate": "Hit rate",
    "ttft_p95_s": "TTFT p95",
    "plain_latency_p95_s": "Latency p95",
    "error_ratio": "Failed requests",
}


GAP = timedelta(milliseconds=1)  # before a step
SIDES = ("canary", "baseline", "limit")


class Row(NamedTuple):
    """The result of one analysis."""

    at: datetime
    step: int
    figure: dict[str, Any]  # PAST_FIGURE


@dataclass(frozen=True, slots=True)
class CanaryChart:
    """A figure of all analyses of a rollout."""

    title: str
    unit: str
    sketch: Sketch
    rows: list[Row]  # newest first


@dataclass(frozen=True, slots=True)
class CanaryAnalysis:
    charts: list[CanaryChart]
    outlook: list[str]  # sentences: what the next verdict needs, and when it can come


def canary_analysis(rollout: Rollout, now: datetime) -> CanaryAnalysis:
    """Charts and outlook of a rollout. No query."""
    charts = (_chart(rollout, name) for name in TITLES)
    return CanaryAnalysis([chart for chart in charts if chart is not None], list(_outlook(rollout, now)))


def _chart(rollout: Rollout, name: str) -> CanaryChart | None:
    """One figure; the lines have a gap before each step, whose analysis begins anew."""
    rows, gaps = list[Row](), list[datetime]()
    for point in rollout.past_readings:
        at, step = datetime.fromisoformat(point["at"]), point["stage"] + 1
        if rows and rows[-1].step != step:
            gaps.append(at)
        rows += [Row(at, step, figure) for figure in point["figures"] if figure["name"] == name]
    if len(rows) < 2:  # a single point is no line
        return None

    def line(side: str) -> list[tuple[datetime, float | None]]:
        points = [(row.at, row.figure[side]) for row in rows] + [(at - GAP, None) for at in gaps]
        return sorted(points, key=lambda point: point[0])

    last = rows[-1].figure
    unit = last["unit"]
    canary, active, limit = (figure_text(last[side], unit) for side in SIDES)
    text = f"{TITLES[name]}: canary {canary}, active {active}, limit {limit}, {last['verdict'].replace('_', ' ')}"
    drawn = draw_lines(
        [("canary", line("canary")), ("active revision", line("baseline"))],
        unit,
        summary=text,
        limit=line("limit"),
        lower_is_worse=name == "hit_rate",
        marks=gaps,
    )
    return CanaryChart(TITLES[name], unit, drawn, rows[::-1]) if drawn else None


def _outlook(rollout: Rollout, now: datetime) -> Iterator[str]:
    since, due_at = analyzed_since(rollout), next_analysis_at(rollout)
    is_analyzed = rollout.guard is not None and rollout.is_open and rollout.state != RolloutState.AWAITING_APPROVAL
    if not is_analyzed or rollout.is_last_stage or since is None or due_at is None:
        return
    bin_s = bin_length_s(read_stage(rollout.stages[rollout.stage]).observe_s)
    earliest_s = (since - now).total_seconds() + MIN_BINS * bin_s + COLLECTED_S
    counts = rollout.readings[0] if rollout.readings else {}
    missing = list(_missing(rollout, counts, since, now))
    if missing:
        waits_s = [earliest_s, *(wait_s for _, wait_s in missing)]
        yield f"Missing for a verdict: {' and '.join(words for words, _ in missing)}."
        if math.inf in waits_s:
            yield "None has come since the warm-up, so no time can be given."
        elif max(waits_s) > 0:
            yield f"A verdict is possible in about {_about(max(waits_s))}, at the present rate."
    elif earliest_s > 0:
        bins = f"{MIN_BINS} time bins of {seconds(bin_s)} with requests on both sides"
        yield f"A verdict needs {bins}: it is possible in {_about(earliest_s)} at the earliest."
    elif unclear := [row for row in rollout.readings if row["verdict"] == Verdict.INCONCLUSIVE]:
        names = ", ".join(TITLES.get(row["name"], row["name"]) for row in unclear)
        yield f"{names}: the difference is not certain yet. More requests decide it; no time can be given."
    if due_at > now + timedelta(seconds=1):
        yield f"Next result in {seconds(round((due_at - now).total_seconds()))}."
    else:
        yield "The next result is due now."


def _missing(rollout: Rollout, counts: dict[str, Any], since: datetime, now: datetime) -> Iterator[tuple[str, float]]:
    """(requests that a side lacks in words, seconds until they have come at the rate so far; infinite: none comes)."""
    if not counts or rollout.readings_at is None:
        return
    measured_s = (rollout.readings_at - since).total_seconds() - COLLECTED_S
    for side, name in (("canary", "canary"), ("baseline", "active revision")):
        known = counts.get(f"{side}_requests")  # none in results of an earlier release
        lacking = 0 if known is None else (rollout.guard or {})["min_requests"] - known
        if lacking > 0:
            wait_s = lacking * measured_s / known - (now - rollout.readings_at).total_seconds() if known else math.inf
            yield f"{count(lacking)} more request{'s' if lacking > 1 else ''} of the {name}", wait_s


def _about(duration_s: float) -> str:
    return seconds(10 * math.ceil(duration_s / 10)) if duration_s < 60 else seconds(60 * math.ceil(duration_s / 60))
