"""Stored data of the time before and during a drop, and the causes that are derived from it. Pure.

Theory of operation. Everything is counted in tokens of prompts whose responses reported cached tokens. The loss of a
part of the traffic is what it would have had cached at its baseline rate, less what it had: ``Sums.lost``. Parts are
cut by replica, task group, revision or prefix, and a cause explains as many tokens as the parts that it affects lost.
What is unknown is None, and a function that needs it uses something else.

The change point is the time that best divides a series of bins into a higher and a lower level: the cut where two
levels, one for each part, leave the smallest sum of squared deviations, each bin weighted by its tokens (the first step
of binary segmentation: Scott and Knott, "A cluster analysis method for grouping means", 1974).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

from telemetry.lab.breakdown import Breakdown
from telemetry.lint.structure import PromptStructure

MIN_TOKEN_SHARE = 0.01  # of a period's tokens: a part with less has no baseline rate of its own
BEFORE_S = 180.0  # longest time from an event to the drop that it caused
LATE_S = 45.0  # longest time from the drop to its event, because clocks and scrapes differ
LEAST_BINS = 2  # on either side of a change point
REVISION_EVENTS = frozenset(
    {"policy_published", "rollout_started", "rollout_acknowledged", "rollout_promoted", "rollout_completed"}
)
LEAST_FALL = 0.02  # between the levels


class CauseKind(StrEnum):
    """Why a hit rate may fall."""

    PROMPT_CHANGED = "prompt_changed"
    WORKLOAD_CHANGED = "workload_changed"
    CAPACITY = "capacity"
    REPLICA_RESTARTED = "replica_restarted"
    REPLICA_ADDED = "replica_added"
    REPLICA_LOST = "replica_lost"
    REVISION = "revision"
    OVERFLOW = "overflow"
    INDEX_STALE = "index_stale"
    ENGINE_SILENT = "engine_silent"
    CACHING_OFF = "caching_off"


OUTAGES = frozenset({CauseKind.REPLICA_RESTARTED, CauseKind.REPLICA_LOST})  # what they cost need not be notified


@dataclass(frozen=True, slots=True)
class Finding:
    """The tokens that a cause explains, and the certainty that it is the reason for their loss."""

    kind: CauseKind
    tokens: float
    certainty: float  # 0 to 1
    summary: str
    advice: str
    evidence: Mapping[str, Any] = field(default_factory=dict)  # JSON


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of a drop, as alerts store it and pages show it."""

    kind: str
    confidence: float  # 0 to 1: the share of the loss that it explains, times its certainty
    summary: str
    evidence: Mapping[str, Any]
    advice: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cause_key(cause: Mapping[str, Any]) -> str:
    """What a cause, as JSON, is about. It stays the same while its figures change."""
    evidence = cause.get("evidence") or {}
    about = (evidence.get(name) for name in ("policy", "revision", "kind", "segment"))
    return " ".join(str(part) for part in (cause["kind"], *about) if part is not None)


def percent(ratio: float | None) -> str:
    return "an unknown share" if ratio is None else f"{ratio * 100:.0f} %"


def names_text(names: list[str], limit: int = 3) -> str:
    """Names in a sentence, the first ``limit`` of them."""
    if len(names) > limit:
        return f"{', '.join(names[:limit])} and {len(names) - limit} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


@dataclass(frozen=True, slots=True)
class Sums:
    """A part of the traffic."""

    requests: float = 0.0
    prompt: float = 0.0  # tokens of prompts whose responses reported cached tokens
    cached: float = 0.0
    spilled: float | None = None  # requests sent away from their preferred replica because of its load
    predicted_prompt: float = 0.0  # tokens of the prompts with a predicted hit; the next two are of the same prompts
    predicted: float = 0.0
    predicted_cached: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        spilled = [part.spilled for part in (self, other) if part.spilled is not None]
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
    def overflow_ratio(self) -> float | None:
        """Share of requests sent away from their preferred replica because of its load; None if not counted."""
        return self.spilled / self.requests if self.spilled is not None and self.requests else None

    def lost(self, baseline: float | None) -> float:
        """Tokens that would be cached at the baseline rate and are not; negative if more are cached."""
        return 0.0 if baseline is None else self.prompt * baseline - self.cached


@dataclass(frozen=True, slots=True)
class Route:
    """What routers counted for one group, replica, policy and revision."""

    group: str
    replica: str
    policy: str
    revision: int
    sums: Sums


@dataclass(frozen=True, slots=True)
class Prefix:
    """Requests with one prefix at one replica; of a sample if there are many."""

    group: str
    prefix: int | None  # the tier-1 key
    replica: str
    sums: Sums
    is_early: bool = True  # in the first half of the period


PrefixKey = tuple[str, int | None]  # task group and prefix


@dataclass(frozen=True, slots=True)
class EngineSums:
    """What a replica's engines counted."""

    replica: str
    queries: float | None  # tokens of readings that have hits too
    hits: float | None
    silent: bool = False  # the engine answers and no longer reports cache hits
    kv_usage_ratio: float | None = None  # mean
    preemptions: float | None = None
    lacks_prefix_cache: bool = False  # it runs without prefix caching at the moment


@dataclass(frozen=True, slots=True)
class DescribedPrompt:
    """The description of the beginning of a prompt, its time and its task group."""

    group: str
    at: datetime
    structure: PromptStructure


@dataclass(frozen=True)
class Period:
    """Everything stored of one period."""

    start: datetime
    end: datetime
    routes: Sequence[Route] = ()
    prefixes: Sequence[Prefix] = ()
    engines: Sequence[EngineSums] = ()
    prompts: Sequence[DescribedPrompt] = ()
    breakdown: Breakdown | None = None

    @property
    def seconds(self) -> float:
        return (self.end - self.start).total_seconds()

    @cached_property
    def total(self) -> Sums:
        """Sums counted by the routers, or by the engines if routers counted no tokens."""
        by_routers = total(route.sums for route in self.routes)
        return by_routers if by_routers.prompt else self.engine_total

    @cached_property
    def engine_total(self) -> Sums:
        """Sums counted by the engines that report queries and hits."""
        engines = [engine for engine in self.engines if engine.queries is not None and engine.hits is not None]
        return total(_engine_tokens(engine) for engine in engines)

    @cached_property
    def by_replica(self) -> Mapping[str, Sums]:
        """Sums counted by the routers, or by the engines if routers counted no requests."""
        if any(route.sums.requests for route in self.routes):
            return sum_by(self.routes, lambda route: route.replica)
        return {engine.replica: _engine_tokens(engine) for engine in self.engines}

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """Each replica's share of the traffic: of requests if routers counted them, else of tokens."""
        traffic = {name: sums.requests or sums.prompt for name, sums in self.by_replica.items()}
        everything = sum(traffic.values())
        return {name: part / everything for name, part in traffic.items()} if everything else {}

    @cached_property
    def by_prefix(self) -> Mapping[PrefixKey, Sums]:
        return sum_by(self.prefixes, lambda prefix: (prefix.group, prefix.prefix))

    @cached_property
    def main_replicas(self) -> Mapping[PrefixKey, str]:
        """The replica that had most tokens of each prefix."""
        tokens: dict[PrefixKey, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for prefix in self.prefixes:
            tokens[prefix.group, prefix.prefix][prefix.replica] += prefix.sums.prompt
        return {key: max(counts, key=lambda replica: counts[replica]) for key, counts in tokens.items()}

    def new_prefix_ratio(self, group: str) -> float:
        """Share of a group's tokens in the second half with prefixes that the first half did not have, 0 to 1."""
        of_group = [prefix for prefix in self.prefixes if prefix.group == group]
        early = {prefix.prefix for prefix in of_group if prefix.is_early}
        late = sum(prefix.sums.prompt for prefix in of_group if prefix.prefix not in early)
        half = sum(prefix.sums.prompt for prefix in of_group) / 2
        return min(late / half, 1.0) if half else 0.0

    @property
    def sample_factor(self) -> float:
        """All tokens divided by those of ``prefixes``, which may be a sample."""
        tokens = sum(prefix.sums.prompt for prefix in self.prefixes)
        return self.total.prompt / tokens if tokens else 0.0

    def term_ratio(self, name: str) -> float | None:
        """A term of the breakdown as a ratio of its prompt tokens; None if unknown."""
        return None if self.breakdown is None else self.breakdown.ratio(getattr(self.breakdown, name))

    def gap(self, upper: str, lower: str) -> float | None:
        """Difference of two terms of the breakdown."""
        above, below = self.term_ratio(upper), self.term_ratio(lower)
        return None if above is None or below is None else above - below


def _engine_tokens(engine: EngineSums) -> Sums:
    return Sums(prompt=engine.queries or 0, cached=engine.hits or 0)


@dataclass(frozen=True, slots=True)
class RelatedEvent:
    """An event around the time of the drop."""

    at: datetime
    kind: str  # a value of ``EventKind``
    summary: str
    replica: str = ""
    revision: int | None = None
    policy: str = ""


@dataclass(frozen=True, slots=True)
class RevisionFacts:
    """A revision of a policy, and who published it."""

    strategy: str
    author: str = ""  # "": the system, or unknown
    reason: str = ""
    published_at: datetime | None = None


@dataclass(frozen=True)
class Evidence:
    """The period of the drop, the period before it, and the events around it."""

    now: Period
    before: Period
    events: Sequence[RelatedEvent] = ()
    change_point: datetime | None = None  # when the rate fell; None if unknown
    group: str | None = None  # evidence of one task group only
    revisions: Mapping[tuple[str, int], RevisionFacts] = field(default_factory=dict)  # by policy and number

    @cached_property
    def lost(self) -> float:
        """Tokens that would be cached at the baseline rate and are not, by engines or routers: the larger number."""
        by_routers = self.now.total.lost(self.before.total.rate)
        by_engines = self.now.engine_total.lost(self.before.engine_total.rate)
        return max(by_engines, by_routers, 0.0)

    def baseline_rate(self, replica: str) -> float | None:
        """Rate of a replica before the drop; that of all replicas if it had little traffic."""
        own = self.before.by_replica.get(replica)
        has_traffic = own is not None and own.prompt > MIN_TOKEN_SHARE * self.before.total.prompt
        return own.rate if own is not None and has_traffic else self.before.total.rate

    def lost_at(self, replicas: Iterable[str]) -> float:
        """Tokens that these replicas lost, each relative to its own baseline rate."""
        now = self.now.by_replica
        return sum(max(now[name].lost(self.baseline_rate(name)), 0.0) for name in replicas if name in now)

    def lost_by_prefixes_of(self, replicas: Iterable[str]) -> float | None:
        """Tokens that prefixes lost, at any replica, that were at these replicas before; None if unknown."""
        if not self.before.prefixes or not self.now.prefixes:
            return None
        affected, main, baseline = set(replicas), self.before.main_replicas, self.before.by_prefix
        now = self.now.by_prefix.items()
        lost = sum(max(sums.lost(baseline[key].rate), 0.0) for key, sums in now if main.get(key) in affected)
        return lost * self.now.sample_factor

    def gap_growth(self, upper: str, lower: str) -> float | None:
        """Tokens by which the difference of two breakdown terms grew; None if unknown."""
        now, before = self.now.gap(upper, lower), self.before.gap(upper, lower)
        return None if now is None or before is None else (now - before) * self.now.total.prompt

    def events_of(self, *kinds: str) -> list[RelatedEvent]:
        """Events of these kinds, oldest first."""
        return sorted((event for event in self.events if event.kind in kinds), key=lambda event: event.at)

    def timing_match(self, event: RelatedEvent) -> float:
        """How well the time of an event matches that of the drop, 0 to 1."""
        if self.change_point is None:
            return 0.8
        before_s = (self.change_point - event.at).total_seconds()
        if -LATE_S <= before_s <= BEFORE_S:
            return 1.0
        return 0.6 if before_s > 0 else 0.3

    def event_limit(self, before_s: float) -> datetime:
        """The earliest time of an event that may have caused the drop."""
        return (self.change_point or self.now.start) - timedelta(seconds=before_s)


def total(parts: Iterable[Sums]) -> Sums:
    return sum(parts, Sums())


Part = TypeVar("Part", Route, Prefix)
Key = TypeVar("Key")


def sum_by(parts: Iterable[Part], key: Callable[[Part], Key]) -> dict[Key, Sums]:
    """Sums of the parts with the same key."""
    sums: dict[Key, Sums] = {}
    for part in parts:
        name = key(part)
        sums[name] = sums[name] + part.sums if name in sums else part.sums
    return sums


@dataclass(frozen=True, slots=True)
class Bin:
    """Traffic in a short time."""

    start: datetime
    prompt: float  # tokens
    cached: float


def find_change_point(bins: Sequence[Bin]) -> datetime | None:
    """The start of the lower part of ascending bins; None if nothing fell, or for too few bins."""
    filled = [each for each in bins if each.prompt > 0]
    best: tuple[float, datetime] | None = None
    prompt, cached = sum(each.prompt for each in filled), sum(each.cached for each in filled)
    prompt_left = cached_left = 0.0
    for index, each in enumerate(filled):
        if LEAST_BINS <= index <= len(filled) - LEAST_BINS:
            left, right = cached_left / prompt_left, (cached - cached_left) / (prompt - prompt_left)
            explained = prompt_left * (prompt - prompt_left) / prompt * (left - right) ** 2
            if left - right >= LEAST_FALL and (best is None or explained > best[0]):
                best = explained, each.start
        prompt_left += each.prompt
        cached_left += each.cached
    return None if best is None else best[1]


Document = Mapping[str, Any]


def evidence_lines(cause: Document) -> list[str]:
    """One sentence for each known fact; a figure without a sentence of its own has its name."""
    evidence: Document = cause.get("evidence") or {}
    written: set[str] = set()
    lines = []
    for names, text in _SENTENCES:
        if names[0] in evidence:
            written.update(names)
            lines += [line for line in text(evidence, str(cause.get("kind"))) if line]
    rest = (name for name in evidence if name not in written)
    return [*lines, *(f"{name.replace('_', ' ').capitalize()}: {evidence[name]}." for name in rest)]


def _explained(evidence: Document, _: str) -> Iterator[str]:
    explained, lost = evidence["explained_tokens"], evidence.get("lost_tokens") or 0
    yield f"Explains {explained:,} of {lost:,} lost tokens ({percent(evidence.get('explained_ratio'))})."


def _revision(evidence: Document, _: str) -> Iterator[str]:
    strategy = f", strategy {evidence['strategy']}" if evidence.get("strategy") else ""
    yield f"Revision {evidence.get('revision')} of policy {evidence['policy']}{strategy}."
    if evidence.get("author"):
        at = evidence.get("published_at")
        when = f" at {datetime.fromisoformat(at):%Y-%m-%d %H:%M:%S} UTC" if at else ""
        yield f"Published by {evidence['author']}{when}{_reason(evidence)}."
    if (before := evidence.get("hour_before_ratio")) is not None:
        yield f"The requests of its task groups had a hit rate of {percent(before)} in the hour before the drop."
    if (other := evidence.get("other_revisions_ratio")) is not None:
        yield f"The policy's other revisions have a hit rate of {percent(other)} at the same time."
    if evidence.get("normal_before_drop"):
        yield "It placed requests before the drop, and these hit as usual."


def _reason(evidence: Document) -> str:
    return f": {evidence['reason']}" if evidence.get("reason") else ""


def _replicas(evidence: Document, _: str) -> Iterator[str]:
    rates = evidence.get("hit_rates") or {}
    named = (f"{name} (hit rate {percent(rates[name])})" if name in rates else name for name in evidence["replicas"])
    yield f"Replicas: {', '.join(named)}."


def _share(evidence: Document, kind: str) -> Iterator[str]:
    share = percent(evidence["share_ratio"])
    had = kind == CauseKind.REPLICA_LOST
    yield f"Share of the requests before: {share}." if had else f"Share of the tokens now: {share}."


def _regained(evidence: Document, _: str) -> Iterator[str]:
    if (ratio := evidence["regained_ratio"]) is not None:
        yield f"Without restarts and outages the hit rate would be {100 * ratio:.0f} points higher."


def _prompts(evidence: Document, _: str) -> Iterator[str]:
    yield f"{percent(evidence['new_ratio'])} of the prompts did not occur before."
    yield "Each new prompt begins differently." if evidence.get("keeps_changing") else "The new beginnings repeat."
    if (at := evidence.get("offset_tokens")) is not None:
        yield f"The change is about {at:,.0f} tokens into the {str(evidence.get('segment')).replace('_', ' ')}."
    if (stable := evidence.get("stable_tokens")) is not None:
        yield f"About {stable:,.0f} tokens behind it did not change."


def _groups(evidence: Document, kind: str) -> Iterator[str]:
    names = ", ".join(name or "no task group" for name in evidence["groups"])
    label = "Task groups that grew" if kind == CauseKind.WORKLOAD_CHANGED else "Task groups"
    yield f"{label}: {names}." if names else ""


def _now_and_before(name: str, label: str, figure: Callable[[Any], str] = percent) -> _Sentence:
    def text(evidence: Document, kind: str) -> Iterator[str]:
        now, before = evidence[name], evidence.get(f"baseline_{name}")
        words = _GAPS.get(kind, label) if name == "gap_ratio" else label
        if now is not None:
            yield f"{words}: {figure(now)}{'' if before is None else f', {figure(before)} before'}."

    return (name, f"baseline_{name}"), text


_GAPS: dict[str, str] = {CauseKind.CAPACITY: "Evicted before it was used again"}
_Text = Callable[[Document, str], Iterator[str]]
_Sentence = tuple[tuple[str, ...], _Text]
_REVISION = (
    *("policy", "revision", "strategy", "author", "reason", "published_at"),
    *("hour_before_ratio", "other_revisions_ratio", "normal_before_drop"),
)
_PROMPTS = ("new_ratio", "keeps_changing", "kind", "segment", "offset_tokens", "stable_tokens")
_SENTENCES: tuple[_Sentence, ...] = (
    (("explained_tokens", "lost_tokens", "explained_ratio"), _explained),
    (_REVISION, _revision),
    (("replicas", "hit_rates"), _replicas),
    (("share_ratio",), _share),
    (("regained_ratio",), _regained),
    (("groups",), _groups),
    (_PROMPTS, _prompts),
    _now_and_before("reachable_ratio", "Reachable hit rate"),
    _now_and_before("gap_ratio", "Predicted as cached and not found"),
    _now_and_before("kv_usage_ratio", "KV cache used by running requests"),
    _now_and_before("overflow_ratio", "Requests that overflowed"),
    _now_and_before("requests_per_s", "Requests per second", lambda value: f"{value:.2g}"),
    (
        ("others_baseline_ratio",),
        lambda it, _: iter([f"Hit rate of the others before: {percent(it['others_baseline_ratio'])}."]),
    ),
    (("events",), lambda it, _: iter(it["events"])),
)
