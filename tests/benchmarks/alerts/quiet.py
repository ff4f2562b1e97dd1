"""Quiet pool-weeks: bins drawn from a model, because playing a week takes three million requests.

Hit rates, their variance per request and the correlation of adjacent bins match the quiet ten minutes before the
incidents. Added are a daily cycle of traffic (a tenth at night, none for two hours) and of hit rates (5 points), a
slow drift of 1 point over half an hour, and twenty deployments a week that change nothing.
"""

from __future__ import annotations

import math
import random
from datetime import timedelta

from telemetry.alerts.detection import Bin, Detector, GroupBin, Sensitivity, State
from tests.telemetry.causes.fleet import T0

BIN_S = 10.0
DAY_BINS = 8640
WEEK_BINS = 7 * DAY_BINS
DAY_S = 86_400.0
GROUPS = {"chat": (0.4, 0.75), "coding": (0.35, 0.8), "support": (0.25, 0.65)}  # share of the requests, hit rate
SPREAD = 0.5  # of m (1 - m): variance of one request's hit rate
TOKENS, TOKENS_SPREAD = 1600.0, 0.5  # of a prompt, and its coefficient of variation
CORRELATION, NOISE = 0.5, 0.006  # of adjacent bins; standard deviation of noise that all groups share
DRIFT_BINS, DRIFT = 180.0, 0.01
CYCLE = 0.025  # amplitude of the daily cycle of hit rates
DEPLOYS = 20


def alarms_in_week(seed: int, days: int = 7) -> int:
    """Number of false alarms in one week, or in its first days."""
    rng, detector = random.Random(f"quiet {seed}"), Detector(Sensitivity(bin_s=BIN_S))
    deploys = {rng.randrange(WEEK_BINS) for _ in range(DEPLOYS)}
    rate = rng.choice((3.0, 8.0, 20.0))
    noise = drift = 0.0
    alarms, before = 0, State.STEADY
    for number in range(1, days * DAY_BINS + 1):
        noise = CORRELATION * noise + math.sqrt(1 - CORRELATION**2) * rng.gauss(0, NOISE)
        drift += -drift / DRIFT_BINS + math.sqrt(2 / DRIFT_BINS) * rng.gauss(0, DRIFT)
        second = number * BIN_S
        groups = _groups(rng, rate * _daily(second), noise + drift + CYCLE * math.sin(2 * math.pi * second / DAY_S))
        at = T0 + timedelta(seconds=second)
        state = detector.add(Bin(at, groups), [at] if number in deploys else ()).state
        alarms += state is State.DOWN is not before
        before = state
    return alarms


def _daily(second: float) -> float:
    """Traffic by hour, with a night and two hours without requests."""
    hour = second / 3600 % 24
    if 2 <= hour < 4:
        return 0.0
    return max(0.55 - 0.45 * math.cos(2 * math.pi * (hour - 3) / 24), 0.1)


def _groups(rng: random.Random, rate: float, shift: float) -> dict[str, GroupBin]:
    bins = {}
    for name, (share, ratio) in GROUPS.items():
        mean = rate * BIN_S * share
        count = round(max(rng.gauss(mean, math.sqrt(mean)), 0.0)) if mean else 0
        if count:
            center = min(max(ratio + shift, 0.02), 0.98)
            sigma = math.sqrt(SPREAD * center * (1 - center) * (1 + TOKENS_SPREAD**2) / count)
            prompt = TOKENS * count
            bins[name] = GroupBin(prompt, min(max(rng.gauss(center, sigma), 0.0), 1.0) * prompt, count)
    return bins
