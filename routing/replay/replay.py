"""Replay a trace over a fleet of modelled engines: who decides is asked at every arrival.

Theory of operation. A heap holds when each engine's present steps end; an engine that was cut short has an outdated
entry too, which no longer says its ``end_s`` and is passed over. All that ends by an arrival is taken first, so the
one who decides knows exactly what a router would know at that moment.

What a replay says about a policy, as the JSON that scripts read and as a table.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import Any, Protocol

from routing.replay.block_runs import Forest, shared_path
from routing.replay.fast_engine import FastEngine, FastEngineConfig, ModelledRequest, Watcher
from routing.traffic.columns import Columns

PROGRESS_EVERY = 10_000  # requests


class DoesNotFitError(ValueError):
    """A request that is larger than an engine's whole cache."""


class Decider(Watcher, Protocol):
    """Who places requests, and is told what becomes of them."""

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        """The index of the engine that gets a request."""
        ...


@dataclass
class ReplayResult:
    """What a replay brought. Arrays are by request, in order of arrival, unless they are by replica."""

    replicas: int
    ttft_s: array[float]  # from arrival to first token
    cached_tokens: array[int]
    placed: array[int]  # index of the replica
    evicted_blocks: int = 0
    ended_s: float = 0.0  # when the last request had all its tokens


class _Notes:
    """Notes what became of requests, and passes on what happens to them."""

    def __init__(self, outcome: ReplayResult, decider: Decider) -> None:
        self._outcome = outcome
        self._ended = decider.ended
        self.first_token = decider.first_token

    def ended(self, request: ModelledRequest, now_s: float) -> None:
        outcome, index = self._outcome, request.index
        outcome.ttft_s[index] = request.first_token_s - request.arrived_s
        outcome.cached_tokens[index] = request.cached_tokens
        outcome.ended_s = now_s
        self._ended(request, now_s)


def replay(
    forest: Forest,
    config: FastEngineConfig,
    replicas: int,
    decider: Decider,
    time_scale: float = 1.0,
    *,
    progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Replay a trace; ``time_scale`` 2 plays twice as fast. DoesNotFitError before anything is replayed."""
    columns = forest.columns
    check_that_all_fit(columns, config)
    nothing = bytes(8 * len(columns))
    outcome = ReplayResult(replicas, array("d", nothing), array("q", nothing), array("q", nothing))
    engines = [FastEngine(config, _Notes(outcome, decider)) for _ in range(replicas)]
    steps: list[tuple[float, int]] = []  # heap of (end, engine)
    place, placed, block_tokens = decider.place, outcome.placed, columns.block_tokens
    rows = zip(columns.at_s, columns.prompt_tokens, columns.output_tokens, forest.last, strict=True)
    for index, (at_s, prompt_tokens, output_tokens, last) in enumerate(rows):
        now_s = at_s / time_scale
        if steps and steps[0][0] <= now_s:
            _advance(engines, steps, now_s)
        request = ModelledRequest(index, now_s, prompt_tokens, output_tokens)
        request.path = shared_path(last)
        request.recompute = last is not None and last.visits > 1 and not prompt_tokens % block_tokens
        placed[index] = chosen = place(request, engines, now_s)
        engine = engines[chosen]
        if engine.submit(request, now_s):
            heappush(steps, (engine.end_s, chosen))
        if progress is not None and not index % PROGRESS_EVERY:
            progress(index)
    _advance(engines, steps, inf)
    outcome.evicted_blocks = sum(engine.pool.evicted for engine in engines)
    return outcome


def check_that_all_fit(columns: Columns, config: FastEngineConfig) -> None:
    """DoesNotFitError if a request's prompt and output need more blocks than an engine has."""
    most = config.blocks * config.block_tokens
    for index, (prompt, output) in enumerate(zip(columns.prompt_tokens, columns.output_tokens, strict=True)):
        if prompt + output > most:
            needed = -(-(prompt + output) // config.block_tokens)
            raise DoesNotFitError(
                f"request {index + 1} needs {needed} blocks of {config.block_tokens} tokens "
                f"({prompt} of prompt, {output} of output), and a replica has {config.blocks}"
            )


def _advance(engines: Sequence[FastEngine], steps: list[tuple[float, int]], until_s: float) -> None:
    """Take every step that ends by ``until_s``."""
    while steps and steps[0][0] <= until_s:
        end_s, index = steps[0]
        engine = engines[index]
        if engine.end_s != end_s:
            heappop(steps)
            continue
        engine.go_on()
        if engine.end_s == inf:
            heappop(steps)
        else:
            heapreplace(steps, (engine.end_s, index))


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
