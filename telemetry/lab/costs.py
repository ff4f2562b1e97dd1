"""What prefix caching saves, and what it does not, as prefill time and money a day.

A cached token saves its prefill: ``1 / prefill rate`` seconds of a replica, which cost a share of the replica's price.
The fleet's bill falls only if fewer replicas are run; until then the saved time is room for more traffic. Prefill time
is taken as proportional to tokens, so long prompts, whose attention costs more for each token, save more than this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Annotated, Any

from msgspec import Meta

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Price:
    """What one replica costs. ``currency`` is a label."""

    gpu_hour: float
    gpus_per_replica: float
    currency: str

    @classmethod
    def of(cls, costs: Mapping[str, Any] | None) -> Price | None:
        """The price of a pool's ``costs`` settings; None: unknown."""
        return None if costs is None else cls(costs["gpu_hour_price"], costs["gpus_per_replica"], costs["currency"])

    @property
    def replica_day(self) -> float:
        """Money for one replica and day."""
        return self.replica_s * DAY_S

    @property
    def replica_s(self) -> float:
        """Money for one second of one replica."""
        return self.gpu_hour * self.gpus_per_replica / 3600


LEARNT_FITS = 144  # of a rate: one fit every ten minutes, for a day
RANGE_DEVIATIONS = 2.0  # of the logarithm of a fit, in either direction


@dataclass(frozen=True, slots=True)
class LearntRate:
    """A pool's prefill rate from many fits: the mean of the first ones, then a slowly moving mean of logarithms.

    One window's fit depends on its traffic, and figures that are compared over days should not.
    """

    tokens_per_s: float
    deviation: float  # standard deviation of the logarithm of one fit
    fits: int

    @classmethod
    def after(cls, earlier: LearntRate | None, fit: float, error: float) -> LearntRate:
        """The rate after one more fit, of a relative standard ``error``."""
        if earlier is None:
            return cls(fit, error, 1)
        gain = 1 / (min(earlier.fits, LEARNT_FITS) + 1)
        distance = log(fit / earlier.tokens_per_s)
        variance = (1 - gain) * (earlier.deviation**2 + gain * distance**2) + gain * error**2
        return cls(earlier.tokens_per_s * exp(gain * distance), sqrt(variance), earlier.fits + 1)


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """Tokens that a replica prefills in a second, and where the figure comes from. None: unknown."""

    tokens_per_s: float | None
    source: str  # a sentence; why it is unknown
    low: Annotated[float | None, Meta(description="of the range of hourly fits")] = None
    high: float | None = None

    @classmethod
    def of_fits(cls, tokens_per_s: float, source: str, deviation: float) -> PrefillRate:
        """The rate with its range; ``deviation``: of the logarithm of one fit."""
        reach = exp(RANGE_DEVIATIONS * deviation)
        return cls(tokens_per_s, source, tokens_per_s / reach, tokens_per_s * reach)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill of some tokens a day; None: unknown."""

    tokens: float | None
    replica_seconds: float | None
    money: float | None


def prefill_of(tokens: float | None, rate: float | None, price: Price | None) -> Prefill:
    """Time and money of some tokens."""
    seconds = tokens / rate if tokens is not None and rate else None
    return Prefill(tokens, seconds, seconds * price.replica_s if seconds is not None and price else None)
