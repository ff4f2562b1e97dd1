"""Finds drops of a pool's hit rate relative to the level since the last change.

Theory of operation. Every task group has a level (level.py). The shortfall of a bin is the sum over the task groups of
how far each is below its level, weighted by the group's earlier share of the tokens. Traffic that moves from one group
to another changes no group's rate and is no drop; it is reported separately as ``mix``. The test is a one-sided CUSUM
(Page, "Continuous inspection schemes", 1954) of the log-likelihood ratio between "a drop of ``drop`` began" and "the
level holds": S = max(0, S + drop * (shortfall - drop / 2) / variance). That is the sum of (mu - x) / sigma - k with k
of half the drop, in units that stay comparable when traffic, and with it sigma, changes. An alarm is S > h with h =
ln(bins between two false alarms): the mean run length of such a CUSUM is at least e^h (Lorden, "Procedures for reacting
to a change in distribution", 1971). One bin counts for a third of h at most, so no single bin alarms.

The change point of a drop is the start of the first bin since S was 0. While a drop lasts, levels do not change. A drop
ends when the last minute is back within half of ``drop``, after ``accept_s``, when the lower rate becomes the level, or
when the usual task groups have had no traffic for two minutes. While it lasts, the same test relative to the rate
during the drop finds a second fall (``worsened``), with a change point of its own. A fall too small to
detect becomes the level at once; the slow test on hours finds many of these in a row. A change by an operator (a
revision, a restart, a scale-out) is a candidate cause and does not reset the test: levels from before the change are
used for ``BINS_AFTER_CHANGE`` bins, and only then are estimated from the bins after the change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from telemetry.alerts.detection.level import MIN_LEVEL_BINS, Bin, Level, Noise, Sample

BINS_AFTER_CHANGE = 30  # bins after an operator's change before levels forget the bins before it
BINS_OF_DROP = 30  # latest bins of a drop that its rate is computed from, to find a second fall
RISE_SIGMAS = 3.0  # standard deviations by which the latest bins of a drop must be above its earlier ones
LATEST = 6  # bins that the current rate is computed from
ALARM_SHARE = 0.7  # of ``drop``: a smaller shortfall raises no alarm
OUTLIER = 1 / 3  # of h: the most that one bin counts for
MOST_UNCOMPARED = 12  # bins in a row without the usual mix, after which a drop ends and the mix is learnt again
PRESENT = 0.3  # of the usual mix: a bin counts if task groups with a level and this share have traffic
MIX_MEMORY = 1 / 60  # weight of the newest bin in the usual mix
MIX_LATEST = 1 / 6  # weight of the newest bin in the current mix
FORGOTTEN = 1e-4  # share of the tokens below which a task group without traffic is removed


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


_Figures = tuple[float, float, float]  # of a bin: shortfall, tokens, requests


class _Group:
    """A task group's level, share of the traffic, and sums since the change point."""

    __slots__ = ("bins_below", "current", "level", "prompt", "score", "usual", "weighted")

    def __init__(self, most: int) -> None:
        self.level = Level(most)
        self.usual = self.current = 0.0  # share of the tokens: usually, and in the last bins
        self.score = 0.0  # its own CUSUM
        self.bins_below = 0  # number of bins since ``score`` rose above 0
        self.weighted = self.prompt = 0.0  # tokens times ratio, and tokens, since the change point


class Detector:
    """Consumes bins in order of time; ``detection`` is the result after the last one."""

    def __init__(self, sensitivity: Sensitivity) -> None:
        self.sensitivity = sensitivity
        self.detection: Detection | None = None
        self._groups: dict[str, _Group] = {}
        self._noise = Noise(sensitivity.max_bins)
        self._changes: list[datetime] = []
        self._score = 0.0
        self._second_score = 0.0  # of the test for a second fall during a drop
        self._worsened = False
        self._uncompared = 0  # bins in a row that had traffic and were not compared
        self._change_point: datetime | None = None
        self._comparable_since: datetime | None = None
        self._compared_until: datetime | None = None  # the end of the last bin that was compared with a level
        self._steady_until: datetime | None = None  # the end of the last bin with S = 0
        self._since: datetime | None = None
        self._down_since: datetime | None = None
        self._mix_since: datetime | None = None
        self._bins = 0  # with traffic
        # of the latest bins, and of the bins since the change point
        self._latest: deque[_Figures] = deque(maxlen=sensitivity.max_bins)
        self._after: deque[_Figures] = deque(maxlen=sensitivity.max_bins)
        self._during: deque[_Figures] = deque(maxlen=BINS_OF_DROP)  # of the bins of a drop before a second fall
        self._second_fall: list[tuple[_Figures, Bin]] = []  # the bins since ``_second_score`` rose above 0
        self._deviations: deque[float] = deque(maxlen=sensitivity.max_bins)  # of the bins since the change point
        self._level = 0.0

    def add(self, hit_bin: Bin, changes: Iterable[datetime] = ()) -> Detection:
        """Consume the next bin; ``changes`` are the times of operators' changes since the previous bin."""
        self._changes += [at for at in changes if at not in self._changes]
        samples = self._samples(hit_bin)
        shortfall = self._shortfall(samples)
        if shortfall is not None:
            self._step(hit_bin, *shortfall)
            self._compared_until, self._uncompared = hit_bin.end, 0
        elif samples:
            self._uncompared += 1
            if self._uncompared == MOST_UNCOMPARED and (self._down_since or self._score):
                self._end_drop(hit_bin.end, accept=False)
                self._latest.clear()
        self._update_mix(hit_bin)
        self._update_levels(samples, hit_bin.end)
        self._forget_bins_before_change(hit_bin.end)
        self.detection = self._detection(hit_bin)
        return self.detection

    def _samples(self, hit_bin: Bin) -> dict[str, Sample]:
        samples = {}
        for name, group in hit_bin.groups.items():
            if group.prompt > 0:
                self._groups.setdefault(name, _Group(self.sensitivity.max_bins))
                samples[name] = Sample(group.ratio, max(group.requests, 1.0))
        return samples

    def _shortfall(self, samples: Mapping[str, Sample]) -> tuple[float, float, float] | None:
        """The weighted sum of the groups' shortfalls, its variance, and its error because levels are estimates.

        None where too little of the usual mix has traffic.
        """
        groups = ((self._groups[name], sample) for name, sample in samples.items())
        parts = [(group, sample) for group, sample in groups if group.level.ratio is not None]
        total = sum(group.usual for group in self._groups.values()) or 1.0
        weight = sum(group.usual for group, _ in parts)
        if weight < PRESENT * total:
            return None
        short = variance = self._level = 0.0
        for group, sample in parts:
            share = group.usual / weight
            level = group.level.ratio or 0.0
            self._level += share * level
            short += share * (level - sample.ratio)
            variance += share**2 * group.level.variance(sample.requests)
        level_variance = sum((group.usual / weight) ** 2 * group.level.level_variance for group, _ in parts)
        return short, variance, level_variance**0.5

    def _step(self, hit_bin: Bin, short: float, variance: float, level_error: float) -> None:
        figures = (short, hit_bin.prompt, hit_bin.requests)
        self._latest.append(figures)
        while len(self._latest) > LATEST and self._is_enough(list(self._latest)[1:]):
            self._latest.popleft()
        if self._down_since is None:
            self._score = self._next_score(self._score, short - level_error, variance)
        if self._down_since is None and self._score == 0.0:
            self._steady_until = hit_bin.end
            self._clear_sums()
            self._noise.add([*self._deviations, short / variance**0.5])
            self._deviations.clear()
        else:
            self._change_point = self._change_point if self._after else self._start_of(hit_bin)
            self._after.append(figures)
            self._deviations.append(short / variance**0.5)
            self._add_sums(hit_bin)
        if self._down_since is not None:
            self._test_second_fall(hit_bin, figures, variance)
        self._decide(hit_bin.end)

    def _gain(self, short: float, variance: float) -> float:
        """What a bin adds to a CUSUM: the log-likelihood ratio, limited so that no single bin alarms."""
        drop = self.sensitivity.drop
        return min(drop * (short - drop / 2) / (variance * self._noise.factor), self.sensitivity.threshold * OUTLIER)

    def _next_score(self, score: float, short: float, variance: float) -> float:
        """The pool's CUSUM after a bin; no single bin ends it either."""
        return max(score + max(self._gain(short, variance), -self.sensitivity.threshold * OUTLIER), 0.0)

    def _start_of(self, hit_bin: Bin) -> datetime:
        return hit_bin.end - timedelta(seconds=self.sensitivity.bin_s)

    def _test_second_fall(self, hit_bin: Bin, figures: _Figures, variance: float) -> None:
        """The test relative to the rate during the drop, once that is known; its bins vary as their own rate does."""
        usual = _mean(self._during)
        if len(self._during) >= LATEST:
            variance *= max(_bernoulli(self._level - usual) / _bernoulli(self._level), 1.0)
            error = (variance * self._noise.factor / len(self._during)) ** 0.5
            self._second_score = self._next_score(self._second_score, figures[0] - usual - error, variance)
        if self._second_score == 0.0:
            self._during.extend(figures for figures, _ in self._second_fall)  # without them the rate would seem higher
            self._during.append(figures)
            self._second_fall.clear()
            self._forget_before_recovery(variance)
            return
        self._second_fall.append((figures, hit_bin))
        threshold, lower = self.sensitivity.threshold, [figures for figures, _ in self._second_fall]
        if self._second_score > threshold and _mean(lower) - usual >= self.sensitivity.drop:
            self._start_second_fall(hit_bin.end)
        elif self._second_score > 2 * threshold:  # too small to report: from now on it is the rate during the drop
            self._forget_second_fall()
            self._during.extend(lower)

    def _forget_before_recovery(self, variance: float) -> None:
        """Forget the bins of a drop before its rate rose, as it does while caches fill again."""
        latest = list(self._during)[-LATEST:]
        least = max(self.sensitivity.drop / 2, RISE_SIGMAS * (variance * self._noise.factor / LATEST) ** 0.5)
        if len(latest) == LATEST and _mean(self._during) - _mean(latest) >= least:
            self._during = deque(latest, maxlen=BINS_OF_DROP)

    def _start_second_fall(self, now: datetime) -> None:
        """Begin the drop again at the second fall. It is compared with the time since the first one."""
        second_fall = self._second_fall
        self._comparable_since = self._change_point
        self._change_point = self._steady_until = self._start_of(second_fall[0][1])
        self._down_since, self._worsened = now, True
        self._clear_sums()
        for figures, hit_bin in second_fall:
            self._after.append(figures)
            self._add_sums(hit_bin)
        self._forget_second_fall()

    def _forget_second_fall(self) -> None:
        self._second_score, self._second_fall = 0.0, []
        self._during.clear()

    def _is_enough(self, parts: list[_Figures]) -> bool:
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
            if max(_mean(self._after), _mean(latest)) >= ALARM_SHARE * self.sensitivity.drop:
                self._down_since = now
            elif self._score > 2 * threshold:
                self._restart(now)

    def _end_drop(self, now: datetime, *, accept: bool) -> None:
        if accept:
            self._restart(now)
        self._deviations.clear()
        self._forget_second_fall()
        for group in self._groups.values():
            group.level.forget_held()
            group.score, group.bins_below = 0.0, 0
        self._down_since, self._score, self._steady_until = None, 0.0, now
        self._worsened, self._comparable_since = False, now
        self._changes = []  # levels stay those from before the drop
        self._clear_sums()

    def _restart(self, now: datetime) -> None:
        """Make the bins since the change point the new level."""
        for group in self._groups.values():
            group.level.restart()
            group.score, group.bins_below = 0.0, 0
        self._noise.forget()
        self._since, self._score, self._steady_until = self._change_point, 0.0, now
        self._clear_sums()

    def _update_levels(self, samples: Mapping[str, Sample], now: datetime) -> None:
        for name, sample in samples.items():
            group = self._groups[name]
            self._update_group_score(group, sample)
            is_down = self._down_since is not None
            hold = is_down or self._score > 0 or group.score > 0
            if group.level.add(sample, self.sensitivity.drop, self._noise.factor, hold=hold, may_rise=not is_down):
                self._since = now
                self._noise.forget()

    def _update_group_score(self, group: _Group, sample: Sample) -> None:
        """The group's own CUSUM. While it is above 0, the group's bins are held back, for ``accept_s`` at most."""
        level = group.level.ratio
        if level is None or self._down_since is not None:
            return
        gain = self._gain(level - sample.ratio, group.level.variance(sample.requests))
        group.score = min(max(group.score + gain, 0.0), 3 * self.sensitivity.threshold)
        group.bins_below = group.bins_below + 1 if group.score else 0
        if group.bins_below * self.sensitivity.bin_s >= self.sensitivity.accept_s:
            group.level.restart()
            group.score, group.bins_below = 0.0, 0

    def _forget_bins_before_change(self, now: datetime) -> None:
        """Forget the bins before an operator's change that is old enough and was followed by no drop."""
        if self._down_since is not None or self._score > 0:
            return
        grace = timedelta(seconds=BINS_AFTER_CHANGE * self.sensitivity.bin_s)
        due = [at for at in self._changes if now - at >= grace]
        if due:
            self._changes = [at for at in self._changes if at not in due]
            self._since = max(due)
            for group in self._groups.values():
                group.level.keep_latest(BINS_AFTER_CHANGE)

    def _update_mix(self, hit_bin: Bin) -> None:
        total = hit_bin.prompt
        if not total:
            return
        self._bins += 1  # until there are many, the mix is their plain mean: one unusual first bin must not dominate
        usual_weight, current_weight = (max(1 / self._bins, weight) for weight in (MIX_MEMORY, MIX_LATEST))
        for name, group in self._groups.items():
            share = hit_bin.groups[name].prompt / total if name in hit_bin.groups else 0.0
            group.current += current_weight * (share - group.current)
            if self._down_since is None and self._score == 0.0:
                group.usual += usual_weight * (share - group.usual)
        self._groups = {
            name: group
            for name, group in self._groups.items()
            if max(group.current, group.usual) > FORGOTTEN or name in hit_bin.groups
        }
        limit, effect = self.sensitivity.drop, abs(self._mix_effect())
        if effect < limit / 2:
            self._mix_since = None
        elif effect >= limit:
            self._mix_since = self._mix_since or hit_bin.end

    def _mix_effect(self) -> float:
        """Change of the pool's rate from the usual to the current mix, all groups at their levels.

        A group without a level yet counts as one of the mean level: what is unknown is no change.
        """
        known = [(group, group.level.ratio) for group in self._groups.values() if group.level.ratio is not None]
        usual = sum(group.usual for group, _ in known)
        mean = sum(group.usual * level for group, level in known) / usual if usual else 0.0
        return sum((group.current - group.usual) * (level - mean) for group, level in known) if usual else 0.0

    def _add_sums(self, hit_bin: Bin) -> None:
        for name, group_bin in hit_bin.groups.items():
            group = self._groups[name]
            group.weighted += group_bin.prompt * group_bin.ratio
            group.prompt += group_bin.prompt

    def _clear_sums(self) -> None:
        self._after.clear()
        for group in self._groups.values():
            group.weighted = group.prompt = 0.0

    def _detection(self, hit_bin: Bin) -> Detection:
        if self._compared_until is None or not any(group.level.ratio is not None for group in self._groups.values()):
            return Detection(hit_bin.end, State.LEARNING, prompt=hit_bin.prompt, requests=hit_bin.requests)
        is_down = self._down_since is not None
        is_old = (hit_bin.end - self._compared_until).total_seconds() > LATEST * self.sensitivity.bin_s
        parts = self._after if is_down else self._latest
        return Detection(
            at=hit_bin.end,
            state=State.DOWN if is_down else State.STEADY,
            level=self._level,
            ratio=None if is_old else min(max(self._level - _mean(parts), 0.0), 1.0),
            change_point=self._change_point if self._after else None,
            steady_until=self._steady_until,
            since=self._since,
            comparable_since=max((at for at in (self._since, self._comparable_since) if at), default=None),
            worsened=self._worsened,
            score=self._score / self.sensitivity.threshold,
            noise=self._noise_of(hit_bin),
            prompt=sum(part[1] for part in parts),
            requests=sum(part[2] for part in parts),
            groups=self._shortfalls() if is_down else (),
            mix=self._mix_effect(),
            mix_since=self._mix_since,
            shares=self._changed_shares() if self._mix_since else (),
        )

    def _changed_shares(self) -> tuple[GroupShare, ...]:
        shares = [GroupShare(name, group.usual, group.current) for name, group in self._groups.items()]
        return tuple(sorted(shares, key=lambda share: abs(share.current - share.usual), reverse=True))

    def _noise_of(self, hit_bin: Bin) -> float | None:
        shortfall = self._shortfall(self._samples(hit_bin))
        return None if shortfall is None else (shortfall[1] * self._noise.factor) ** 0.5

    def _shortfalls(self) -> tuple[GroupShortfall, ...]:
        tokens = sum(group.prompt for group in self._groups.values())
        shortfalls = [
            GroupShortfall(name, group.usual, group.prompt / tokens, group.level.ratio, group.weighted / group.prompt)
            for name, group in self._groups.items()
            if group.prompt and group.level.ratio is not None
        ]
        return tuple(sorted(shortfalls, key=lambda shortfall: shortfall.contribution, reverse=True))


def _bernoulli(ratio: float) -> float:
    """The variance of a request that hits all or nothing, for a rate that is not quite 0 or 1."""
    ratio = min(max(ratio, 0.02), 0.98)
    return ratio * (1 - ratio)


def _mean(parts: Iterable[_Figures]) -> float:
    """Mean shortfall of several bins, weighted by their tokens."""
    bins = list(parts)
    tokens = sum(part[1] for part in bins)
    return sum(part[0] * part[1] for part in bins) / tokens if tokens else 0.0
