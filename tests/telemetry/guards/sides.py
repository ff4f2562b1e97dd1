"""Draws the requests of a canary and a baseline at random, minute by minute."""

from __future__ import annotations

from typing import Any

import numpy as np

from telemetry.guards.analysis import Measured, Requests, Side

PROMPTS = 100  # of a side


def minutes(
    seed: int,
    count: int,
    *,
    requests: int = 60,
    hit_rate: float = 0.6,
    ttft_s: float = 0.3,
    error_ratio: float = 0.0,
    unrest: float = 0.05,
    streamed_ratio: float = 1.0,
    plain_s: float = 4.0,
    prompts: int = PROMPTS,
    first_prompt: int = 0,
) -> Requests:
    """``count`` minutes; ``unrest`` is how far the hit rate changes from minute to minute."""
    rng = np.random.default_rng(seed)
    bins = np.repeat(np.arange(count), rng.poisson(requests, count))
    size = len(bins)
    warm = hit_rate + rng.normal(0, unrest, count)[bins] if count else np.zeros(0)
    tokens = np.rint(rng.lognormal(7.0, 0.8, size))
    drawn = rng.lognormal(0, 0.6, size)
    is_streamed = rng.random(size) < streamed_ratio
    return Requests(
        bins,
        first_prompt + rng.integers(0, prompts, size),
        np.ones(size),
        (rng.random(size) < error_ratio) * 1.0,
        tokens,
        tokens * (rng.random(size) < warm),
        np.where(is_streamed, ttft_s * drawn, np.nan),
        np.where(is_streamed, np.nan, plain_s * drawn),
    )


def nothing() -> Requests:
    return minutes(0, 0)


def two_sides(seed: int, count: int, *, canary: Any = None, baseline: Any = None, past: bool = False) -> Measured:
    """A canary and a baseline, whose prompts are others; with ``past``, after an hour without the canary's effect."""
    ours, theirs = {"first_prompt": PROMPTS, **(canary or {})}, baseline or {}
    usual = {name: value for name, value in theirs.items() if name in {"requests", "unrest"}}
    canary_past, baseline_past = (
        minutes(seed + offset, 60 if past else 0, **usual, first_prompt=first)
        for offset, first in ((20_000, PROMPTS), (30_000, 0))
    )
    return Measured(
        Side(minutes(seed, count, **ours), canary_past), Side(minutes(seed + 10_000, count, **theirs), baseline_past)
    )
