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
