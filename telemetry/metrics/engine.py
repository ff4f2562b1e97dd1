"""A replica's exposition -> one sample per engine, and the facts of its cache.

Names are those of vLLM 0.28 to 0.33 and, under H14, older ones: with and without ``_total``, with the ``gpu_`` prefix.
``vllm:iteration_tokens_total`` is a histogram in spite of its name and is not read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from telemetry.metrics.exposition import ExpositionError, Sample, read_samples
from telemetry.metrics.histograms import Buckets, HistogramError, from_cumulative

# our name -> the names on the wire, the preferred one first; counters are looked for with and without _total
COUNTERS = {
    "queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    "external_queries": ("vllm:external_prefix_cache_queries",),
    "external_hits": ("vllm:external_prefix_cache_hits",),
    "prompt_tokens": ("vllm:prompt_tokens",),
    "generation_tokens": ("vllm:generation_tokens",),
    "preemptions": ("vllm:num_preemptions",),
    "finished": ("vllm:request_success",),  # summed over finished_reason
}
TIERS = {  # H4: values of the label ``source``
    "device": "device_tokens",
    "host": "host_tokens",
    "p2p": "p2p_tokens",
    "disk": "disk_tokens",
    "external_unspecified": "other_tokens",
}
TIER_METRIC = "vllm:prompt_tokens_cached_by_source"
GAUGES = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
}
START_TIME = "process_start_time_seconds"
CREATED = "vllm:prefix_cache_queries_created"
MOST = 1e14  # of anything counted: three years of a million a second; ten thousand of it still fit into a column
MOST_ENGINES = 256  # of one replica: each is a row a scrape
MOST_BLOCKS = 2**31 - 1  # of a cache, and tokens of a block

CACHE_INFO = "vllm:cache_config_info"
SLEEP_STATE = "vllm:engine_sleep_state"


@dataclass(frozen=True, slots=True, order=True)
class EngineKey:
    """One engine inside a replica: a data-parallel rank of one model (H15)."""

    model: str
    engine: str


@dataclass(slots=True)
class EngineSample:
    """What one engine said at one scrape. Absent names are unknown."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Buckets] = field(default_factory=dict)
    created_s: float | None = None
    asleep: bool = False
    not_reported: frozenset[str] = frozenset()  # our names of what it does not have at all; torn ones are not here


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """A replica's KV cache, all its engines together."""

    block_tokens: int | None = None
    capacity_blocks: int | None = None  # usable ones: vLLM counts one null block per engine that never holds anything


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """What one scrape of a replica said."""

    engines: dict[EngineKey, EngineSample]
    started_s: float | None
    facts: CacheFacts


def _wire_names() -> dict[str, tuple[str, str, int]]:
    """Name on the wire -> (kind, our name, rank among the names for it)."""
    names: dict[str, tuple[str, str, int]] = {TIER_METRIC + "_total": ("tier", "", 0), TIER_METRIC: ("tier", "", 1)}
    for ours, wire in COUNTERS.items():
        for rank, name in enumerate(wire):
            names[name + "_total"] = ("counter", ours, 2 * rank)
            names[name] = ("counter", ours, 2 * rank + 1)
    for ours, wire in GAUGES.items():
        names.update({name: ("gauge", ours, rank) for rank, name in enumerate(wire)})
    for ours, wire in HISTOGRAMS.items():
        for rank, name in enumerate(wire):
            names[name + "_bucket"] = ("bucket", ours, rank)
            names[name + "_sum"] = ("sum", ours, rank)
    return names


_NAMES = _wire_names()
OURS = frozenset(COUNTERS) | frozenset(TIERS.values()) | frozenset(GAUGES) | frozenset(HISTOGRAMS)
_KNOWN = frozenset(_NAMES) | {START_TIME, CREATED, CACHE_INFO, SLEEP_STATE}


def read_replica(text: str) -> ReplicaSample:
    """Read a replica's exposition; ExpositionError if it is malformed, holds an impossible count, or no engine."""
    samples = read_samples(text, _KNOWN)
    by_engine: dict[EngineKey, list[Sample]] = defaultdict(list)
    for sample in samples:
        if "engine" in sample.labels and sample.name != CACHE_INFO:
            by_engine[EngineKey(sample.labels.get("model_name", ""), sample.labels["engine"])].append(sample)
        elif "model_name" in sample.labels and sample.name in _NAMES:  # before ranks were labelled
            by_engine[EngineKey(sample.labels["model_name"], "0")].append(sample)
    if len(by_engine) > MOST_ENGINES:
        raise ExpositionError(f"more than {MOST_ENGINES} engines")
    engines = {key: _engine(of_engine) for key, of_engine in by_engine.items()}
    if not any(engine.counters for engine in engines.values()):
        raise ExpositionError("it holds no vLLM counters")
    return ReplicaSample(engines, _single(samples, START_TIME), _facts(samples))


def _engine(samples: list[Sample]) -> EngineSample:
    engine = EngineSample(created_s=_single(samples, CREATED), asleep=_is_asleep(samples))
    counts: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    lines: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    sums: dict[tuple[str, int], float] = {}
    for sample in samples:
        kind, ours, rank = _NAMES.get(sample.name, ("", "", 0))
        if kind == "counter":
            counts[ours][rank] += checked_count(sample)
        elif kind == "tier" and (tier := TIERS.get(sample.labels.get("source", ""))):
            counts[tier][rank] += checked_count(sample)
        elif kind == "gauge" and 0 <= sample.value <= MOST and (rank == 0 or ours not in engine.gauges):
            engine.gauges[ours] = sample.value
        elif kind == "bucket":
            lines[ours, rank].append((bucket_edge(sample), checked_count(sample)))
        elif kind == "sum" and abs(sample.value) <= MOST:
            sums[ours, rank] = sample.value
    engine.counters = {ours: ranks[min(ranks)] for ours, ranks in counts.items()}
    for ours, rank in sorted(lines, reverse=True):  # the preferred name comes last and stays
        if (buckets := _buckets(lines[ours, rank], sums.get((ours, rank)))) is not None:
            engine.histograms[ours] = buckets
    engine.not_reported = OURS - engine.counters.keys() - engine.gauges.keys() - {ours for ours, _ in lines}
    return engine


def _buckets(lines: list[tuple[float, float]], total_sum: float | None) -> Buckets | None:
    """None for a histogram that was torn: its distribution is unknown for this scrape, its counters are not."""
    try:
        return from_cumulative(lines, total_sum)
    except HistogramError:
        return None


def checked_count(sample: Sample) -> float:
    """A cumulative count; ExpositionError for NaN or what is not within 0 and ``MOST``: that scrape is not trusted."""
    if not 0 <= sample.value <= MOST:
        raise ExpositionError(f"{sample.name}: {sample.value} is no count")
    return sample.value


def bucket_edge(sample: Sample) -> float:
    """The ``le`` of a bucket's line."""
    try:
        edge = float(sample.labels["le"])
    except (KeyError, ValueError):
        raise ExpositionError(f"{sample.name}: a bucket without an edge") from None
    if math.isnan(edge):
        raise ExpositionError(f"{sample.name}: a bucket without an edge")
    return edge


def _single(samples: Iterable[Sample], name: str) -> float | None:
    """The one finite value of a name; None where it is absent or given more than once."""
    values = [sample.value for sample in samples if sample.name == name and math.isfinite(sample.value)]
    return values[0] if len(values) == 1 else None


def _is_asleep(samples: Iterable[Sample]) -> bool:
    states = [s.value for s in samples if s.name == SLEEP_STATE and s.labels.get("sleep_state") == "awake"]
    return states == [0.0]


def _facts(samples: Iterable[Sample]) -> CacheFacts:
    infos = [sample.labels for sample in samples if sample.name == CACHE_INFO]
    blocks = [_whole(info.get("num_gpu_blocks")) for info in infos]
    sizes = {_whole(info.get("block_size")) for info in infos}
    known = [count - 1 for count in blocks if count is not None and count > 1]
    return CacheFacts(
        block_tokens=sizes.pop() if len(sizes) == 1 else None,
        capacity_blocks=sum(known) if known and len(known) == len(blocks) and sum(known) <= MOST_BLOCKS else None,
    )


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and 0 < int(text) <= MOST_BLOCKS else None
