"""Finds a slow decline: a CUSUM on hours, each compared with the same hour of the days before.

The fast test forgets what fell too little to tell. Here an hour's shortfall is the median of the same hour of the days
before the decline could begin, less its own rate; the noise is what those days differ by among themselves. Hours of too
little traffic say nothing. The threshold is that of an alarm in ``quiet_days``, in hours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
LOOKED_AT = 24  # hours that are tested
MIN_DAYS = 3  # with the same hour
LEAST_SIGMA = 0.02
LEAST_HOURS = 3  # that an alarm rests on
MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True)
class Decline:
    """A decline that has not ended: its hours' mean beside what is usual at these hours."""

    level: float
    ratio: float
    onset: datetime
    days: int
    tokens: float
    requests: float


@dataclass(frozen=True, slots=True)
class Hour:
    """A whole hour's hit rate and traffic."""

    ratio: float
    tokens: float
    requests: float


def find_decline(
    hours: Mapping[datetime, Hour], now: datetime, *, drop: float, days: int, quiet_days: float
) -> Decline | None:
    """The decline that lasts until the newest whole hour; None where there is none, or too little is known."""
    last = now.replace(minute=0, second=0, microsecond=0) - HOUR
    rows = [
        (at, hours[at], usual)
        for at in (last - HOUR * back for back in range(LOOKED_AT - 1, -1, -1))
        if at in hours and len(usual := _usual(hours, at, days)) >= MIN_DAYS
    ]
    if not rows:
        return None
    sigma = _sigma([usual for _, _, usual in rows])
    threshold = math.log(max(quiet_days * 24.0, 10.0))
    score, since = 0.0, 0
    for place, (_, hour, usual) in enumerate(rows):
        gain = drop * (statistics.median(usual) - hour.ratio - drop / 2) / sigma**2
        score = max(score + min(gain, threshold / LEAST_HOURS), 0.0)
        since = place + 1 if score == 0.0 else since
    fallen = rows[since:]
    if score <= threshold or len(fallen) < LEAST_HOURS:
        return None
    return _decline(fallen)


def _usual(hours: Mapping[datetime, Hour], at: datetime, days: int) -> list[float]:
    """The same hour of the days before; the day before alone could be part of the decline."""
    found = (hours.get(at - DAY * back) for back in range(1, days + 1))
    return [one.ratio for one in found if one is not None]


def _sigma(several: Sequence[Sequence[float]]) -> float:
    off = [abs(ratio - statistics.median(usual)) for usual in several for ratio in usual]
    return max(MAD_TO_SIGMA * statistics.median(off), LEAST_SIGMA)


def _decline(fallen: Sequence[tuple[datetime, Hour, list[float]]]) -> Decline:
    tokens = sum(hour.tokens for _, hour, _ in fallen)
    return Decline(
        level=sum(statistics.median(usual) * hour.tokens for _, hour, usual in fallen) / tokens,
        ratio=sum(hour.ratio * hour.tokens for _, hour, _ in fallen) / tokens,
        onset=fallen[0][0],
        days=min(len(usual) for _, _, usual in fallen),
        tokens=tokens,
        requests=sum(hour.requests for _, hour, _ in fallen),
    )
