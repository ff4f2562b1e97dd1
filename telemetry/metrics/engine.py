"""A replica's exposition -> one sample per engine, and the facts of its cache; the names are those of ``engines/``.

Theory of operation. The text's own names tell which engine it is. Samples go to the engine (a data-parallel rank) that
their labels name; where a figure has several names, the preferred one that is there counts (H14). Series that differ in
other labels add up, buckets of histograms too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from telemetry.metrics.engines import ENGINES, EngineNames
from telemetry.metrics.engines.names import OURS, CacheFacts, Split
from telemetry.metrics.exposition import ExpositionError, Sample, newest_labels, read_samples
from telemetry.metrics.histograms import Buckets, HistogramError, from_cumulative

START_TIME = "process_start_time_seconds"
MOST = 1e14  # of anything counted: three years of a million a second; ten thousand of it still fit into a column
MOST_ADAPTERS, ADAPTER_CHARS = 32, 100  # names of LoRA adapters that are kept, and characters of each
MOST_ENGINES = 256  # of one replica: each is a row a scrape
KNOWN_NAMES = frozenset({START_TIME}).union(*(names.known for names in ENGINES))  # on the wire
ROLES = frozenset({"prefill", "decode"})  # H19


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
class ReplicaSample:
    """What one scrape of a replica said."""

    engines: dict[EngineKey, EngineSample]
    started_s: float | None
    facts: CacheFacts
    engine: str  # "vllm", "sglang", "tensorrt_llm"
    role: str = ""  # "prefill" or "decode", where it says so
    lora_adapters: tuple[str, ...] | None = None  # with requests, as of the engine's last step; None: not reported


def read_replica(text: str) -> ReplicaSample:
    """Read a replica's exposition; ExpositionError if it is malformed, holds an impossible count, or no engine."""
    names = _first_of(lambda begin: text.startswith(begin) or f"\n{begin}" in text)
    sample = _sample_of(read_samples(text, names.known | {START_TIME}), names, _declared(text, names))
    return replace(sample, lora_adapters=_lora_adapters(text, names, sample))


def replica_sample(samples: Sequence[Sample]) -> ReplicaSample:
    """Samples of one scrape, whoever made it; ExpositionError for an impossible count, or no engine."""
    names = _first_of(lambda begin: any(sample.name.startswith(begin) for sample in samples))
    return _sample_of(samples, names, frozenset())


def _first_of(is_there: Callable[[str], bool]) -> EngineNames:
    """The engine whose names are there."""
    for names in ENGINES:
        if any(map(is_there, names.begins)):
            return names
    raise ExpositionError("it holds no counters of an engine that is known")


def _sample_of(everything: Iterable[Sample], names: EngineNames, zeros: frozenset[str]) -> ReplicaSample:
    samples = [s for s in everything if all(s.labels.get(rank, "0") == "0" for rank in names.one_of)]
    by_engine: dict[EngineKey, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.name in names.known and sample.name not in names.facts_from:
            by_engine[_key(sample, names)].append(sample)
    if len(by_engine) > MOST_ENGINES:
        raise ExpositionError(f"more than {MOST_ENGINES} engines")
    engines = {key: _engine(of_engine, names, zeros) for key, of_engine in by_engine.items()}
    if not any(engine.counters for engine in engines.values()):
        raise ExpositionError(f"it holds no counters of {names.engine}")
    facts = names.facts(sample for sample in samples if sample.name in names.facts_from)
    return ReplicaSample(engines, _single(samples, START_TIME), facts, names.engine, _role(samples, names))


def _key(sample: Sample, names: EngineNames) -> EngineKey:
    """Without a rank's label it is the only one, or the first."""
    rank = sample.labels.get(names.engine_label, "0") if names.engine_label else "0"
    return EngineKey(sample.labels.get("model_name", ""), rank)


def _declared(text: str, names: EngineNames) -> frozenset[str]:
    """Our names of counters that the text declares: those are 0 where they have no sample yet."""
    if not names.lazy:
        return frozenset()
    kinds = ((wire, ours) for wire, meanings in names.wire.items() for kind, ours, _ in meanings if kind == "counter")
    found = {ours for wire, ours in kinds if f"# TYPE {wire} counter" in text}
    split = any(f"# TYPE {names.split.metric}{end} counter" in text for end in ("", "_total"))
    return frozenset(found | (names.split.ours if split else set()))


def _engine(samples: list[Sample], names: EngineNames, zeros: frozenset[str]) -> EngineSample:
    heard = _Heard(names)
    for sample in samples:
        for kind, ours, rank in names.wire.get(sample.name, ()):
            heard.by_kind[kind](sample, ours, rank)
    engine = EngineSample(gauges=heard.gauges, asleep=_is_asleep(samples, names))
    engine.created_s = _single(samples, names.created)
    engine.counters = {ours: ranks[min(ranks)] for ours, ranks in heard.counts.items()}
    if engine.counters:
        engine.counters = dict.fromkeys(zeros, 0.0) | engine.counters
    for ours, rank in sorted(heard.lines, reverse=True):  # the preferred name comes last and stays
        if (buckets := _buckets(heard.lines[ours, rank], heard.sums.get((ours, rank)))) is not None:
            engine.histograms[ours] = buckets
    engine.not_reported = OURS - engine.counters.keys() - engine.gauges.keys() - {ours for ours, _ in heard.lines}
    return engine


class _Heard:
    """One engine's samples, added up by our name and the rank of the name that they came under."""

    def __init__(self, names: EngineNames) -> None:
        self.names = names
        self.counts: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.gauges: dict[str, float] = {}
        self.lines: dict[tuple[str, int], dict[float, float]] = defaultdict(lambda: defaultdict(float))
        self.sums: dict[tuple[str, int], float] = defaultdict(float)
        self.by_kind: dict[str, Callable[[Sample, str, int], None]] = {
            "counter": self._counter,
            "duration": self._duration,
            "split": partial(self._split, names.split),
            "source": partial(self._split, names.prompt_sources),
            "reason": self._reason,
            "gauge": self._gauge,
            "bucket": self._bucket,
            "sum": self._sum,
        }

    def _counter(self, sample: Sample, ours: str, rank: int) -> None:
        self.counts[ours][rank] += checked_count(sample)

    def _duration(self, sample: Sample, ours: str, rank: int) -> None:
        """A histogram's sum of seconds, counted in milliseconds."""
        self.counts[ours][rank] += checked_count(replace(sample, value=1000 * sample.value))

    def _split(self, split: Split | None, sample: Sample, _ours: str, rank: int) -> None:
        """What the label names gets the count; whatever else the counter tells of is no longer unknown."""
        if split is None:
            return
        for ours in split.ours:
            self.counts[ours][rank] += 0.0
        for ours in split.values.get(sample.labels.get(split.label, ""), split.otherwise):
            self.counts[ours][rank] += checked_count(sample)

    def _reason(self, sample: Sample, _ours: str, _rank: int) -> None:
        """A gauge by the label ``reason``; reasons that are not listed are left out."""
        split = self.names.waiting_reasons
        if split is not None and 0 <= sample.value <= MOST:
            for ours in split.values.get(sample.labels.get(split.label, ""), ()):
                self.gauges[ours] = self.gauges.get(ours, 0.0) + sample.value

    def _gauge(self, sample: Sample, ours: str, rank: int) -> None:
        if 0 <= sample.value <= MOST and (rank == 0 or ours not in self.gauges):
            self.gauges[ours] = sample.value

    def _bucket(self, sample: Sample, ours: str, rank: int) -> None:
        self.lines[ours, rank][bucket_edge(sample)] += checked_count(sample)

    def _sum(self, sample: Sample, ours: str, rank: int) -> None:
        if abs(sample.value) <= MOST:
            self.sums[ours, rank] += sample.value


def _buckets(lines: dict[float, float], total_sum: float | None) -> Buckets | None:
    """None for a histogram that was torn: its distribution is unknown for this scrape, its counters are not."""
    try:
        return from_cumulative(lines.items(), total_sum)
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


def _single(samples: Iterable[Sample], name: str | None) -> float | None:
    """The one finite value of a name; None where it is absent or given more than once."""
    values = [sample.value for sample in samples if sample.name == name and math.isfinite(sample.value)]
    return values[0] if len(values) == 1 else None


def _is_asleep(samples: Iterable[Sample], names: EngineNames) -> bool:
    states = [s.value for s in samples if s.name == names.sleep_state and s.labels.get("sleep_state") == "awake"]
    return states == [0.0]


def _lora_adapters(text: str, names: EngineNames, sample: ReplicaSample) -> tuple[str, ...] | None:
    """Sorted, without repetition; "..." stands for those above MOST_ADAPTERS. None where it may be wrong (T9)."""
    if names.lora_adapters is None or sample.started_s is None or len(sample.engines) != 1:
        return None
    labels = newest_labels(text, names.lora_adapters.metric)
    if labels is None or not labels.keys() >= set(names.lora_adapters.labels):
        return None
    listed = {name for label in names.lora_adapters.labels for name in labels[label].split(",")} - {""}
    kept = tuple(name[:ADAPTER_CHARS] for name in sorted(listed)[:MOST_ADAPTERS])
    return (*kept, "...") if len(listed) > MOST_ADAPTERS else kept


def _role(samples: Iterable[Sample], names: EngineNames) -> str:
    """Which half of a split it is, if all its series agree."""
    told = {sample.labels[names.role_label] for sample in samples if names.role_label in sample.labels}
    return told.pop() if len(told) == 1 and told <= ROLES else ""
