"""Prometheus text format: headers, labels, histograms of seconds, and the process's own metrics.

Theory of operation. PromQL adds series up by ``le``, so every series of a histogram must have the same edges, even
for empty buckets. Histograms are counted in buckets that are 5 % wide; exposing all 275 edges in every series would
make the text ten times as long. Prometheus therefore gets ``EXPOSED_EDGES``, every 11th edge: each is an edge of the
fine histogram, so the cumulative counts are exact, and ``histogram_quantile`` finds the right bucket. Warmpath reads
the non-empty fine buckets (``/metrics?buckets=fine``), from which a quantile is off by 2.5 % at most.
"""

from __future__ import annotations

import os
import resource
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate, compress, pairwise
from pathlib import Path
from typing import Final

from routing.http.tasks import failures

PREFIX: Final = "warmpath_router_"


def header(name: str, kind: str, text: str, prefix: str = PREFIX) -> Iterable[str]:
    """The HELP and TYPE lines of a metric."""
    return (f"# HELP {prefix}{name} {text}", f"# TYPE {prefix}{name} {kind}")


def labels(**values: object) -> str:
    """Label pairs, escaped, in the order given."""
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


EDGES: Final = [0.001 * 1.05**i for i in range(275)]  # seconds, 1 ms to 10.7 minutes; inclusive upper edges
EXPOSED_EDGES: Final = EDGES[28::11]  # seconds, 3.9 ms to 8.8 minutes, each 1.71 times the one before
_LABELS: Final = [repr(edge) for edge in EDGES]
# The fine buckets below each exposed edge and above the one before; the last ones are above every exposed edge.
_SLICES: Final = [slice(*ends) for ends in pairwise([0, *range(29, 276, 11), 276])]
_EXPOSED_LABELS: Final = [*_LABELS[28::11], "+Inf"]


def bucket_of(seconds: float) -> int:
    """Number of a value's bucket, looked up once for all histograms that count the value."""
    return bisect_left(EDGES, seconds)


class Histogram:
    """Counts per bucket; the last one is for values above every edge."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * (len(EDGES) + 1)))
        self._sum = 0.0

    def observe(self, seconds: float, bucket: int | None = None) -> None:
        """Count one value; ``bucket`` is its ``bucket_of`` if the caller knows it."""
        self._counts[bucket_of(seconds) if bucket is None else bucket] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str, *, is_fine: bool = False) -> Iterator[str]:
        """Prometheus text: the buckets of ``EXPOSED_EDGES``, or the non-empty ones of all edges (``is_fine``)."""
        counts, total = self._counts[:], self._sum  # a consistent copy
        buckets = _fine(counts) if is_fine else _exposed(counts)
        for label, cumulative in buckets:
            yield f'{name}_bucket{{{labels},le="{label}"}} {cumulative}'
        yield f"{name}_sum{{{labels}}} {total!r}"
        yield f"{name}_count{{{labels}}} {sum(counts)}"


def _fine(counts: array[int]) -> Iterator[tuple[str, int]]:
    cumulative = 0
    for index in compress(range(len(EDGES)), counts):
        cumulative += counts[index]
        yield _LABELS[index], cumulative
    yield "+Inf", cumulative + counts[-1]


def _exposed(counts: array[int]) -> Iterator[tuple[str, int]]:
    return zip(_EXPOSED_LABELS, accumulate(sum(counts[part]) for part in _SLICES), strict=True)


def exposed_edge(edge: float) -> float:
    """The smallest exposed edge that is not below a fine one; infinity if there is none."""
    index = bisect_left(EXPOSED_EDGES, edge)
    return EXPOSED_EDGES[index] if index < len(EXPOSED_EDGES) else float("inf")


_started_at: Final = time.time()


def process_lines() -> Iterator[str]:
    """Prometheus text of this process: failures of background loops, start time, CPU time and memory."""
    yield from header("loop_failures_total", "counter", "Internal errors in background loops, which continued.")
    for loop, count in failures().items():
        yield f"{PREFIX}loop_failures_total{{{labels(loop=loop)}}} {count}"
    usage = resource.getrusage(resource.RUSAGE_SELF)
    for name, kind, text, value in (
        ("start_time_seconds", "gauge", "Unix time at which the process started.", _started_at),
        ("cpu_seconds_total", "counter", "User and system CPU time.", usage.ru_utime + usage.ru_stime),
        ("resident_memory_bytes", "gauge", "Resident memory.", _resident_bytes(usage.ru_maxrss)),
    ):
        yield from header(name, kind, text, prefix="process_")
        yield f"process_{name} {value}"


def _resident_bytes(peak_kib: int) -> int:
    """Resident memory from /proc; its peak if there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_kib * 1024
