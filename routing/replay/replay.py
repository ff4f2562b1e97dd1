"""Replays a trace over a fleet of modelled engines, and reports the results as JSON and as a table.

Theory of operation. Before an arrival is placed, all steps that end by then are processed in order of time, so the
placer knows exactly what a router would know at that time. The next step to end is found by comparing all engines; up
to about a hundred of them that costs less than a heap.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from statistics import fmean, pstdev
from typing import Any, Final, Protocol

from routing.replay.block_runs import Forest, shared_path
from routing.replay.fast_engine import EngineListener, FastEngine, FastEngineConfig, ModelledRequest
from routing.replay.tiers import GPU, LowerTiers, TierCache, TierConfig
from routing.traffic.columns import Columns

PROGRESS_EVERY = 10_000  # requests
QUEUE_SAMPLES: Final = 100  # of each replica's queue, over the time of all arrivals
MIN_GROWTH: Final = 0.03  # of a growing queue, seconds of work per second
MIN_QUEUE_S: Final = 5.0  # of an overloaded replica, in the last quarter
MIN_QUEUE_PREFILLS: Final = 10  # the same in mean prefill times
MIN_SPAN_S: Final = 60.0  # of all arrivals; what a shorter trace overloads is a burst


class RequestTooLargeError(ValueError):
    """A request needs more blocks than an engine has."""


class Placer(EngineListener, Protocol):
    """Places requests and observes their progress."""

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        """Index of the engine for a request."""
        ...


@dataclass
class ReplayResult:
    """Results of a replay. Arrays are by request, in order of arrival."""

    replicas: int
    ttft_s: array[float]  # from arrival to first token
    cached_tokens: array[int]  # fetched ones included
    placements: array[int]  # index of the replica
    evicted_blocks: int = 0
    ended_s: float = 0.0  # end of the last request
    fetched_blocks: dict[str, array[int]] = field(default_factory=dict)  # by cache tier below the GPU cache
    overloaded: list[int] = field(default_factory=list)  # indexes of the replicas whose queue grows until the end


class _Recorder:
    """Records the results of requests and forwards events to the placer."""

    def __init__(self, result: ReplayResult, placer: Placer) -> None:
        self._result = result
        self._on_ended = placer.on_ended
        self.on_first_token = placer.on_first_token

    def on_ended(self, request: ModelledRequest, now_s: float) -> None:
        result, index = self._result, request.index
        result.ttft_s[index] = request.first_token_s - request.arrived_s
        result.cached_tokens[index] = request.cached_tokens
        result.ended_s = now_s
        if request.fetched_blocks:
            for tier, blocks in request.fetched_blocks.items():
                result.fetched_blocks[tier][index] = blocks
        self._on_ended(request, now_s)


def replay(
    forest: Forest,
    configs: Sequence[FastEngineConfig],
    placer: Placer,
    time_scale: float = 1.0,
    *,
    progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Replay a trace over one engine per config, ``time_scale`` times as fast.

    Raises RequestTooLargeError before it starts.
    """
    columns = forest.columns
    check_sizes(columns, min(configs, key=lambda config: config.blocks))
    zeros = bytes(8 * len(columns))
    result = ReplayResult(len(configs), array("d", zeros), array("q", zeros), array("q", zeros))
    result.fetched_blocks = {tier.name: array("q", zeros) for config in configs for tier in config.tiers}
    recorder = _Recorder(result, placer)
    engines = [
        FastEngine(config, recorder, tiers, columns.ids)
        for config, tiers in zip(configs, _lower_tiers(configs), strict=True)
    ]
    place, placed, block_tokens = placer.place, result.placements, columns.block_tokens
    last_generated = forest.last_generated
    next_end_s = inf  # when the first of all current steps ends
    rows = zip(columns.at_s, columns.prompt_tokens, columns.output_tokens, forest.last_runs, strict=True)
    for index, (at_s, prompt_tokens, output_tokens, last) in enumerate(rows):
        now_s = at_s / time_scale
        if next_end_s <= now_s:
            next_end_s = _advance(engines, now_s)
        request = ModelledRequest(index, now_s, prompt_tokens, output_tokens)
        prompt_path = shared_path(last)
        generated = last_generated.get(index)
        request.path = prompt_path if generated is None else shared_path(generated)
        request.prompt_runs = len(prompt_path)
        request.recompute = last is not None and last.visits > 1 and not prompt_tokens % block_tokens
        placed[index] = chosen = place(request, engines, now_s)
        engine = engines[chosen]
        if engine.submit(request, now_s) and engine.end_s < next_end_s:
            next_end_s = engine.end_s
        if progress is not None and not index % PROGRESS_EVERY:
            progress(index)
    _advance(engines, inf)
    result.evicted_blocks = sum(engine.pool.evicted for engine in engines)
    prefill_tokens = columns.all_prompt_tokens - sum(result.cached_tokens)
    prefill_s = prefill_tokens / len(columns) / fmean(config.prefill_rate for config in configs) if columns else 0.0
    result.overloaded = overloaded(result, [at_s / time_scale for at_s in columns.at_s], prefill_s)
    return result


def _lower_tiers(configs: Sequence[FastEngineConfig]) -> list[LowerTiers | None]:
    """The tiers of each replica, None for a replica without tiers. Equal shared tiers are one cache."""
    shared: dict[TierConfig, TierCache] = {}
    found: list[LowerTiers | None] = []
    for config in configs:
        caches = [shared.setdefault(tier, TierCache(tier)) if tier.shared else TierCache(tier) for tier in config.tiers]
        block_bytes = config.kv_bytes_per_token * config.block_tokens
        found.append(LowerTiers(caches, block_bytes, config.block_tokens / config.prefill_rate) if caches else None)
    return found


def overloaded(result: ReplayResult, arrivals_s: Sequence[float], prefill_s: float) -> list[int]:
    """Replicas that get more work than they can do, so that their queue grows until the end.

    A queue is the time until all requests that have arrived have their first token. It grows if its mean rises from
    the second quarter of the arrivals to the third and from there to the fourth, each time by ``MIN_GROWTH`` of the
    quarter's length, and it is never empty in the second half. ``prefill_s``: mean of a request, without cached tokens.
    """
    span_s = arrivals_s[-1] - arrivals_s[0] if arrivals_s else 0.0
    if span_s < MIN_SPAN_S:
        return []
    step_s, quarter = span_s / QUEUE_SAMPLES, QUEUE_SAMPLES // 4
    longest_s, rise_s = max(MIN_QUEUE_S, MIN_QUEUE_PREFILLS * prefill_s), MIN_GROWTH * span_s / 4
    found = []
    for index, queue_s in enumerate(_queues(result, arrivals_s, step_s)):
        means_s = [fmean(queue_s[start : start + quarter]) for start in range(quarter, QUEUE_SAMPLES, quarter)]
        rises = all(later_s - earlier_s >= rise_s for earlier_s, later_s in pairwise(means_s))
        if rises and means_s[-1] >= longest_s and min(queue_s[2 * quarter :]) > 0:
            found.append(index)
    return found


def _queues(result: ReplayResult, arrivals_s: Sequence[float], step_s: float) -> list[list[float]]:
    """Seconds of work queued at each replica, ``QUEUE_SAMPLES`` times."""
    free_s = [0.0] * result.replicas  # when all requests that have arrived have their first token
    queues: list[list[float]] = [[] for _ in free_s]
    samples, sample_s = 0, arrivals_s[0]
    for at_s, index, ttft_s in zip(arrivals_s, result.placements, result.ttft_s, strict=True):
        while sample_s <= at_s and samples < QUEUE_SAMPLES:
            for queue_s, until_s in zip(queues, free_s, strict=True):
                queue_s.append(max(0.0, until_s - sample_s))
            samples += 1
            sample_s = arrivals_s[0] + samples * step_s
        free_s[index] = max(free_s[index], at_s + ttft_s)
    return queues


def check_sizes(columns: Columns, config: FastEngineConfig) -> None:
    """RequestTooLargeError if a prompt and its output need more blocks than an engine has."""
    capacity = config.blocks * config.block_tokens
    for index, (prompt, output) in enumerate(zip(columns.prompt_tokens, columns.output_tokens, strict=True)):
        if prompt + output > capacity:
            needed = -(-(prompt + output) // config.block_tokens)
            raise RequestTooLargeError(
                f"request {index + 1} needs {needed} blocks of {config.block_tokens} tokens "
                f"({prompt} of prompt, {output} of output), and a replica has {config.blocks}"
            )


def _advance(engines: list[FastEngine], until_s: float) -> float:
    """Process every step that ends by ``until_s``; returns when the next one ends, infinite if all are idle."""
    while True:
        end_s, first = inf, engines[0]
        for engine in engines:
            if engine.end_s < end_s:
                end_s, first = engine.end_s, engine
        if end_s > until_s or end_s == inf:
            return end_s
        first.advance()


QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def report(result: ReplayResult, columns: Columns, first: int = 0) -> dict[str, Any]:
    """Results of the requests from number ``first`` on; None: no requests.

    Keys: ``requests``; ``token_hit_rate``, cached / prompt tokens; ``ttft_s``, from arrival to first token;
    ``hit_tokens``, cached tokens by cache tier; ``load_max_over_mean``, requests of the busiest replica / mean over
    replicas; ``load_cv``, their standard deviation / mean; ``work_max_over_mean``, busiest / mean of computed prompt
    tokens; ``replicas``, requests and hit rate of each. Independent of ``first``: ``evicted_blocks``, cached blocks
    that GPU caches dropped; ``ended_s``, end of the last request; ``overloaded_replicas``, whose queue grows until the
    end.
    """
    placed = result.placements[first:]
    prompts, cached = columns.prompt_tokens[first:], result.cached_tokens[first:]
    requests, queried, hit = ([0] * result.replicas for _ in range(3))
    for replica, prompt_tokens, cached_tokens in zip(placed, prompts, cached, strict=True):
        requests[replica] += 1
        queried[replica] += prompt_tokens
        hit[replica] += cached_tokens
    return {
        "requests": len(placed),
        "token_hit_rate": _ratio(sum(hit), sum(queried)),
        "hit_tokens": _hit_tokens(result, columns.block_tokens, first, sum(hit)),
        "request_hit_rate": _ratio(sum(1 for tokens in cached if tokens), len(placed)),
        "ttft_s": _summarize_ttft(sorted(result.ttft_s[first:])),
        "load_max_over_mean": _max_over_mean(requests),
        "load_cv": _ratio(pstdev(requests), fmean(requests)),
        "work_max_over_mean": _max_over_mean([a - b for a, b in zip(queried, hit, strict=True)]),
        "replicas": [
            {"requests": count, "token_hit_rate": _ratio(b, a)}
            for count, a, b in zip(requests, queried, hit, strict=True)
        ],
        "evicted_blocks": result.evicted_blocks,
        "ended_s": result.ended_s,
        "overloaded_replicas": len(result.overloaded),
    }


def _hit_tokens(result: ReplayResult, block_tokens: int, first: int, hit: int) -> dict[str, int]:
    """Cached tokens by tier; ``hit`` is their sum."""
    fetched = {tier: block_tokens * sum(blocks[first:]) for tier, blocks in result.fetched_blocks.items()}
    return {GPU: hit - sum(fetched.values()), **fetched}


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A header, a line for each report, by name, and a line for each that has overloaded replicas."""
    width = max([len("policy"), *map(len, rows)])
    tiers = list(dict.fromkeys(tier for row in rows.values() for tier in row["hit_tokens"] if tier != GPU))
    header = f"{'policy':<{width}} {'hit %':>7} {'mean s':>8} {'p50':>8} {'p95':>8} {'p99':>8} {'max/mean':>9}"
    lines = [header + "".join(f" {tier + ' %':>9}" for tier in tiers)]
    for name, row in rows.items():
        ttft = row["ttft_s"]
        ttfts = " ".join(_format_number(ttft[key], 8, 3) for key in ("mean", "p50", "p95", "p99"))
        hit = row["token_hit_rate"]
        hit_percent = _format_number(None if hit is None else 100 * hit, 7, 2)
        line = f"{name:<{width}} {hit_percent} {ttfts} {_format_number(row['load_max_over_mean'], 9, 2)}"
        percent_per_token = 100 * (hit or 0.0) / max(1, sum(row["hit_tokens"].values()))
        shares = [percent_per_token * row["hit_tokens"].get(tier, 0) for tier in tiers]
        lines.append(line + "".join(f" {share:9.2f}" for share in shares))
    for name, row in rows.items():
        if count := row["overloaded_replicas"]:
            replicas = len(row["replicas"])
            lines.append(f"{name}: overload: the queue of {count} of {replicas} replicas grows until the end")
    return lines


def quantile(ascending: Sequence[float], q: float) -> float | None:
    """Quantile ``q`` (0 to 1) by nearest rank; None without values."""
    if not ascending:
        return None
    return ascending[max(0, math.ceil(q * len(ascending)) - 1)]


def _summarize_ttft(ascending: Sequence[float]) -> dict[str, float | None]:
    mean = sum(ascending) / len(ascending) if ascending else None
    return {"mean": mean, **{name: quantile(ascending, q) for name, q in QUANTILES.items()}}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _max_over_mean(values: Sequence[int]) -> float | None:
    return _ratio(max(values) * len(values), sum(values))


def _format_number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"
