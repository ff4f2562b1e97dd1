"""The detector's settings, and its result after a bin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from telemetry.alerts.detection.level import MIN_LEVEL_BINS


class State(StrEnum):
    """State of the detector."""

    LEARNING = "learning"  # too few bins for a level
    STEADY = "steady"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Size of a drop to find, and the target rate of false alarms."""

    drop: float = 0.1  # ratio: size of a drop to report
    bin_s: float = 10.0
    quiet_days: float = 70.0  # target mean time between two false alarms
    baseline_s: float = 3600.0  # period of the level, or the time since the last change if shorter
    accept_s: float = 3600.0  # a drop that lasts longer becomes the level
    min_requests: float = 50.0  # minimum for the current rate, with
    min_tokens: float = 20_000.0

    @property
    def threshold(self) -> float:
        """Score in nats (log-likelihood ratio) at which the CUSUM reports a drop."""
        return math.log(max(self.quiet_days * 86_400 / self.bin_s, 10.0))

    @property
    def max_bins(self) -> int:
        """Largest number of bins from which a level is estimated."""
        return max(int(self.baseline_s / self.bin_s), MIN_LEVEL_BINS)


@dataclass(frozen=True, slots=True)
class GroupShortfall:
    """Contribution of a task group to a drop."""

    group: str
    share: float  # of the tokens before the drop
    share_now: float  # of the tokens since the change point
    level: float
    ratio: float  # since the change point

    @property
    def contribution(self) -> float:
        """Contribution to the pool's drop, as a ratio."""
        return self.share * (self.level - self.ratio)


@dataclass(frozen=True, slots=True)
class GroupShare:
    """A task group's share of the tokens, usually and in the last bins."""

    group: str
    usual: float
    current: float


@dataclass(frozen=True, slots=True)
class Detection:
    """Result after a bin. Ratios are 0 to 1, at the mix before the drop; None is unknown."""

    at: datetime
    state: State
    level: float | None = None
    # since the change point, or of the last minute; None if too little of the usual mix had traffic for a minute
    ratio: float | None = None
    change_point: datetime | None = None  # the start of the first bin since S was 0
    steady_until: datetime | None = None  # the end of the last bin before it
    since: datetime | None = None  # the change that the level starts at
    comparable_since: datetime | None = None  # from then to ``steady_until`` nothing else was wrong
    worsened: bool = False  # there was a second fall during the drop; the change point is that of the second one
    score: float = 0.0  # S / h
    noise: float | None = None  # standard deviation of a bin's shortfall
    prompt: float = 0.0  # tokens since the change point, or of the last minute
    requests: float = 0.0
    groups: tuple[GroupShortfall, ...] = ()  # the largest contribution first
    mix: float = 0.0  # change of the pool's hit rate that the mix of task groups alone causes
    mix_since: datetime | None = None
    shares: tuple[GroupShare, ...] = ()  # while the mix has changed; the largest change first

    @property
    def shortfall(self) -> float:
        """How far the rate is below the level."""
        return 0.0 if self.level is None or self.ratio is None else self.level - self.ratio
