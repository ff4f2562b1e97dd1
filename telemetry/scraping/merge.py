"""One scrape of a target and what was remembered of it -> its readings, what to remember, and what happened. Pure.

Theory of operation. A target is ``up`` when a scrape succeeds. A scrape that fails leaves it what it was (``stale``,
for those who ask) unless nobody listens at its address, or it is the second failure in a row: then it is ``down``.
A restart shows in an engine's counters or start time, a router's in its boot. Each transition is told once, because
it is computed from the remembered state that it changes.

What is remembered of a target between two scrapes, as JSON: the raw counters of each of its sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from telemetry.metrics.engine import EngineKey, EngineSample, ReplicaSample
from telemetry.metrics.engines.names import CacheFacts
from telemetry.metrics.histograms import ROUTER_EDGES, Buckets, Mark
from telemetry.metrics.rates import Addition, ReadingState, advance
from telemetry.metrics.router import SPILLED, RouteKey, RouterSample

DOWN_AFTER = 2  # failures in a row
ROUTER_ITSELF = RouteKey()
Sample = TypeVar("Sample", ReplicaSample, RouterSample)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a scrape brought nothing."""

    reason: str  # for people; never holds the URL
    refused: bool = False  # nobody listens at the address
    blames_target: bool = True  # False: whoever should have known it failed, so it stays what it was


@dataclass(frozen=True, slots=True)
class Taken(Generic[Sample]):
    """An answer: when it came, and what it said."""

    taken_s: float  # Unix time
    sample: Sample
    duration_s: float = 0.0  # from the beginning of the scrape to the answer


@dataclass(frozen=True, slots=True)
class Condition:
    """What is known of a target besides its counters."""

    health: str = "unknown"  # unknown, up, down
    failures: int = 0  # in a row
    ok_at: datetime | None = None
    restarted_at: datetime | None = None
    reason: str = ""
    asleep: bool = False
    duration_s: float | None = None  # of the last scrape that succeeded: from its beginning to the answer
    engine: str = ""  # "vllm", "sglang" ...: whose names its metrics have
    role: str = ""  # "prefill" or "decode", where its metrics say so (H19)
    lora_adapters: tuple[str, ...] | None = None  # with requests at the last scrape; None: unknown


@dataclass(frozen=True, slots=True)
class EngineReading:
    """A row of readings; a gap has the key ("", "") and nothing else."""

    key: EngineKey
    addition: Addition
    gauges: Mapping[str, float] = field(default_factory=dict)
    not_reported: frozenset[str] | None = None  # our names of what the engine does not report at all


@dataclass(frozen=True, slots=True)
class RouteReading:
    """A row of router readings."""

    key: RouteKey
    addition: Addition


@dataclass(frozen=True, slots=True)
class Folded:
    """What a scrape comes to."""

    condition: Condition
    engines: list[EngineReading] = field(default_factory=list)
    routes: list[RouteReading] = field(default_factory=list)
    engine_marks: Mapping[EngineKey, Mark] = field(default_factory=dict)
    route_marks: Mapping[RouteKey, Mark] = field(default_factory=dict)
    happened: list[str] = field(default_factory=list)  # kinds of events: replica_down, replica_up, replica_restarted
    facts: CacheFacts = field(default_factory=CacheFacts)


def fold_failure(before: Condition, failure: Failure) -> tuple[Condition, list[str]]:
    """The condition after a scrape that failed, and ``replica_down`` when that is news of a target that was up."""
    failures = before.failures + 1
    is_down = failure.refused or (failure.blames_target and failures >= DOWN_AFTER)
    health = "down" if is_down else before.health
    happened = ["replica_down"] if is_down and before.health == "up" else []
    condition = replace(before, health=health, failures=failures, reason=failure.reason[:200])
    return replace(condition, duration_s=None, lora_adapters=None), happened


def fold_replica(
    before: Condition,
    marks: Mapping[EngineKey, Mark],
    outcome: Taken[ReplicaSample] | Failure,
    *,
    due_s: float,
    interval_s: float,
) -> Folded:
    """A replica's scrape. Engines that it no longer names are forgotten (H12)."""
    if isinstance(outcome, Failure):
        condition, happened = fold_failure(before, outcome)
        gap = EngineReading(EngineKey("", ""), Addition(ReadingState.STALE))
        return Folded(condition, engines=[gap], engine_marks=marks, happened=happened)
    sample = outcome.sample
    now = {key: _engine_mark(engine, sample, due_s, outcome.taken_s) for key, engine in sample.engines.items()}
    readings = [
        EngineReading(key, addition, sample.engines[key].gauges, sample.engines[key].not_reported)
        for key, mark in now.items()
        if (addition := advance(marks.get(key), mark, interval_s=interval_s)) is not None
    ]
    restarted = any(reading.addition.state == ReadingState.RESET for reading in readings)
    asleep = all(engine.asleep for engine in sample.engines.values())
    condition, happened = _succeeded(before, outcome.duration_s, due_s, restarted=restarted)
    return Folded(
        replace(condition, asleep=asleep, engine=sample.engine, role=sample.role, lora_adapters=sample.lora_adapters),
        engines=readings,
        engine_marks=now,
        happened=happened,
        facts=sample.facts,
    )


def _engine_mark(engine: EngineSample, sample: ReplicaSample, due_s: float, taken_s: float) -> Mark:
    return Mark(due_s, taken_s, engine.counters, engine.histograms, sample.started_s, engine.created_s)


def fold_router(
    before: Condition,
    marks: Mapping[RouteKey, Mark],
    outcome: Taken[RouterSample] | Failure,
    *,
    due_s: float,
    interval_s: float,
) -> Folded:
    """A router's scrape: one reading of the router itself, and one of each key under which something was counted.

    A router makes a label set when it first counts under it, so one that was absent in the same boot stood at 0.
    """
    if isinstance(outcome, Failure):
        condition, _ = fold_failure(before, outcome)
        gap = RouteReading(ROUTER_ITSELF, Addition(ReadingState.STALE))
        return Folded(condition, routes=[gap], route_marks=marks)
    sample = outcome.sample
    now = _route_marks(sample, due_s, outcome.taken_s)
    itself = marks.get(ROUTER_ITSELF)
    readings = []
    for key, mark in now.items():
        earlier = marks.get(key) or (itself and replace(itself, counters={}, histograms={}))
        addition = advance(earlier, _comparable(earlier, mark), interval_s=interval_s, absent_is_zero=True)
        if addition is not None and (key == ROUTER_ITSELF or _counted(addition)):
            readings.append(RouteReading(key, addition))
    restarted = any(r.key == ROUTER_ITSELF and r.addition.state == ReadingState.RESET for r in readings)
    condition, _ = _succeeded(before, outcome.duration_s, due_s, restarted=restarted)
    return Folded(condition, routes=readings, route_marks=now)


def _route_marks(sample: RouterSample, due_s: float, taken_s: float) -> dict[RouteKey, Mark]:
    itself = Mark(due_s, taken_s, {}, started_s=sample.started_s, boot=sample.boot)
    marks = {
        key: replace(itself, counters=route.counters, histograms=route.histograms)
        for key, route in sample.routes.items()
    }
    return {ROUTER_ITSELF: itself, **marks}


def _comparable(earlier: Mark | None, mark: Mark) -> Mark:
    """Without the spills, where they were not yet counted out of the requests: they were no zero then."""
    if earlier is None or "requests" not in earlier.counters or SPILLED in earlier.counters:
        return mark
    return replace(mark, counters={name: value for name, value in mark.counters.items() if name != SPILLED})


def _counted(addition: Addition) -> bool:
    return any(addition.counters.values()) or any(buckets.counts for buckets in addition.histograms.values())


def _succeeded(before: Condition, duration_s: float, due_s: float, *, restarted: bool) -> tuple[Condition, list[str]]:
    due = datetime.fromtimestamp(due_s, UTC)
    came_back = before.health == "down" and before.ok_at is not None
    happened = [*(["replica_up"] if came_back else []), *(["replica_restarted"] if restarted else [])]
    restarted_at = due if restarted else before.restarted_at
    return Condition("up", 0, due, restarted_at, duration_s=round(duration_s, 3)), happened


ROUTER_LAYOUT = "router"  # stands for the router's 275 edges


def dump_marks(marks: Mapping[EngineKey, Mark] | Mapping[RouteKey, Mark]) -> dict[str, Any]:
    """Marks by source -> JSON."""
    return {"sources": [{"key": asdict(key), **_dump(mark)} for key, mark in marks.items()]}


def load_engine_marks(document: Mapping[str, Any]) -> dict[EngineKey, Mark]:
    """JSON -> marks by engine; none for a document of another form, which costs one reading of resolution."""
    return {EngineKey(**source["key"]): _load(source) for source in document.get("sources", ())}


def load_route_marks(document: Mapping[str, Any]) -> dict[RouteKey, Mark]:
    """JSON -> marks by key of a router."""
    return {RouteKey(**source["key"]): _load(source) for source in document.get("sources", ())}


def _dump(mark: Mark) -> dict[str, Any]:
    return {
        "at": mark.at_s,
        "taken": mark.taken_s,
        "counters": dict(mark.counters),
        "histograms": {name: _dump_buckets(buckets) for name, buckets in mark.histograms.items()},
        "started": mark.started_s,
        "created": mark.created_s,
        "boot": mark.boot,
    }


def _load(source: Mapping[str, Any]) -> Mark:
    return Mark(
        at_s=source["at"],
        taken_s=source["taken"],
        counters=source["counters"],
        histograms={name: _load_buckets(buckets) for name, buckets in source["histograms"].items()},
        started_s=source["started"],
        created_s=source["created"],
        boot=source["boot"],
    )


def _dump_buckets(buckets: Buckets) -> dict[str, Any]:
    edges = ROUTER_LAYOUT if buckets.edges == ROUTER_EDGES else list(buckets.edges)
    return {"edges": edges, "counts": sorted(buckets.counts.items()), "sum": buckets.sum}


def _load_buckets(document: Mapping[str, Any]) -> Buckets:
    edges = ROUTER_EDGES if document["edges"] == ROUTER_LAYOUT else tuple(document["edges"])
    return Buckets(edges, dict(document["counts"]), document["sum"])
