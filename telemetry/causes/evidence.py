"""What was seen before a drop and during it, as the judges of its causes look at it. Pure.

Theory of operation. Everything is counted in tokens of prompts whose answers told how much of them was cached. What a
part of the traffic lost is what it would have had cached at its usual rate, less what it had: ``Sums.lost``. Parts are
cut by replica, task group, revision or opening, and a cause explains as many tokens as the parts that it touches lost.
What is not known is None, and whoever asks goes by something else.

When a hit rate fell: the moment that best divides a higher level from a lower one. Pure.

Theory of operation. Of all places to cut a series of bins in two, the best is where two levels, one for each part,
leave the least of the squared deviations, each bin weighing as much as its tokens (the first step of binary
segmentation: Scott and Knott, "A cluster analysis method for grouping means", 1974).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Protocol, TypeVar

from telemetry.lint import PromptStructure

LITTLE = 0.01  # of a side's tokens: a part with less has no usual rate of its own
AHEAD_S = 180.0  # how long before the rate falls something may have happened that made it fall
LATE_S = 45.0  # and after: clocks and scrapes differ


It = TypeVar("It", "Route", "Prefix")
Key = TypeVar("Key")


class Rungs(Protocol):
    """The hit-rate ladder (ALGORITHMS K): tokens, None where a rung is unknown."""

    @property
    def prompt_tokens(self) -> float: ...
    @property
    def reachable(self) -> float | None: ...
    @property
    def capacity(self) -> float | None: ...
    @property
    def split(self) -> float | None: ...
    @property
    def best(self) -> float | None: ...
    @property
    def predicted(self) -> float | None: ...
    @property
    def delivered(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Sums:
    """A part of the traffic."""

    requests: float = 0.0
    prompt: float = 0.0  # tokens of answers that told their cached tokens
    cached: float = 0.0
    spilled: float | None = None  # requests placed away from the prefix's home or holder, for load
    predicted_prompt: float = 0.0  # tokens of those answers for which a hit was predicted; the next two are theirs
    predicted: float = 0.0
    predicted_cached: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        spilled = [it for it in (self.spilled, other.spilled) if it is not None]
        return Sums(
            self.requests + other.requests,
            self.prompt + other.prompt,
            self.cached + other.cached,
            sum(spilled) if spilled else None,
            self.predicted_prompt + other.predicted_prompt,
            self.predicted + other.predicted,
            self.predicted_cached + other.predicted_cached,
        )

    @property
    def rate(self) -> float | None:
        """Hit rate, 0 to 1; None for no traffic."""
        return self.cached / self.prompt if self.prompt else None

    @property
    def spilled_ratio(self) -> float | None:
        """Of the requests; None where nobody counts it."""
        return self.spilled / self.requests if self.spilled is not None and self.requests else None

    def lost(self, usual: float | None) -> float:
        """Tokens that would have been cached at the usual rate, and were not; below 0 where more were."""
        return 0.0 if usual is None else self.prompt * usual - self.cached


@dataclass(frozen=True, slots=True)
class Route:
    """What routers counted under one key."""

    group: str
    replica: str
    policy: str
    revision: int
    sums: Sums


@dataclass(frozen=True, slots=True)
class Prefix:
    """What became of one opening's requests at one replica; of a sample where there are many."""

    group: str
    prefix: int | None  # the tier-1 key
    replica: str
    sums: Sums
    is_early: bool = True  # it came in the first half of its side


@dataclass(frozen=True, slots=True)
class EngineSums:
    """What a replica's engines counted."""

    replica: str
    queries: float | None  # tokens of readings that know the hits too
    hits: float | None
    silent: bool = False  # it answers, and no longer tells what its cache did
    kv_usage_ratio: float | None = None  # mean
    preemptions: float | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """An opening, when it came and whose it is."""

    group: str
    at: datetime
    opening: PromptStructure


@dataclass(frozen=True)
class Side:
    """Everything seen in one span of time."""

    start: datetime
    end: datetime
    routes: Sequence[Route] = ()
    prefixes: Sequence[Prefix] = ()
    engines: Sequence[EngineSums] = ()
    openings: Sequence[Seen] = ()
    ladder: Rungs | None = None

    @property
    def seconds(self) -> float:
        """How long it is."""
        return (self.end - self.start).total_seconds()

    @cached_property
    def total(self) -> Sums:
        """By the routers, or by the engines where no router was asked."""
        routed = added(route.sums for route in self.routes)
        return routed if routed.prompt else self.engine_total

    @cached_property
    def engine_total(self) -> Sums:
        """Of the engines that tell."""
        told = [it for it in self.engines if it.queries is not None and it.hits is not None]
        return Sums(prompt=sum(it.queries or 0 for it in told), cached=sum(it.hits or 0 for it in told))

    @cached_property
    def by_replica(self) -> Mapping[str, Sums]:
        """By the routers, or by the engines."""
        if any(route.sums.requests for route in self.routes):
            return grouped(self.routes, lambda route: route.replica)
        return {it.replica: Sums(prompt=it.queries or 0, cached=it.hits or 0) for it in self.engines}

    @cached_property
    def paces(self) -> Mapping[str, float]:
        """What each replica was given, as a share of all; by requests where routers counted them, else by tokens."""
        asked = {name: sums.requests or sums.prompt for name, sums in self.by_replica.items()}
        total = sum(asked.values())
        return {name: part / total for name, part in asked.items()} if total else {}

    @cached_property
    def by_prefix(self) -> Mapping[tuple[str, int | None], Sums]:
        """Openings of all replicas."""
        return grouped(self.prefixes, lambda it: (it.group, it.prefix))

    @cached_property
    def homes(self) -> Mapping[tuple[str, int | None], str]:
        """Where each opening had most of its tokens."""
        at: dict[tuple[str, int | None], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for it in self.prefixes:
            at[it.group, it.prefix][it.replica] += it.sums.prompt
        return {key: max(tokens, key=lambda replica: tokens[replica]) for key, tokens in at.items()}

    def usually_new(self, group: str) -> float:
        """The part of a group's later tokens that is of openings which the first half had not, 0 to 1."""
        of_group = [it for it in self.prefixes if it.group == group]
        early = {it.prefix for it in of_group if it.is_early}
        late = sum(it.sums.prompt for it in of_group if it.prefix not in early)
        half = sum(it.sums.prompt for it in of_group) / 2
        return min(late / half, 1.0) if half else 0.0

    @property
    def sampled(self) -> float:
        """By what tokens of ``prefixes`` are multiplied to be those of all."""
        part = sum(it.sums.prompt for it in self.prefixes)
        return self.total.prompt / part if part else 0.0

    def rung(self, name: str) -> float | None:
        """A rung of the ladder as a ratio of its prompt tokens; None where it is unknown."""
        if self.ladder is None or not self.ladder.prompt_tokens:
            return None
        tokens: float | None = getattr(self.ladder, name)
        return None if tokens is None else tokens / self.ladder.prompt_tokens

    def gap(self, upper: str, lower: str) -> float | None:
        """How far one rung lies below another."""
        above, below = self.rung(upper), self.rung(lower)
        return None if above is None or below is None else above - below


@dataclass(frozen=True, slots=True)
class RelatedEvent:
    """An event."""

    at: datetime
    kind: str  # a value of ``EventKind``
    summary: str
    replica: str = ""
    revision: int | None = None
    policy: str = ""


@dataclass(frozen=True)
class Evidence:
    """Both sides, what happened in between, and when the rate fell."""

    now: Side
    before: Side
    happenings: Sequence[RelatedEvent] = ()
    onset: datetime | None = None  # when the rate fell; None where that cannot be told
    group: str | None = None  # of one task group alone

    @cached_property
    def lost(self) -> float:
        """Tokens computed anew that would have been cached at the usual rate: by engines, as alerts see it, or routers.

        Where the engines' own rate did not fall and the routers' did, theirs counts.
        """
        by_routers = self.now.total.lost(self.before.total.rate)
        by_engines = self.now.engine_total.lost(self.before.engine_total.rate)
        return max(by_engines, by_routers, 0.0)

    def usual(self, key: str) -> float | None:
        """The usual rate of a replica: its own where it had traffic, else everybody's."""
        own = self.before.by_replica.get(key)
        enough = own is not None and own.prompt > LITTLE * self.before.total.prompt
        return own.rate if own is not None and enough else self.before.total.rate

    def lost_at(self, replicas: Iterable[str]) -> float:
        """Tokens that these replicas lost together, by their own usual rates."""
        now = self.now.by_replica
        return sum(max(now[it].lost(self.usual(it)), 0.0) for it in replicas if it in now)

    def lost_from(self, replicas: Iterable[str]) -> float | None:
        """Tokens that the openings lost that were at home at these replicas, wherever they went; None unless known."""
        if not self.before.prefixes or not self.now.prefixes:
            return None
        gone, homes, usual = set(replicas), self.before.homes, self.before.by_prefix
        parts = (max(sums.lost(usual[key].rate), 0.0) for key, sums in self.now.by_prefix.items()
                 if homes.get(key) in gone)  # fmt: skip
        return sum(parts) * self.now.sampled

    def grown(self, upper: str, lower: str) -> float | None:
        """Tokens by which the gap between two rungs of the ladder grew; None where it cannot be told."""
        now, before = self.now.gap(upper, lower), self.before.gap(upper, lower)
        return None if now is None or before is None else (now - before) * self.now.total.prompt

    def what(self, *kinds: str) -> list[RelatedEvent]:
        """Events of these kinds, oldest first."""
        return sorted((it for it in self.happenings if it.kind in kinds), key=lambda it: it.at)

    def fits(self, happening: RelatedEvent) -> float:
        """How well an event's time fits to that of the drop, 0 to 1."""
        if self.onset is None:
            return 0.8
        ahead_s = (self.onset - happening.at).total_seconds()
        if -LATE_S <= ahead_s <= AHEAD_S:
            return 1.0
        return 0.6 if ahead_s > 0 else 0.3

    def changed_since(self, seconds: float) -> datetime:
        """The earliest time of an event that may have to do with the drop."""
        return (self.onset or self.now.start) - timedelta(seconds=seconds)


def added(parts: Iterable[Sums]) -> Sums:
    """All together."""
    return sum(parts, Sums())


def grouped(parts: Iterable[It], key: Callable[[It], Key]) -> dict[Key, Sums]:
    """Parts with the same key together."""
    found: dict[Key, Sums] = {}
    for part in parts:
        name = key(part)
        found[name] = found[name] + part.sums if name in found else part.sums
    return found


LEAST_BINS = 2  # on either side
LEAST_FALL = 0.02  # between the levels


@dataclass(frozen=True, slots=True)
class Bin:
    """A short time's answers."""

    start: datetime
    prompt: float  # tokens
    cached: float


def onset(bins: Sequence[Bin]) -> datetime | None:
    """The start of the lower part; None where nothing fell, or there is too little to tell. ``bins`` ascending."""
    known = [it for it in bins if it.prompt > 0]
    best: tuple[float, datetime] | None = None
    total, cached = sum(it.prompt for it in known), sum(it.cached for it in known)
    prompt_left = cached_left = 0.0
    for place, it in enumerate(known):
        if LEAST_BINS <= place <= len(known) - LEAST_BINS:
            left, right = cached_left / prompt_left, (cached - cached_left) / (total - prompt_left)
            between = prompt_left * (total - prompt_left) / total * (left - right) ** 2  # what the cut explains
            if left - right >= LEAST_FALL and (best is None or between > best[0]):
                best = between, it.start
        prompt_left += it.prompt
        cached_left += it.cached
    return None if best is None else best[1]
