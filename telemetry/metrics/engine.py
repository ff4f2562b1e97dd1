"""Reads a replica's exposition: one sample per engine, and the facts of its KV cache.

Theory of operation. The metric names show which engine wrote the text. A sample belongs to the engine (a data-parallel
rank) that its labels name. Where a figure has several metric names, the preferred one that is present counts (H14).
Series that differ in other labels are added up, and so are the buckets of histograms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from telemetry.metrics.engine_names import ENGINES, EXPECTED, RATIOS, CacheFacts, EngineNames, Meaning
from telemetry.metrics.exposition import ExpositionError, Sample, newest_labels, read_samples
from telemetry.metrics.histograms import Buckets, HistogramError, from_cumulative

START_TIME = "process_start_time_seconds"
MAX_COUNT = 1e14  # of any counter: three years of a million a second; ten thousand of it still fit into a column
MAX_ADAPTERS, MAX_ADAPTER_CHARS = 32, 100  # names of LoRA adapters, and characters of each
MAX_ENGINES = 256  # of one replica: each is a row per scrape
KNOWN_METRICS = frozenset({START_TIME}).union(*(names.metrics for names in ENGINES))
ROLES = frozenset({"prefill", "decode"})  # H19


@dataclass(frozen=True, slots=True, order=True)
class EngineKey:
    """One engine inside a replica: a data-parallel rank of one model (H15)."""

    model: str
    engine: str


@dataclass(slots=True)
class EngineSample:
    """The figures of one engine at one scrape. Absent names are unknown."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Buckets] = field(default_factory=dict)
    created_s: float | None = None
    asleep: bool = False
    not_reported: frozenset[str] = frozenset()  # names of EXPECTED that the engine lacks; torn histograms are not here


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """The figures of one scrape of a replica."""

    engines: dict[EngineKey, EngineSample]
    started_s: float | None
    facts: CacheFacts
    engine: str  # "vllm", "sglang", "tensorrt_llm"
    role: str = ""  # "prefill" or "decode", where the metrics say so
    lora_adapters: tuple[str, ...] | None = None  # with requests, as of the engine's last step; None: not reported


def read_replica(text: str) -> ReplicaSample:
    """Read a replica's exposition. ExpositionError: malformed, an impossible count, or no name of a known engine."""
    names = _engine_of(lambda prefix: text.startswith(prefix) or f"\n{prefix}" in text)
    samples = _in_tokens(read_samples(text, names.metrics | {START_TIME}), names, text)
    sample = _replica_sample(samples, names, _declared_counters(text, names))
    return replace(sample, lora_adapters=_lora_adapters(text, names, sample))


def replica_sample(samples: Sequence[Sample]) -> ReplicaSample:
    """Read the samples of one scrape; ExpositionError for an impossible count, or no name of a known engine."""
    names = _engine_of(lambda prefix: any(sample.name.startswith(prefix) for sample in samples))
    return _replica_sample(_in_tokens(samples, names, ""), names, frozenset())


def _in_tokens(samples: Sequence[Sample], names: EngineNames, text: str) -> Sequence[Sample]:
    """The samples with counters of blocks in tokens, and without counters whose unit is unknown."""
    if not any(sample.name.startswith(tuple(names.unit_in_help)) for sample in samples if names.unit_in_help):
        return samples
    block_tokens = names.facts(sample for sample in samples if sample.name in names.facts_from).block_tokens
    scales: dict[str, float] = {}
    for metric in names.unit_in_help:
        unit = next((line for line in text.split("\n") if line.startswith(f"# HELP {metric}")), "")
        scale = 1.0 if "tokens" in unit else block_tokens if "blocks" in unit else None
        if scale is not None:
            scales |= {metric: scale, f"{metric}_total": scale}
    known = {sample.name for sample in samples if sample.name.removesuffix("_total") not in names.unit_in_help}
    return [
        replace(sample, value=scales.get(sample.name, 1.0) * sample.value)
        for sample in samples
        if sample.name in known or sample.name in scales
    ]


def _engine_of(is_present: Callable[[str], bool]) -> EngineNames:
    for names in ENGINES:
        if any(map(is_present, names.prefixes)):
            return names
    raise ExpositionError("it has no metrics of vLLM, SGLang or TensorRT-LLM")


def _replica_sample(samples: Iterable[Sample], names: EngineNames, zeros: frozenset[str]) -> ReplicaSample:
    samples = [s for s in samples if all(s.labels.get(rank, "0") == "0" for rank in names.duplicate_ranks)]
    by_engine: dict[EngineKey, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.name in names.metrics and sample.name not in names.facts_from:
            rank = sample.labels.get(names.engine_label, "0") if names.engine_label else "0"
            by_engine[EngineKey(sample.labels.get("model_name", ""), rank)].append(sample)
    if len(by_engine) > MAX_ENGINES:
        raise ExpositionError(f"more than {MAX_ENGINES} engines")
    engines = {key: _engine_sample(of_engine, names, zeros) for key, of_engine in by_engine.items()}
    if not any(engine.counters for engine in engines.values()):
        raise ExpositionError(f"it has no counters of {names.engine}")
    facts = names.facts(sample for sample in samples if sample.name in names.facts_from)
    return ReplicaSample(engines, _single_value(samples, START_TIME), facts, names.engine, _role(samples, names))


def _declared_counters(text: str, names: EngineNames) -> frozenset[str]:
    """Declared counters of an engine that omits a counter until its first increment: a missing sample means 0."""
    if not names.lacks_zero_samples:
        return frozenset()
    return frozenset(
        name
        for metric, meanings in names.meanings.items()
        for meaning in meanings
        if meaning.kind == "counter" and f"# TYPE {metric} counter" in text
        for name in (meaning.split.names if meaning.split else (meaning.name,))
    )


def _engine_sample(samples: list[Sample], names: EngineNames, zeros: frozenset[str]) -> EngineSample:
    sums = _EngineSums()
    for sample in samples:
        for meaning in names.meanings.get(sample.name, ()):
            sums.add(sample, meaning)
    engine = EngineSample(gauges=sums.gauges, created_s=_single_value(samples, names.created))
    awake = [s.value for s in samples if s.name == names.sleep_state and s.labels.get("sleep_state") == "awake"]
    engine.asleep = awake == [0.0]
    engine.counters = {name: by_rank[min(by_rank)] for name, by_rank in sums.counters.items()}
    if engine.counters:
        engine.counters = dict.fromkeys(zeros, 0.0) | engine.counters
    for name, rank in sorted(sums.buckets, reverse=True):  # the preferred metric comes last and overwrites the others
        try:
            histogram = from_cumulative(sums.buckets[name, rank].items())
        except HistogramError:
            continue  # torn: the distribution is unknown for this scrape, the counters are not
        engine.histograms[name] = histogram
    engine.not_reported = EXPECTED - engine.counters.keys() - engine.gauges.keys() - {name for name, _ in sums.buckets}
    return engine


class _EngineSums:
    """The samples of one engine, added up by name and by the rank of the metric they came under."""

    def __init__(self) -> None:
        self.counters: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.gauges: dict[str, float] = {}
        self.buckets: dict[tuple[str, int], dict[float, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, sample: Sample, meaning: Meaning) -> None:
        if meaning.kind == "counter":
            self._count(sample, meaning)
        elif meaning.kind == "bucket":
            self.buckets[meaning.name, meaning.rank][bucket_edge(sample)] += checked_count(sample)
        elif 0 <= sample.value <= (1 if meaning.name in RATIOS else MAX_COUNT):
            for name in meaning.names(sample.labels):
                if meaning.split is not None:
                    self.gauges[name] = self.gauges.get(name, 0.0) + sample.value
                elif meaning.rank == 0 or name not in self.gauges:
                    self.gauges[name] = sample.value

    def _count(self, sample: Sample, meaning: Meaning) -> None:
        for name in meaning.split.names if meaning.split else ():
            self.counters[name][meaning.rank] += 0.0  # from now on known: 0 until a sample counts for it
        count = checked_count(sample, meaning.scale)
        for name in meaning.names(sample.labels):
            self.counters[name][meaning.rank] += count


def checked_count(sample: Sample, scale: float = 1.0) -> float:
    """A cumulative count; ExpositionError for NaN or a value outside 0 to ``MAX_COUNT``."""
    count = sample.value * scale
    if not 0 <= count <= MAX_COUNT:
        raise ExpositionError(f"{sample.name}: {sample.value} is not a possible count")
    return count


def bucket_edge(sample: Sample) -> float:
    """The upper bound (label ``le``) of a bucket; ExpositionError if it is not a number."""
    try:
        edge = float(sample.labels["le"])
    except (KeyError, ValueError):
        edge = math.nan
    if math.isnan(edge):
        raise ExpositionError(f"{sample.name}: a bucket without a number in its label le")
    return edge


def _single_value(samples: Iterable[Sample], name: str | None) -> float | None:
    """The one finite value of a metric; None where there is none, or several."""
    values = [sample.value for sample in samples if sample.name == name and math.isfinite(sample.value)]
    return values[0] if len(values) == 1 else None


def _lora_adapters(text: str, names: EngineNames, sample: ReplicaSample) -> tuple[str, ...] | None:
    """Sorted names without duplicates, "..." for those above MAX_ADAPTERS. None where they may be wrong (T9)."""
    if names.lora_info is None or sample.started_s is None or len(sample.engines) != 1:
        return None
    labels = newest_labels(text, names.lora_info)
    if labels is None or not labels.keys() >= set(names.lora_labels):
        return None
    listed = {name for label in names.lora_labels for name in labels[label].split(",")} - {""}
    adapters = tuple(name[:MAX_ADAPTER_CHARS] for name in sorted(listed)[:MAX_ADAPTERS])
    return (*adapters, "...") if len(listed) > MAX_ADAPTERS else adapters


def _role(samples: Iterable[Sample], names: EngineNames) -> str:
    """The half of a prefill/decode split that all series name; "" where they name none or several."""
    roles = {sample.labels[names.role_label] for sample in samples if names.role_label in sample.labels}
    return roles.pop() if len(roles) == 1 and roles <= ROLES else ""
