"""What a replay says about a policy, as the JSON that scripts read and as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from routing.simulation.whatif.replay import ReplayResult
from routing.workload.columns import Columns

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def report(outcome: ReplayResult, columns: Columns, first: int = 0) -> dict[str, Any]:
    """Figures of the requests from number ``first`` on; None where there are none to tell of.

    Keys: ``requests``; ``token_hit_rate``, cached / prompt tokens; ``ttft_s``, from arrival to first token;
    ``load_max_over_mean``, requests of the busiest replica / requests of a replica in the mean; the same of computed
    prompt tokens as ``work_max_over_mean``; ``replicas``, requests and hit rate of each. Of all requests, whatever
    ``first`` is: ``evicted_blocks``, cached blocks dropped; ``ended_s``, when the last answer was whole.
    """
    placed = outcome.placed[first:]
    prompts, cached = columns.prompt_tokens[first:], outcome.cached_tokens[first:]
    requests, asked, hit = ([0] * outcome.replicas for _ in range(3))
    for replica, prompt_tokens, cached_tokens in zip(placed, prompts, cached, strict=True):
        requests[replica] += 1
        asked[replica] += prompt_tokens
        hit[replica] += cached_tokens
    return {
        "requests": len(placed),
        "token_hit_rate": _ratio(sum(hit), sum(asked)),
        "request_hit_rate": _ratio(sum(1 for tokens in cached if tokens), len(placed)),
        "ttft_s": _waits(sorted(outcome.ttft_s[first:])),
        "load_max_over_mean": _max_over_mean(requests),
        "work_max_over_mean": _max_over_mean([a - b for a, b in zip(asked, hit, strict=True)]),
        "replicas": [
            {"requests": count, "token_hit_rate": _ratio(b, a)}
            for count, a, b in zip(requests, asked, hit, strict=True)
        ],
        "evicted_blocks": outcome.evicted_blocks,
        "ended_s": outcome.ended_s,
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each report, by name, under a header."""
    width = max([len("policy"), *map(len, rows)])
    lines = [f"{'policy':<{width}} {'hit %':>7} {'mean s':>8} {'p50':>8} {'p95':>8} {'p99':>8} {'max/mean':>9}"]
    for name, row in rows.items():
        ttft = row["ttft_s"]
        waits = " ".join(_figure(ttft[key], 8, 3) for key in ("mean", "p50", "p95", "p99"))
        hit = row["token_hit_rate"]
        hit_percent = _figure(None if hit is None else 100 * hit, 7, 2)
        lines.append(f"{name:<{width}} {hit_percent} {waits} {_figure(row['load_max_over_mean'], 9, 2)}")
    return lines


def quantile(ascending: Sequence[float], q: float) -> float | None:
    """The smallest value that at least the share ``q`` (0 to 1) does not exceed; None of nothing."""
    if not ascending:
        return None
    return ascending[max(0, math.ceil(q * len(ascending)) - 1)]


def _waits(ascending: Sequence[float]) -> dict[str, float | None]:
    mean = sum(ascending) / len(ascending) if ascending else None
    return {"mean": mean, **{name: quantile(ascending, q) for name, q in QUANTILES.items()}}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _max_over_mean(values: Sequence[int]) -> float | None:
    return _ratio(max(values) * len(values), sum(values))


def _figure(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"
