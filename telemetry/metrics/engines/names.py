"""What an engine calls our figures: a table that ``telemetry.metrics.engine`` reads texts by. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from telemetry.metrics.exposition import Sample

MOST_BLOCKS = 2**31 - 1  # of a cache, and tokens of a block
TIERS = ("device_tokens", "host_tokens", "p2p_tokens", "disk_tokens", "other_tokens")  # H4
COUNTERS = (
    "queries",
    "hits",
    "external_queries",
    "external_hits",
    *TIERS,
    "prompt_tokens",
    "generation_tokens",
    "preemptions",
    "finished",
)
GAUGES = ("running", "waiting", "kv_usage_ratio")
PROMPT_SOURCES = ("computed_prompt_tokens", "cached_prompt_tokens", "transferred_prompt_tokens")
DURATIONS = ("queue", "prefill", "block_lifetime", "block_idle", "block_reuse_gap")
# What only some engines have, or only with an option. Its absence is no fault, so ``not_reported`` leaves it out.
OPTIONAL_COUNTERS = (
    *PROMPT_SOURCES,
    "mm_cache_queries",  # items, not tokens
    "mm_cache_hits",
    *(name for of in DURATIONS for name in (f"{of}_ms", f"{of}_count")),
)
WAITING_REASONS = ("waiting_capacity", "waiting_deferred")  # requests, at the scrape
HISTOGRAMS = ("ttft", "itl")
OURS = frozenset((*COUNTERS, *GAUGES, *HISTOGRAMS))
Wire = Mapping[str, tuple[str, ...]]  # our name -> those on the wire, the preferred one first


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """A replica's KV cache, all its engines together."""

    block_tokens: int | None = None
    capacity_blocks: int | None = None  # usable ones


@dataclass(frozen=True, slots=True)
class Split:
    """A counter whose label says which of our names it belongs to; each is 0 where another one is there."""

    metric: str
    label: str
    values: Mapping[str, tuple[str, ...]]  # "": without the label
    otherwise: tuple[str, ...] = ()  # for values that are not listed

    @property
    def ours(self) -> frozenset[str]:
        """Every name of ours that it tells of."""
        return frozenset(name for names in (*self.values.values(), self.otherwise) for name in names)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A gauge whose labels list LoRA adapters, separated by commas. Its value is the Unix time of that state."""

    metric: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class EngineNames:
    """An engine's names. Counters are looked for with and without ``_total`` (H14); what is not listed it has not."""

    engine: str  # as a replica's page names it
    begins: tuple[str, ...]  # how lines of its own begin
    counters: Wire
    gauges: Wire
    histograms: Wire
    split: Split
    facts_from: frozenset[str]  # samples that ``facts`` is given
    facts: Callable[[Iterable[Sample]], CacheFacts]
    optional: Mapping[str, str] = field(default_factory=dict)  # of OPTIONAL_COUNTERS -> a counter on the wire
    durations: Mapping[str, str] = field(default_factory=dict)  # of DURATIONS -> a histogram of seconds
    prompt_sources: Split | None = None
    waiting_reasons: Split | None = None  # a gauge
    lora_adapters: AdapterInfo | None = None
    engine_label: str | None = None  # of a data-parallel rank (H15)
    role_label: str | None = None  # says whether it is one half of a prefill/decode split (H19)
    one_of: frozenset[str] = field(default_factory=frozenset)  # labels of ranks that count the same: 0 is read
    created: str | None = None  # when the counters were created (H9)
    sleep_state: str | None = None
    lazy: bool = False  # a counter has no sample before its first count: declared and absent is 0

    @cached_property
    def wire(self) -> dict[str, list[tuple[str, str, int]]]:
        """Name on the wire -> (kind, our name, rank among the names for it), of each of our names that it is."""
        names: dict[str, list[tuple[str, str, int]]] = {}
        for metric, rank in ((f"{self.split.metric}_total", 0), (self.split.metric, 1)):
            names.setdefault(metric, []).append(("split", "", rank))
        names |= self._optional_wire()
        for ours, wire in self.counters.items():
            for rank, name in enumerate(wire):
                names.setdefault(f"{name}_total", []).append(("counter", ours, 2 * rank))
                names.setdefault(name, []).append(("counter", ours, 2 * rank + 1))
        for ours, wire in self.gauges.items():
            for rank, name in enumerate(wire):
                names.setdefault(name, []).append(("gauge", ours, rank))
        for ours, wire in self.histograms.items():
            for rank, name in enumerate(wire):
                names.setdefault(f"{name}_bucket", []).append(("bucket", ours, rank))
                names.setdefault(f"{name}_sum", []).append(("sum", ours, rank))
        return names

    def _optional_wire(self) -> dict[str, list[tuple[str, str, int]]]:
        """The same of what only some engines have."""
        names = {metric: [("counter", ours, 0)] for ours, metric in self.optional.items()}
        for ours, metric in self.durations.items():
            names[f"{metric}_sum"] = [("duration", f"{ours}_ms", 0)]
            names[f"{metric}_count"] = [("counter", f"{ours}_count", 0)]
        if self.prompt_sources:
            names[f"{self.prompt_sources.metric}_total"] = [("source", "", 0)]
        if self.waiting_reasons:
            names[self.waiting_reasons.metric] = [("reason", "", 0)]
        return names

    @cached_property
    def known(self) -> frozenset[str]:
        """Every name on the wire that is of use."""
        others = {name for name in (self.created, self.sleep_state) if name}
        return frozenset(self.wire) | self.facts_from | others


def whole(value: str | float | None) -> int | None:
    """A count as a label or a gauge gives it; None for what is none."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and 0 < value <= MOST_BLOCKS else None
    return int(value) if value is not None and value.isdecimal() and 0 < int(value) <= MOST_BLOCKS else None
