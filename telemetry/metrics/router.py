"""Reads a router's exposition: one sample per label set, under Warmpath's names."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from telemetry.metrics.engine import MAX_COUNT, bucket_edge, checked_count
from telemetry.metrics.exposition import (
    ROUTER_BYTES,
    ROUTER_SERIES,
    ExpositionError,
    Sample,
    read_samples,
)
from telemetry.metrics.histograms import Buckets, HistogramError, from_sparse

INFO = "warmpath_router_info"
START_TIME = "process_start_time_seconds"
REQUESTS = "warmpath_router_requests_total"
COUNTERS = {
    "warmpath_router_usage_reported_total": "usage_reported",
    "warmpath_router_usage_without_details_total": "usage_without_details",
    "warmpath_router_prompt_tokens_total": "prompt_tokens",
    "warmpath_router_cached_tokens_total": "cached_tokens",
    "warmpath_router_predicted_responses_total": "predicted_responses",
    "warmpath_router_predicted_prompt_tokens_total": "predicted_prompt_tokens",
    "warmpath_router_predicted_tokens_total": "predicted_tokens",
    "warmpath_router_predicted_cached_tokens_total": "predicted_cached_tokens",
}
OWN_REQUESTS = {  # of the router itself, by replica; in no reading of the router
    "warmpath_router_own_requests_total": "probes",
    "warmpath_router_own_prompt_tokens_total": "probe_tokens",
    "warmpath_router_own_cached_tokens_total": "probe_cached_tokens",
}
OUTCOMES = {
    "ok": "ok_requests",
    "client_error": "client_error_requests",
    "replica_error": "replica_error_requests",
    "router_error": "router_error_requests",
    "cancelled": "cancelled_requests",
}
SPILLED = "spilled_requests"
# Label and explanation of each placement reason (``Reason`` in ``routing/types.py``), by what it means for overflow.
PREFERRED_REASONS = {
    "affinity": (
        "Preferred replica",
        "The prefix belongs to this replica, and waiting there cost little more than elsewhere.",
    ),
    "no_key": ("No prefix", "The request has no prefix or session to place it by, so the least loaded was chosen."),
    "hit": ("Cached prefix", "It was the preferred or cheapest replica, and had cached part of the prompt."),
    "cold": ("Not cached", "No replica had cached enough of the prompt to matter."),
}
OVERFLOW_REASONS = {  # not the preferred replica, because of load
    "spill": ("Overflow", "The request would have waited too long at the preferred replica."),
    "elsewhere": ("Cheaper replica", "Another replica had cached more of the prompt, but its queue was longer."),
    "spread": (
        "Rebalanced",
        "Another replica had cached more of the prompt, but had received more than its share of requests.",
    ),
}
NO_PREFERENCE_REASONS = {  # of strategies without a preferred replica
    "least_load": ("Least load", "It was the least loaded replica."),
    "round_robin": ("Round robin", "It was the next replica in turn."),
    "random": ("Random", "It was chosen at random."),
    "less_of_two": ("Less loaded of two", "It was the less loaded of two replicas chosen at random."),
}
REASONS = PREFERRED_REASONS | OVERFLOW_REASONS | NO_PREFERENCE_REASONS
REUSE_TTFT = "warmpath_router_reuse_ttft_seconds"
HISTOGRAMS = {  # no route key has samples in two of one kind
    "warmpath_router_ttft_seconds": "ttft",
    "warmpath_router_policy_ttft_seconds": "ttft",
    REUSE_TTFT: "ttft",
    "warmpath_router_latency_seconds": "latency",
    "warmpath_router_policy_latency_seconds": "latency",
}
RESPONSES = frozenset({"plain", "streamed"})  # kinds of responses that have a latency
CACHE_REQUESTS = "warmpath_router_response_cache_requests_total"
CACHE_RESULTS = {"hit": "cache_hits", "miss": "cache_misses", "bypass": "cache_bypasses"}
CACHE_SAVED = "warmpath_router_response_cache_saved_tokens_total"
CACHE_TOKENS = {"prompt": "cache_prompt_tokens", "generated": "cache_generated_tokens"}
CACHE_STORE_UP = "warmpath_router_response_cache_store_up"
OBJECTIVES = "warmpath_router_ttft_objectives_total"  # a request that was shed missed its objective, too
OBJECTIVE_COUNTERS = ("objective_requests", "objective_kept")
CACHE_COUNTERS = (*CACHE_RESULTS.values(), *CACHE_TOKENS.values())
KV_STATE = "warmpath_router_kv_events_state"  # its label ``state`` is the figure
KV_FIGURES = {
    "warmpath_router_kv_events_state_timestamp_seconds": "since_s",
    "warmpath_router_kv_events_lag_seconds": "lag_s",
    "warmpath_router_kv_events_received_total": "received",
    "warmpath_router_kv_events_gaps_total": "gaps",
    "warmpath_router_kv_events_lost_total": "lost",
    "warmpath_router_kv_events_malformed_total": "malformed",
    "warmpath_router_kv_events_restarts_total": "restarts",
}
POOL_FIGURES = {
    "warmpath_router_pool_saturation_ratio": "saturation_ratio",
    "warmpath_router_pool_waiting_work_seconds": "waiting_s",
    "warmpath_router_pool_prefill_tokens_per_second": "prefill_tokens_per_s",
}
SEMANTIC_FIGURES = {
    "warmpath_router_semantic_cache_recent_precision_ratio": "recent_precision",
    "warmpath_router_semantic_cache_precision_lower_bound_ratio": "lower_bound",
    "warmpath_router_semantic_cache_window_checks": "window_checks",
    "warmpath_router_semantic_cache_index_entries": "entries",
}
SEMANTIC_STATE = "warmpath_router_semantic_cache_state"  # its label ``state`` is the figure
SEMANTIC_CHECKS = {  # by similarity and result
    "warmpath_router_semantic_cache_checks_total": "checks",
    "warmpath_router_semantic_cache_shared_checks": "shared_checks",
}
SHARED_PEERS = "warmpath_router_shared_state_peers"
SHARED_AGE = "warmpath_router_shared_state_age_seconds"
SHARED_BYTES = "warmpath_router_shared_state_bytes_total"  # its label ``direction`` is the figure
REPLICA_UP, REPLICA_OUT = "warmpath_router_replica_up", "warmpath_router_replica_out"
_BUCKETS = {f"{name}_bucket": short for name, short in HISTOGRAMS.items()}
_METRICS = frozenset(COUNTERS | OWN_REQUESTS) | frozenset(_BUCKETS) | {INFO, START_TIME, REQUESTS}
_KV_METRICS = frozenset(KV_FIGURES) | {KV_STATE}
_CACHE_METRICS = frozenset({CACHE_REQUESTS, CACHE_SAVED, CACHE_STORE_UP})
_SEMANTIC_METRICS = frozenset(SEMANTIC_FIGURES) | frozenset(SEMANTIC_CHECKS) | {SEMANTIC_STATE}
_SHARED_METRICS = frozenset({SHARED_PEERS, SHARED_AGE, SHARED_BYTES})
_ALL_METRICS = (
    _METRICS
    | _CACHE_METRICS
    | _KV_METRICS
    | frozenset(POOL_FIGURES)
    | _SEMANTIC_METRICS
    | _SHARED_METRICS
    | {OBJECTIVES, REPLICA_UP, REPLICA_OUT}
)


@dataclass(frozen=True, slots=True, order=True)
class RouteKey:
    """The label set of a router's counters.

    The TTFT histogram of all requests has no policy: ``policy`` is "" and ``revision`` 0. The one by revision, of
    policies with a canary, has no replica: ``replica`` is "". Nor has the one by ``reuse``: "hit" for responses with at
    least half of the prompt cached, "miss" for the others. Counters of response caches and of objectives have pool and
    group only, those of the router's own requests only a replica.
    """

    pool: str = ""
    group: str = ""
    replica: str = ""
    policy: str = ""
    revision: int = 0
    reuse: str = ""  # "": all requests


@dataclass(slots=True)
class RouteSample:
    """Counters and histograms of one route key; ``requests`` is the sum of the outcomes.

    Histograms are ``ttft`` (of streamed responses), ``streamed_latency`` and ``plain_latency``.
    """

    counters: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Buckets] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RouterSample:
    """The figures of one scrape of a router."""

    boot: str | None
    started_s: float | None
    routes: dict[RouteKey, RouteSample]
    kv_streams: KvStreams = field(default_factory=dict)
    pool_loads: PoolLoads = field(default_factory=dict)
    cache_store_up: float | None = None  # 1: it uses the store of response caches; 0: that failed; None: it has none
    semantic_caches: SemanticCaches = field(default_factory=dict)
    serving_replicas: ServingReplicas = field(default_factory=dict)
    shared_state: SharedState = field(default_factory=dict)


# KV event streams by replica and rank: the processes of the router in each state, and figures by name.
KvStreams = dict[str, dict[str, dict[str, Any]]]
# Semantic caches by pool and task group: the processes in each state, figures, and checks by similarity and result.
SemanticCaches = dict[str, dict[str, dict[str, Any]]]
# Replicas by pool that pass the router's health check and are not ejected, by name, ascending.
ServingReplicas = dict[str, list[str]]
# What a router shares with others: ``peers``, ``age_s`` (absent while it is cut off), and total bytes as ``published``
# and ``received``. Empty: it does not share.
SharedState = dict[str, float]
PoolLoads = dict[str, dict[str, float]]  # figures by pool and name, without those that are unknown


def read_router(text: str) -> RouterSample:
    """Read a router's exposition; ExpositionError if it is malformed or not a router's."""
    samples = read_samples(text, _ALL_METRICS, max_bytes=ROUTER_BYTES, max_series=ROUTER_SERIES)
    info = next((sample.labels for sample in samples if sample.name == INFO), None)
    if info is None:
        raise ExpositionError(f"it has no {INFO}: it is not a router's")
    routes: dict[RouteKey, RouteSample] = defaultdict(RouteSample)
    for sample in samples:
        _count(routes, sample)
    for (key, name), buckets in _histograms(samples).items():
        routes[key].histograms[name] = buckets
    started = next((s.value for s in samples if s.name == START_TIME and math.isfinite(s.value)), None)
    store_up = next((s.value for s in samples if s.name == CACHE_STORE_UP and s.value in {0.0, 1.0}), None)
    return RouterSample(
        info.get("boot"),
        started,
        dict(routes),
        _kv_streams(samples),
        _pool_loads(samples),
        cache_store_up=store_up,
        semantic_caches=_semantic_caches(samples),
        serving_replicas=_serving_replicas(samples),
        shared_state=_shared_state(samples),
    )


def _kv_streams(samples: list[Sample]) -> KvStreams:
    """State and figures of the KV event streams, by replica and rank."""
    streams: KvStreams = {}
    for sample in samples:
        if sample.name not in _KV_METRICS or not 0 <= sample.value <= MAX_COUNT:
            continue
        ranks = streams.setdefault(sample.labels.get("replica", ""), {})
        stream = ranks.setdefault(sample.labels.get("rank", "0"), {"states": {}})
        if sample.name == KV_STATE:
            stream["states"][sample.labels.get("state", "")] = int(sample.value)
        else:
            stream[KV_FIGURES[sample.name]] = sample.value
    return streams


def _pool_loads(samples: list[Sample]) -> PoolLoads:
    """The figures of each pool; the requests are those of this router."""
    loads: PoolLoads = {}
    for sample in samples:
        if sample.name in POOL_FIGURES and 0 <= sample.value <= MAX_COUNT:
            loads.setdefault(sample.labels.get("pool", ""), {})[POOL_FIGURES[sample.name]] = sample.value
    return loads


def _serving_replicas(samples: list[Sample]) -> ServingReplicas:
    keys: dict[str, set[tuple[str, str]]] = {REPLICA_UP: set(), REPLICA_OUT: set()}
    for sample in samples:
        if sample.name in keys and sample.value > 0:
            keys[sample.name].add((sample.labels.get("pool", ""), sample.labels.get("replica", "")))
    serving: ServingReplicas = {}
    for pool, replica in sorted(keys[REPLICA_UP] - keys[REPLICA_OUT]):
        serving.setdefault(pool, []).append(replica)
    return serving


def _shared_state(samples: list[Sample]) -> SharedState:
    """What a router shares with others; empty if only its workers share."""
    names = {SHARED_PEERS: "peers", SHARED_AGE: "age_s"}
    found = {
        names.get(sample.name) or sample.labels.get("direction", ""): sample.value
        for sample in samples
        if sample.name in _SHARED_METRICS and 0 <= sample.value <= MAX_COUNT
    }
    return found if "peers" in found else {}


def _semantic_caches(samples: list[Sample]) -> SemanticCaches:
    """State, figures and checks of each task group's semantic cache."""
    caches: SemanticCaches = {}
    for sample in samples:
        if sample.name not in _SEMANTIC_METRICS or not 0 <= sample.value <= MAX_COUNT:
            continue
        labels = sample.labels
        groups = caches.setdefault(labels.get("pool", ""), {})
        cache = groups.setdefault(labels.get("group", ""), {"states": {}})
        if sample.name == SEMANTIC_STATE:
            cache["states"][labels.get("state", "")] = int(sample.value)
        elif sample.name in SEMANTIC_CHECKS:
            checks = cache.setdefault(SEMANTIC_CHECKS[sample.name], {})
            results = checks.setdefault(labels.get("similarity", ""), {})
            results[labels.get("result", "")] = int(sample.value)
        else:
            cache[SEMANTIC_FIGURES[sample.name]] = sample.value
    return caches


def _count(routes: dict[RouteKey, RouteSample], sample: Sample) -> None:
    if (name := COUNTERS.get(sample.name) or OWN_REQUESTS.get(sample.name)) is not None:
        routes[_key(sample)].counters[name] = checked_count(sample)
    elif sample.name == REQUESTS:
        counters = routes[_key(sample)].counters
        outcome = OUTCOMES.get(sample.labels.get("outcome", ""))
        for name in ("requests", *([outcome] if outcome else [])):
            counters[name] = counters.get(name, 0.0) + checked_count(sample)
        if (reason := sample.labels.get("reason")) and reason not in NO_PREFERENCE_REASONS:
            overflow = sample.value if reason in OVERFLOW_REASONS else 0.0
            counters[SPILLED] = counters.get(SPILLED, 0.0) + overflow
    elif sample.name == OBJECTIVES:
        counters, is_kept = routes[_key(sample)].counters, sample.labels.get("result") == "kept"
        for name in OBJECTIVE_COUNTERS if is_kept else OBJECTIVE_COUNTERS[:1]:
            counters[name] = counters.get(name, 0.0) + checked_count(sample)
    elif (cache_counter := _cache_counter(sample)) is not None:
        counters = routes[_key(sample)].counters
        counters[cache_counter] = counters.get(cache_counter, 0.0) + checked_count(sample)


def _cache_counter(sample: Sample) -> str | None:
    """The name of a counter of response caches; None for other samples, and for results that are not known here."""
    if sample.name == CACHE_REQUESTS:
        return CACHE_RESULTS.get(sample.labels.get("result", ""))
    if sample.name == CACHE_SAVED:
        return CACHE_TOKENS.get(sample.labels.get("kind", ""))
    return None


def _key(sample: Sample) -> RouteKey:
    labels = sample.labels
    revision = labels.get("revision", "")
    return RouteKey(
        labels.get("pool", ""),
        labels.get("group", ""),
        labels.get("replica", ""),
        labels.get("policy", ""),
        int(revision) if revision.isdecimal() and len(revision) < 10 else 0,
        labels.get("reuse", "") if sample.name.startswith(REUSE_TTFT) else "",
    )


def _histograms(samples: list[Sample]) -> dict[tuple[RouteKey, str], Buckets]:
    buckets: dict[tuple[RouteKey, str], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        name = _BUCKETS.get(sample.name)
        if name == "latency":
            response = sample.labels.get("response", "")
            name = f"{response}_latency" if response in RESPONSES else None
        if name is not None:
            buckets[_key(sample), name].append((bucket_edge(sample), checked_count(sample)))
    histograms: dict[tuple[RouteKey, str], Buckets] = {}
    for key, pairs in buckets.items():
        with suppress(HistogramError):  # torn: unknown for this scrape
            histograms[key] = from_sparse(pairs)
    return histograms
