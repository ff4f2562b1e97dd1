"""Finds drops of a pool's hit rate relative to the level since the last change.

Theory of operation. Every task group has a level (level.py). A bin's shortfall is the sum over the groups of what each
lies below its level, weighted by the part of the tokens that the group had before: traffic that moves from one group to
another moves no group's rate and is no drop; it is told apart as ``mix_points``. The test is a one-sided CUSUM (Page,
"Continuous inspection schemes", 1954) of the log-likelihood ratio between "a drop of ``drop`` began" and "the level
holds": S = max(0, S + drop * (shortfall - drop / 2) / variance), which is the sum of (mu - x) / sigma - k with k of
half the drop, in units that stay comparable when traffic, and with it sigma, changes. An alarm is S > h with
h = ln(bins between two false alarms): the mean run length of such a CUSUM is at least e^h (Lorden, "Procedures for
reacting to a change in distribution", 1971). One bin counts for a third of h at most, so no single bin alarms.

A drop began after the last bin with S = 0. While it lasts the levels stay as they were. It ends when the last minute is
back within half of ``drop``, or after ``accept_s``, when the lower rate becomes the level. A fall that is too small to
tell becomes the level at once; many of these are what the slow test on hours is for. A change that an operator makes (a
revision, a restart, a scale) is a candidate cause and no excuse: the levels from before it stay for ``SETTLE`` bins,
and only then are they estimated from the bins after it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from telemetry.alerts.detection.level import ENOUGH, Bin, GroupBin, Level, Noise, Sample

SETTLE = 30  # bins after an operator's change before levels forget what was before it
LATEST = 6  # bins that say how the rate is now
TELLING = 0.7  # of ``drop``: a smaller shortfall raises no alarm
OUTLIER = 1 / 3  # of h that one bin counts for at most
PRESENT = 0.3  # of the old mix: task groups with a level and traffic that a bin needs to count
MIX_MEMORY = 1 / 60  # weight of the newest bin in the usual mix
MIX_LATEST = 1 / 6  # and in the mix of now
GONE = 1e-4  # part of the tokens below which a task group that sends nothing is forgotten


class State(StrEnum):
    """What the detector knows."""

    LEARNING = "learning"  # too few bins for a level
    STEADY = "steady"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What to find, and how rarely to be wrong."""

    drop: float = 0.1  # ratio: the drop worth knowing
    bin_s: float = 10.0
    quiet_days: float = 70.0  # wanted mean time between two false alarms
    baseline_s: float = 3600.0  # the level is that of so long, or of the time since the last change
    accept_s: float = 3600.0  # a drop that lasts longer is the new level
    min_requests: float = 50.0  # that say how the rate is now, with
    min_tokens: float = 20_000.0

    @property
    def threshold(self) -> float:
        """h, in nats."""
        return math.log(max(self.quiet_days * 86_400 / self.bin_s, 10.0))

    @property
    def most_bins(self) -> int:
        """Bins of a level."""
        return max(int(self.baseline_s / self.bin_s), ENOUGH)


@dataclass(frozen=True, slots=True)
class GroupShortfall:
    """A task group's part of a drop."""

    group: str
    share: float  # of the tokens before the drop
    level: float
    ratio: float  # since the onset

    @property
    def points(self) -> float:
        """Of the pool's drop, as a ratio."""
        return self.share * (self.level - self.ratio)


@dataclass(frozen=True, slots=True)
class GroupShare:
    """A task group's part of the tokens, usually and in the last bins."""

    group: str
    usual: float
    now: float


@dataclass(frozen=True, slots=True)
class Detection:
    """What is known after a bin. Ratios are 0 to 1, at the mix of before; None is unknown."""

    at: datetime
    state: State
    level: float | None = None
    ratio: float | None = None  # since the onset, or of the last minute
    onset: datetime | None = None  # the end of the last bin in which nothing pointed to a drop
    since: datetime | None = None  # the change that the level counts from
    score: float = 0.0  # S / h
    noise: float | None = None  # standard deviation of a bin's shortfall
    prompt: float = 0.0  # tokens since the onset, or of the last minute
    requests: float = 0.0
    groups: tuple[GroupShortfall, ...] = ()  # the largest part of the drop first
    mix: float = 0.0  # ratio by which the pool's hit rate moved only because the mix of task groups did
    mix_since: datetime | None = None
    shares: tuple[GroupShare, ...] = ()  # while the mix is another one; the largest change first

    @property
    def shortfall(self) -> float:
        """How far the rate lies below the level."""
        return 0.0 if self.level is None or self.ratio is None else self.level - self.ratio


class _Group:
    """A task group's level, mix and sums since the onset."""

    __slots__ = ("below", "excess", "level", "now", "prompt", "usual", "weighted")

    def __init__(self, most: int) -> None:
        self.level = Level(most)
        self.usual = self.now = 0.0  # part of the tokens: usually, and in the last bins
        self.below = 0.0  # its own CUSUM
        self.excess = 0  # bins that it has been below for
        self.weighted = self.prompt = 0.0  # tokens times ratio, and tokens, since the onset


class Detector:
    """Takes bins in order of time; ``detection`` is what is known after the last one."""

    def __init__(self, sensitivity: Sensitivity) -> None:
        self.sensitivity = sensitivity
        self.detection: Detection | None = None
        self._groups: dict[str, _Group] = {}
        self._noise = Noise(sensitivity.most_bins)
        self._changes: list[datetime] = []
        self._score = 0.0
        self._steady_until: datetime | None = None  # the end of the last bin with S = 0
        self._since: datetime | None = None
        self._down_since: datetime | None = None
        self._mix_since: datetime | None = None
        self._latest: deque[tuple[float, float, float]] = deque(
            maxlen=sensitivity.most_bins
        )  # shortfall, tokens, requests
        self._after: deque[tuple[float, float, float]] = deque(maxlen=sensitivity.most_bins)  # the same since the onset
        self._deviations: deque[float] = deque(maxlen=sensitivity.most_bins)  # of the bins since the onset
        self._level = 0.0

    def add(self, one: Bin, changes: Iterable[datetime] = ()) -> Detection:
        """Take in the next bin; ``changes`` are operators' that happened since the one before."""
        self._changes += [at for at in changes if at not in self._changes]
        samples = self._samples(one)
        found = self._shortfall(samples)
        if found is not None:
            self._step(one, *found)
        self._mix(one)
        self._take(samples, one.end)
        self._settle(one.end)
        self.detection = self._told(one)
        return self.detection

    # --- one bin ---

    def _samples(self, one: Bin) -> dict[str, Sample]:
        found = {}
        for name, group in one.groups.items():
            if group.prompt > 0:
                self._groups.setdefault(name, _Group(self.sensitivity.most_bins))
                found[name] = Sample(group.ratio, _requests(group))
        return found

    def _shortfall(self, samples: Mapping[str, Sample]) -> tuple[float, float, float] | None:
        """The weighted sum of the groups' shortfalls, its variance and what it may be off because levels are estimates.

        None where too little of the mix is there.
        """
        parts = [
            (self._groups[name], sample)
            for name, sample in samples.items()
            if self._groups[name].level.ratio is not None
        ]
        known = sum(group.usual for group in self._groups.values()) or 1.0
        weight = sum(group.usual for group, _ in parts)
        if weight < PRESENT * known:
            return None
        short = variance = self._level = 0.0
        for group, sample in parts:
            share = group.usual / weight
            level = group.level.ratio or 0.0
            self._level += share * level
            short += share * (level - sample.ratio)
            variance += share**2 * group.level.variance(sample.requests)
        doubt = sum((group.usual / weight) ** 2 * group.level.doubt for group, _ in parts)
        return short, variance, doubt**0.5

    def _step(self, one: Bin, short: float, variance: float, doubt: float) -> None:
        drop, most = self.sensitivity.drop, self.sensitivity.threshold * OUTLIER
        gain = drop * (short - doubt - drop / 2) / (variance * self._noise.factor)
        self._score = max(self._score + min(max(gain, -most), most), 0.0) if self._down_since is None else self._score
        figures = (short, one.prompt, one.requests)
        self._latest.append(figures)
        while len(self._latest) > LATEST and self._is_enough(list(self._latest)[1:]):
            self._latest.popleft()
        if self._down_since is None and self._score == 0.0:
            self._steady_until = one.end
            self._clear_sums()
            self._noise.add([*self._deviations, short / variance**0.5])
            self._deviations.clear()
        else:
            self._after.append(figures)
            self._deviations.append(short / variance**0.5)
            self._add_sums(one)
        self._decide(one.end)

    def _is_enough(self, parts: list[tuple[float, float, float]]) -> bool:
        tokens, requests = sum(part[1] for part in parts), sum(part[2] for part in parts)
        return tokens >= self.sensitivity.min_tokens and requests >= self.sensitivity.min_requests

    def _decide(self, now: datetime) -> None:
        threshold = self.sensitivity.threshold
        if self._down_since is not None:
            if _mean(self._latest) < self.sensitivity.drop / 2:
                self._end_drop(now, accept=False)
            elif (now - self._down_since).total_seconds() >= self.sensitivity.accept_s:
                self._end_drop(now, accept=True)
        elif self._score > threshold:
            latest = list(self._latest)[-3:]
            if max(_mean(self._after), _mean(latest)) >= TELLING * self.sensitivity.drop:
                self._down_since = now
            elif self._score > 2 * threshold:
                self._restart(now)

    def _end_drop(self, now: datetime, *, accept: bool) -> None:
        if accept:
            self._restart(now)
        self._deviations.clear()
        for group in self._groups.values():
            group.level.forget_held()
            group.below, group.excess = 0.0, 0
        self._down_since, self._score, self._steady_until = None, 0.0, now
        self._clear_sums()

    def _restart(self, now: datetime) -> None:
        """The bins since the onset are the new level."""
        for group in self._groups.values():
            group.level.restart()
            group.below, group.excess = 0.0, 0
        self._noise.forget()
        self._since, self._score, self._steady_until = self._steady_until, 0.0, now
        self._clear_sums()

    # --- levels ---

    def _take(self, samples: Mapping[str, Sample], now: datetime) -> None:
        for name, sample in samples.items():
            group = self._groups[name]
            self._watch(group, sample)
            hold = self._down_since is not None or self._score > 0 or group.below > 0
            if group.level.add(sample, self.sensitivity.drop, self._noise.factor, hold=hold):
                self._since = now
                self._noise.forget()

    def _watch(self, group: _Group, sample: Sample) -> None:
        """The group's own CUSUM: while it is below its level, its bins are held back, though not for good."""
        level = group.level.ratio
        if level is None or self._down_since is not None:
            return
        drop, most = self.sensitivity.drop, self.sensitivity.threshold * OUTLIER
        gain = drop * (level - sample.ratio - drop / 2) / (group.level.variance(sample.requests) * self._noise.factor)
        group.below = min(max(group.below + min(gain, most), 0.0), 3 * self.sensitivity.threshold)
        group.excess = group.excess + 1 if group.below else 0
        if group.excess * self.sensitivity.bin_s >= self.sensitivity.accept_s:
            group.level.restart()
            group.below, group.excess = 0.0, 0

    def _settle(self, now: datetime) -> None:
        """Forget what was before an operator's change that is old enough and did no harm."""
        if self._down_since is not None or self._score > 0:
            return
        grace = timedelta(seconds=SETTLE * self.sensitivity.bin_s)
        due = [at for at in self._changes if now - at >= grace]
        if due:
            self._changes = [at for at in self._changes if at not in due]
            self._since = max(due)
            for group in self._groups.values():
                group.level.keep_latest(SETTLE)

    # --- mix ---

    def _mix(self, one: Bin) -> None:
        total = one.prompt
        if not total:
            return
        is_first = not any(group.usual for group in self._groups.values())
        for name, group in self._groups.items():
            share = one.groups[name].prompt / total if name in one.groups else 0.0
            group.now += (1.0 if is_first else MIX_LATEST) * (share - group.now)
            if self._down_since is None and self._score == 0.0:
                group.usual += (1.0 if is_first else MIX_MEMORY) * (share - group.usual)
        self._groups = {
            name: group
            for name, group in self._groups.items()
            if max(group.now, group.usual) > GONE or name in one.groups
        }
        limit = self.sensitivity.drop
        if abs(self._moved()) < limit / 2:
            self._mix_since = None
        elif abs(self._moved()) >= limit:
            self._mix_since = self._mix_since or one.end

    def _moved(self) -> float:
        """By how much the new mix would move the pool's rate, all groups at their levels."""
        return sum((group.now - group.usual) * (group.level.ratio or 0.0) for group in self._groups.values())

    # --- what is told ---

    def _add_sums(self, one: Bin) -> None:
        for name, group in one.groups.items():
            known = self._groups[name]
            known.weighted += group.prompt * group.ratio
            known.prompt += group.prompt

    def _clear_sums(self) -> None:
        self._after.clear()
        for group in self._groups.values():
            group.weighted = group.prompt = 0.0

    def _told(self, one: Bin) -> Detection:
        if not any(group.level.ratio is not None for group in self._groups.values()):
            return Detection(one.end, State.LEARNING, prompt=one.prompt, requests=one.requests)
        is_down = self._down_since is not None
        parts = self._after if is_down else self._latest
        return Detection(
            at=one.end,
            state=State.DOWN if is_down else State.STEADY,
            level=self._level,
            ratio=min(max(self._level - _mean(parts), 0.0), 1.0),
            onset=self._steady_until if self._after else None,
            since=self._since,
            score=self._score / self.sensitivity.threshold,
            noise=self._spread(one),
            prompt=sum(part[1] for part in parts),
            requests=sum(part[2] for part in parts),
            groups=self._shares() if is_down else (),
            mix=self._moved(),
            mix_since=self._mix_since,
            shares=self._changed_shares() if self._mix_since else (),
        )

    def _changed_shares(self) -> tuple[GroupShare, ...]:
        found = [GroupShare(name, group.usual, group.now) for name, group in self._groups.items()]
        return tuple(sorted(found, key=lambda one: abs(one.now - one.usual), reverse=True))

    def _spread(self, one: Bin) -> float | None:
        found = self._shortfall(self._samples(one))
        return None if found is None else (found[1] * self._noise.factor) ** 0.5

    def _shares(self) -> tuple[GroupShortfall, ...]:
        found = [
            GroupShortfall(name, group.usual, group.level.ratio, group.weighted / group.prompt)
            for name, group in self._groups.items()
            if group.prompt and group.level.ratio is not None
        ]
        return tuple(sorted(found, key=lambda one: one.points, reverse=True))


def _requests(group: GroupBin) -> float:
    return max(group.requests, 1.0)


def _mean(parts: Iterable[tuple[float, float, float]]) -> float:
    """The shortfall of several bins, each with the weight of its tokens."""
    known = list(parts)
    tokens = sum(part[1] for part in known)
    return sum(part[0] * part[1] for part in known) / tokens if tokens else 0.0
