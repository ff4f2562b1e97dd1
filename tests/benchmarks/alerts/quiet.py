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
GROUPS = {"chat": (0.4, 0.75), "coding": (0.35, 0.8), "support": (0.25, 0.65)}  # part of the requests, hit rate
SPREAD = 0.5  # of m (1 - m): variance of one request's hit rate
TOKENS, TOKENS_SPREAD = 1600.0, 0.5  # of a prompt, and its coefficient of variation
NEIGHBOURS, SHAKE = 0.5, 0.006  # correlation of bins, and what they shake by together
WANDER_BINS, WANDER = 180.0, 0.01
CYCLE = 0.025  # of hit rates, either way
DEPLOYS = 20


def alarms_in_week(seed: int, days: int = 7) -> int:
    """Number of false alarms in one week, or in its first days."""
    rng, detector = random.Random(f"quiet {seed}"), Detector(Sensitivity(bin_s=BIN_S))
    deploys = {rng.randrange(WEEK_BINS) for _ in range(DEPLOYS)}
    rate = rng.choice((3.0, 8.0, 20.0))
    shake = wander = 0.0
    alarms, before = 0, State.STEADY
    for number in range(1, days * DAY_BINS + 1):
        shake = NEIGHBOURS * shake + math.sqrt(1 - NEIGHBOURS**2) * rng.gauss(0, SHAKE)
        wander += -wander / WANDER_BINS + math.sqrt(2 / WANDER_BINS) * rng.gauss(0, WANDER)
        second = number * BIN_S
        groups = _groups(rng, rate * _daily(second), shake + wander + CYCLE * math.sin(2 * math.pi * second / DAY_S))
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


def _groups(rng: random.Random, rate: float, moved: float) -> dict[str, GroupBin]:
    found = {}
    for name, (part, ratio) in GROUPS.items():
        mean = rate * BIN_S * part
        count = round(max(rng.gauss(mean, math.sqrt(mean)), 0.0)) if mean else 0
        if count:
            middle = min(max(ratio + moved, 0.02), 0.98)
            sigma = math.sqrt(SPREAD * middle * (1 - middle) * (1 + TOKENS_SPREAD**2) / count)
            prompt = TOKENS * count
            found[name] = GroupBin(prompt, min(max(rng.gauss(middle, sigma), 0.0), 1.0) * prompt, count)
    return found
