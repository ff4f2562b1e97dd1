"""Metrics of all workers, summed, including the last ones of workers that have exited.

Theory of operation. The text of a worker is parsed into samples that may be added: bucket counts are made
non-cumulative, because a worker sends only the non-empty fine buckets. ``lines`` formats the sums as one process
formats its own metrics. Counters and histograms are added, and those of exited workers stay in the sums, so that no sum
decreases. Gauges are added over the running workers, except those in ``GAUGES``.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct

from routing.observability.metrics import (
    EXPOSED_EDGES,
    GRACE_S,
    POLICY_LATENCY,
    POLICY_TTFT,
    PREFIX,
    ConfiguredSeries,
    SeriesKey,
    exposed_edge,
)

Rule = Callable[[float, float], float]


def _sum_up_to_1(total: float, value: float) -> float:
    return min(1.0, total + value)


GAUGES: Mapping[str, Rule] = {
    "warmpath_router_replica_up": min,  # a worker sends nothing to a replica that it considers down
    "warmpath_router_replica_out": max,  # the same
    "warmpath_router_replica_warming": max,  # the same
    "warmpath_router_replica_share_ratio": min,
    "warmpath_router_kv_events_followed": min,  # each worker follows all engines
    "warmpath_router_kv_events_state_timestamp_seconds": max,
    "warmpath_router_kv_events_blocks": max,
    "warmpath_router_kv_events_offloaded_blocks": max,
    "warmpath_router_kv_events_lag_seconds": max,
    "warmpath_router_tokens_per_byte": max,  # each worker measures its own ratio
    "warmpath_router_pool_saturation_ratio": _sum_up_to_1,  # each worker's part of the replicas' prefill rate
    "warmpath_router_pool_prefill_tokens_per_second": max,  # each worker measures the rates of all replicas
    "warmpath_router_shared_state_peers": min,  # each worker hears all routers
    "warmpath_router_shared_state_age_seconds": max,
    "warmpath_router_response_cache_store_up": min,
    "warmpath_router_semantic_cache_state": max,  # with a store, all workers have the same state
    "warmpath_router_semantic_cache_recent_precision_ratio": min,
    "warmpath_router_semantic_cache_precision_lower_bound_ratio": min,
    "warmpath_router_semantic_cache_window_checks": max,  # the same checks in each worker
    "warmpath_router_semantic_cache_shared_checks": max,  # the same
    "process_start_time_seconds": min,
}
_label = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"').finditer
_escape = re.compile(r"\\(.)")


class Family(Struct):
    """One metric: kind, help, and samples by their name and labels as text."""

    kind: str
    text: str
    samples: dict[str, float]


Families = dict[str, Family]


def parse(text: str) -> Families:
    """The metrics of a worker, with non-cumulative buckets."""
    families: Families = {}
    family, help_text, series, cumulative = Family("", "", {}), "", "", 0.0
    for line in text.splitlines():
        if line.startswith("# HELP "):
            help_text = line.split(" ", 3)[3]
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            family = families[name] = Family(kind, help_text, {})
        elif line:
            key, _, number = line.rpartition(" ")
            value = _number(number)
            if family.kind == "histogram" and 'le="' in key:
                if (series_of_bucket := key.rpartition('le="')[0]) != series:
                    series, cumulative = series_of_bucket, 0.0
                value, cumulative = value - cumulative, value
            family.samples[key] = value
    return families


def add(total: Families, added: Families, *, gauges: bool = True) -> None:
    """Add metrics to a total; without gauges for exited workers."""
    for name, family in added.items():
        if family.kind == "gauge" and not gauges:
            continue
        total_samples = total.setdefault(name, Family(family.kind, family.text, {})).samples
        rule = GAUGES.get(name)
        for key, value in family.samples.items():
            total_value = total_samples.get(key)
            if total_value is None:
                total_samples[key] = value
            else:
                total_samples[key] = total_value + value if rule is None else rule(total_value, value)


def lines(families: Families, *, all_buckets: bool = False) -> Iterator[str]:
    """Prometheus text; histograms with all non-empty buckets if ``all_buckets``."""
    for name, family in families.items():
        yield f"# HELP {name} {family.text}"
        yield f"# TYPE {name} {family.kind}"
        if family.kind == "histogram":
            yield from _histogram_lines(name, family.samples, all_buckets=all_buckets)
        else:
            yield from _sample_lines(family.samples.items())


def series_key(sample: str) -> SeriesKey:
    """The labels that identify a configured series: pool, group, replica, policy and revision."""
    values = {match[1]: _escape.sub(_unescaped, match[2]) for match in _label(sample)}
    revision = int(values.get("revision") or 0)
    return (
        values.get("pool", ""),
        values.get("group", ""),
        values.get("replica", ""),
        values.get("policy", ""),
        revision,
    )


def _histogram_lines(name: str, samples: Mapping[str, float], *, all_buckets: bool) -> Iterator[str]:
    """For each series its buckets, cumulative again, then sum and count."""
    buckets: dict[str, dict[float, float]] = {}
    for key, value in samples.items():
        series, separator, edge_text = key.rpartition('le="')
        if separator:
            buckets.setdefault(series, {})[float(edge_text[:-2])] = value
    for series, fine in buckets.items():
        counts = fine if all_buckets else _exposed_buckets(fine)
        cumulative = 0.0
        for edge in sorted(counts):
            cumulative += counts[edge]
            label = "+Inf" if edge == math.inf else repr(edge)
            yield f'{series}le="{label}"}} {_text(cumulative)}'
        labels = series.removeprefix(f"{name}_bucket{{").rstrip(",")
        totals = [f"{name}_{suffix}{{{labels}}}" for suffix in ("sum", "count")]
        yield from _sample_lines((key, samples[key]) for key in totals if key in samples)


def _exposed_buckets(fine: Mapping[float, float]) -> dict[float, float]:
    """The counts at the edges that every series has."""
    counts = dict.fromkeys((*EXPOSED_EDGES, math.inf), 0.0)
    for edge, value in fine.items():
        counts[exposed_edge(edge)] += value
    return counts


def _sample_lines(samples: Iterable[tuple[str, float]]) -> Iterator[str]:
    return (f"{key} {_text(value)}" for key, value in samples)


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


_CANARY_METRICS = (f"{PREFIX}{POLICY_TTFT}", f"{PREFIX}{POLICY_LATENCY}")  # kept only while their policy has a canary
_DROP_EARLY_S = 30.0  # before the workers drop a series, so that its sum disappears instead of decreasing


class MergedMetrics:
    """Sums over running and exited workers; a series is dropped 15 minutes after it left the configuration."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._exited: Families = {}
        self._left_at: dict[str, float] = {}  # when a sample was first seen to have left the configuration

    def add_exited(self, last_seen: Families, present: Iterable[Families], configured: ConfiguredSeries | None) -> None:
        """Retain the counters of a worker that exited; ``present`` are those of the others."""
        self.total([last_seen, *present], configured)  # drops expired series even if nobody scrapes
        add(self._exited, last_seen, gauges=False)

    def total(self, present: Iterable[Families], configured: ConfiguredSeries | None) -> Families:
        """Sums over all workers, without series that left the configuration too long ago."""
        total: Families = {}
        for families in (self._exited, *present):
            add(total, families)
        expired = self._expired({sample for family in total.values() for sample in family.samples}, configured)
        for families in (total, self._exited):
            for family in families.values():
                for sample in expired & family.samples.keys():
                    del family.samples[sample]
        return total

    def _expired(self, samples: set[str], configured: ConfiguredSeries | None) -> set[str]:
        """Of these samples, those that left the configuration too long ago."""
        if configured is None:
            return set()
        is_configured: dict[tuple[SeriesKey, bool], bool] = {}
        now, left_at = self._clock(), {}
        for sample in samples:
            lookup = series_key(sample), sample.startswith(_CANARY_METRICS)
            if lookup not in is_configured:
                is_configured[lookup] = (configured.has_canary if lookup[1] else configured.contains)(lookup[0])
            if not is_configured[lookup]:
                left_at[sample] = self._left_at.get(sample, now)
        self._left_at = left_at
        return {sample for sample, sample_left_at in left_at.items() if now - sample_left_at > GRACE_S - _DROP_EARLY_S}
