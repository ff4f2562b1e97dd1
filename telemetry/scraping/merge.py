"""Merges one scrape of a target into its state: new readings, raw counters for the next scrape, events. Pure.

Theory of operation. A target is ``up`` when a scrape succeeds. It is ``down`` after a refused connection or the second
failure in a row; one other failure leaves it as it was, and pages show it as stale. An engine's restart shows in its
counters or its start time, a router's in its boot identifier. Each event is emitted once, because it is computed from
the stored state that it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from telemetry.metrics.counters import Increase, RawCounters, ReadingState, increase
from telemetry.metrics.engine import EngineKey, ReplicaSample
from telemetry.metrics.engine_names import CacheFacts
from telemetry.metrics.histograms import ROUTER_EDGES, Buckets
from telemetry.metrics.router import (
    OBJECTIVE_COUNTERS,
    OWN_REQUESTS,
    KvStreams,
    PoolLoads,
    RouteKey,
    RouterSample,
    SemanticCaches,
    ServingReplicas,
    SharedState,
)

DOWN_AFTER = 2  # failures in a row
FAILED_SCRAPE = EngineKey("", "")
ROUTER_ITSELF = RouteKey()
OWN_REQUEST_COUNTS = tuple(OWN_REQUESTS.values())
COUNTED_ONCE = ("generation_tokens", "finished", "first_tokens")  # by an engine, for each request of a router itself
OWN_TIMES = ("queue_ms", "queue_count", "prefill_ms", "prefill_count")
REPORTED = ("kv_streams", "pool_loads", "semantic_caches", "serving_replicas")  # by a router, at its last scrape
ROUTER_LAYOUT = "router"  # stands for the router's 275 edges in stored counters
Sample = TypeVar("Sample", ReplicaSample, RouterSample)
Key = TypeVar("Key", EngineKey, RouteKey)


@dataclass(frozen=True, slots=True)
class ScrapeFailure:
    """Why a scrape gave no sample."""

    reason: str  # shown to operators; never contains the URL
    refused: bool = False  # the address refused the connection
    blames_target: bool = True  # False: a Prometheus server failed, which says nothing about the target


@dataclass(frozen=True, slots=True)
class ScrapeResult(Generic[Sample]):
    """A successful scrape."""

    scraped_s: float  # Unix time at which the response arrived
    sample: Sample
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TargetState:
    """The state of a target besides its counters. Fields are columns of ``ScrapeState``."""

    health: str = "unknown"  # unknown, up, down
    failures: int = 0  # in a row
    ok_at: datetime | None = None
    restarted_at: datetime | None = None
    reason: str = ""
    asleep: bool = False
    lacks_prefix_cache: bool = False
    duration_s: float | None = None  # of the last scrape, if it succeeded
    probes: int = 0  # of routers themselves to a replica: counted by its engine, to be left out
    probe_tokens: int = 0
    probe_cached_tokens: int = 0
    engine: str = ""  # "vllm", "sglang" ...
    role: str = ""  # "prefill" or "decode", where the metrics say so
    lora_adapters: tuple[str, ...] | None = None  # with requests at the last scrape; None: unknown
    kv_streams: KvStreams | None = None  # of a router, at the last scrape; None: unknown
    pool_loads: PoolLoads | None = None  # the same
    semantic_caches: SemanticCaches | None = None  # the same
    serving_replicas: ServingReplicas | None = None  # the same
    shared_state: SharedState | None = None  # the same, with ``bytes_per_s``, published and received


@dataclass(frozen=True, slots=True)
class SourceReading(Generic[Key]):
    """One row of readings. A failed scrape has FAILED_SCRAPE or ROUTER_ITSELF as its key, and nothing else."""

    key: Key
    increase: Increase
    gauges: Mapping[str, float] = field(default_factory=dict)
    not_reported: frozenset[str] | None = None  # figures that the engine does not report at all


@dataclass(frozen=True, slots=True)
class MergedScrape(Generic[Key]):
    """The result of a scrape."""

    state: TargetState
    readings: list[SourceReading[Key]]
    raw_counters: Mapping[Key, RawCounters]
    events: list[str] = field(default_factory=list)  # replica_down, replica_up, replica_restarted
    facts: CacheFacts = field(default_factory=CacheFacts)
    own_requests: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # of a router itself, by replica


def merge_replica(
    state: TargetState,
    previous: Mapping[EngineKey, RawCounters],
    outcome: ScrapeResult[ReplicaSample] | ScrapeFailure,
    *,
    due_s: float,
    interval_s: float,
) -> MergedScrape[EngineKey]:
    """Merge a replica's scrape. Engines that it no longer reports are forgotten."""
    if isinstance(outcome, ScrapeFailure):
        return _failed(state, previous, outcome, FAILED_SCRAPE)
    sample = outcome.sample
    current = {
        key: RawCounters(
            due_s, outcome.scraped_s, engine.counters, engine.histograms, sample.started_s, engine.created_s
        )
        for key, engine in sample.engines.items()
    }
    readings = [
        SourceReading(key, _with_first_tokens(added), sample.engines[key].gauges, sample.engines[key].not_reported)
        for key, raw in current.items()
        if (added := increase(previous.get(key), raw, interval_s=interval_s)) is not None
    ]
    readings, left = _without_own_requests(readings, state)
    restarted = any(reading.increase.state == ReadingState.RESET for reading in readings)
    recovered = state.health == "down" and state.ok_at is not None
    state = replace(
        _succeeded(state, outcome.duration_s, due_s, restarted=restarted),
        asleep=all(engine.asleep for engine in sample.engines.values()),
        lacks_prefix_cache=sample.facts.lacks_prefix_cache,
        engine=sample.engine,
        role=sample.role,
        lora_adapters=sample.lora_adapters,
        probes=left[0],
        probe_tokens=left[1],
        probe_cached_tokens=left[2],
    )
    events = [*(["replica_up"] if recovered else []), *(["replica_restarted"] if restarted else [])]
    return MergedScrape(state, readings, current, events, sample.facts)


def _with_first_tokens(added: Increase) -> Increase:
    """The observations of the TTFT histogram are the requests that got their first token."""
    if "ttft" not in added.histograms:
        return added
    return replace(added, counters={**added.counters, "first_tokens": added.histograms["ttft"].total})


def _without_own_requests(
    readings: list[SourceReading[EngineKey]], state: TargetState
) -> tuple[list[SourceReading[EngineKey]], tuple[int, int, int]]:
    """Leave routers' own requests out of readings; the readings, and the counts of those that no engine has counted.

    Which observations of a histogram or of a mean were such is unknown, so a reading with other requests too has
    none. An engine that restarted, or was not scraped before, has not counted the requests that are left.
    """
    found = []
    left = state.probes, state.probe_tokens, state.probe_cached_tokens
    for reading in readings:
        added = reading.increase
        requests = [added.counters[name] for name in ("first_tokens", "finished") if name in added.counters]
        taken = min(left[0], int(max(requests, default=0)))
        if not taken:
            found.append(reading)
            continue
        tokens, cached = (number * taken // left[0] for number in left[1:])
        left = left[0] - taken, left[1] - tokens, left[2] - cached
        parts = dict.fromkeys(COUNTED_ONCE, taken) | dict.fromkeys(("queries", "prompt_tokens"), tokens)
        parts |= {"hits": cached, "cached_prompt_tokens": cached, "computed_prompt_tokens": tokens - cached}
        counters = {name: max(0.0, value - parts.get(name, 0)) for name, value in added.counters.items()}
        histograms = dict(added.histograms)
        ttft = histograms.pop("ttft", None)
        times = [counters.pop(name, None) for name in OWN_TIMES]
        if max(requests) == taken:
            counters |= {name: 0.0 for name, value in zip(OWN_TIMES, times, strict=True) if value is not None}
            histograms |= {} if ttft is None else {"ttft": Buckets(ttft.edges)}
        found.append(replace(reading, increase=replace(added, counters=counters, histograms=histograms)))
    if any(reading.increase.state in {ReadingState.FIRST, ReadingState.RESET} for reading in readings):
        left = 0, 0, 0
    return found, left


def merge_router(
    state: TargetState,
    previous: Mapping[RouteKey, RawCounters],
    outcome: ScrapeResult[RouterSample] | ScrapeFailure,
    *,
    due_s: float,
    interval_s: float,
) -> MergedScrape[RouteKey]:
    """Merge a router's scrape: one reading of the router itself, and one of each key with an increase.

    A router creates a label set when it first counts under it, so one that was absent in the same boot was 0.
    """
    if isinstance(outcome, ScrapeFailure):
        return replace(_failed(state, previous, outcome, ROUTER_ITSELF), events=[])
    sample = outcome.sample
    router = RawCounters(due_s, outcome.scraped_s, {}, started_s=sample.started_s, boot=sample.boot)
    current = {ROUTER_ITSELF: router}
    for key, route in sample.routes.items():
        current[key] = replace(router, counters=route.counters, histograms=route.histograms)
    earlier_router = previous.get(ROUTER_ITSELF)
    new_key = earlier_router and replace(earlier_router, counters={}, histograms={})
    # A worker of an earlier release has not stored them: their first values are no increase.
    is_counted = any(raw.counters.keys() & set(OBJECTIVE_COUNTERS) for raw in previous.values())
    readings, own_requests = [], dict[str, dict[str, int]]()
    for key, raw in current.items():
        added = increase(previous.get(key) or new_key, raw, interval_s=interval_s, absent_is_zero=True)
        if added is not None and not is_counted:
            known = {name: value for name, value in added.counters.items() if name not in OBJECTIVE_COUNTERS}
            added = replace(added, counters=known)
        if "probes" in raw.counters:
            if added is not None and added.counters.get("probes"):
                own_requests[key.replica] = {name: int(added.counters.get(name, 0)) for name in OWN_REQUEST_COUNTS}
        elif added is not None and (key == ROUTER_ITSELF or _has_increase(added)):
            readings.append(SourceReading(key, added, _router_gauges(sample) if key == ROUTER_ITSELF else {}))
    restarted = any(r.key == ROUTER_ITSELF and r.increase.state == ReadingState.RESET for r in readings)
    shared_state = _with_rate(sample.shared_state, {} if restarted else state.shared_state or {}, state.ok_at, due_s)
    state = _succeeded(state, outcome.duration_s, due_s, restarted=restarted)
    reported: dict[str, Any] = {name: getattr(sample, name) for name in REPORTED}
    state = replace(state, shared_state=shared_state, **reported)
    return MergedScrape(state, readings, current, own_requests=own_requests)


def _with_rate(now: SharedState, before: SharedState, before_at: datetime | None, due_s: float) -> SharedState:
    """Add ``bytes_per_s`` since the scrape before, if the counters of both are of one process."""
    elapsed_s = 0.0 if before_at is None else due_s - before_at.timestamp()
    if elapsed_s <= 0 or not {"published", "received"} <= before.keys() & now.keys():
        return now
    added = sum(now[name] - before[name] for name in ("published", "received"))
    return now if added < 0 else {**now, "bytes_per_s": added / elapsed_s}


def _router_gauges(sample: RouterSample) -> dict[str, float]:
    """The gauges of the router itself that are known."""
    return {} if sample.cache_store_up is None else {"cache_store_up": sample.cache_store_up}


def _failed(
    state: TargetState, previous: Mapping[Key, RawCounters], failure: ScrapeFailure, key: Key
) -> MergedScrape[Key]:
    failures = state.failures + 1
    unknown: dict[str, Any] = dict.fromkeys(("duration_s", "lora_adapters", "shared_state", *REPORTED))
    is_down = failure.refused or (failure.blames_target and failures >= DOWN_AFTER)
    after = replace(
        state,
        health="down" if is_down else state.health,
        failures=failures,
        reason=failure.reason[:200],
        **unknown,
    )
    events = ["replica_down"] if is_down and state.health == "up" else []
    return MergedScrape(after, [SourceReading(key, Increase(ReadingState.STALE))], previous, events)


def _succeeded(state: TargetState, duration_s: float, due_s: float, *, restarted: bool) -> TargetState:
    due = datetime.fromtimestamp(due_s, UTC)
    return TargetState("up", 0, due, due if restarted else state.restarted_at, duration_s=round(duration_s, 3))


def _has_increase(added: Increase) -> bool:
    return any(added.counters.values()) or any(buckets.counts for buckets in added.histograms.values())


def dump_raw_counters(sources: Mapping[Key, RawCounters]) -> dict[str, Any]:
    """Raw counters by source -> JSON."""
    return {
        "sources": [
            {
                "key": asdict(key),
                "due_s": raw.due_s,
                "scraped_s": raw.scraped_s,
                "counters": dict(raw.counters),
                "histograms": {name: _dump_buckets(buckets) for name, buckets in raw.histograms.items()},
                "started_s": raw.started_s,
                "created_s": raw.created_s,
                "boot": raw.boot,
            }
            for key, raw in sources.items()
        ]
    }


def load_raw_counters(document: Mapping[str, Any], key_type: type[EngineKey | RouteKey]) -> dict[Any, RawCounters]:
    """JSON -> raw counters by source; the inverse of ``dump_raw_counters``."""
    return {
        key_type(**source["key"]): RawCounters(
            **{name: value for name, value in source.items() if name not in {"key", "histograms"}},
            histograms={name: _load_buckets(buckets) for name, buckets in source["histograms"].items()},
        )
        for source in document.get("sources", ())
    }


def _dump_buckets(buckets: Buckets) -> dict[str, Any]:
    edges = ROUTER_LAYOUT if buckets.edges == ROUTER_EDGES else list(buckets.edges)
    return {"edges": edges, "counts": sorted(buckets.counts.items()), "sum": None}  # the previous release reads it


def _load_buckets(document: Mapping[str, Any]) -> Buckets:
    edges = ROUTER_EDGES if document["edges"] == ROUTER_LAYOUT else tuple(document["edges"])
    return Buckets(edges, dict(document["counts"]))
