"""Draws the bins of a canary and a baseline at random: requests, cached tokens and latencies per minute."""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from telemetry.guards.analysis import Bin
from telemetry.metrics.histograms import ROUTER_EDGES, Buckets

T0 = datetime(2026, 3, 2, 10, tzinfo=UTC)


class Truth(NamedTuple):
    requests: int
    hit_rate: float
    ttft_s: float
    error_ratio: float
    unrest: float
    streamed_ratio: float
    plain_s: float


def minutes(
    seed: int,
    count: int,
    *,
    requests: int = 60,
    hit_rate: float = 0.6,
    ttft_s: float = 0.3,
    error_ratio: float = 0.0,
    unrest: float = 0.3,
    streamed_ratio: float = 1.0,
    plain_s: float = 4.0,
) -> list[Bin]:
    """``count`` bins; ``unrest`` is how much the traffic's mix changes from minute to minute (0: not at all)."""
    rng = random.Random(seed)
    truth = Truth(requests, hit_rate, ttft_s, error_ratio, unrest, streamed_ratio, plain_s)
    return [_minute(rng, T0 + timedelta(minutes=number), truth) for number in range(count)]


def _minute(rng: random.Random, start: datetime, truth: Truth) -> Bin:
    warm = min(max(rng.gauss(truth.hit_rate, truth.unrest * truth.hit_rate * (1 - truth.hit_rate)), 0.0), 1.0)
    count = max(round(rng.gauss(truth.requests, math.sqrt(truth.requests))), 1)
    prompt = cached = failed = 0
    waits: Counter[int] = Counter()
    plain: Counter[int] = Counter()
    for _ in range(count):
        tokens = round(rng.lognormvariate(7.0, 0.8))
        prompt += tokens
        cached += tokens if rng.random() < warm else 0
        failed += rng.random() < truth.error_ratio
        drawn = rng.lognormvariate(0, 0.6)
        if truth.streamed_ratio == 1 or rng.random() < truth.streamed_ratio:
            waits[bisect.bisect_left(ROUTER_EDGES, truth.ttft_s * drawn)] += 1
        else:
            plain[bisect.bisect_left(ROUTER_EDGES, truth.plain_s * drawn)] += 1
    timed = (Buckets(ROUTER_EDGES, dict(counts)) if counts else None for counts in (waits, plain))
    return Bin(start, count, count, failed, prompt, cached, *timed)
