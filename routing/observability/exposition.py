"""Prometheus text: the lines that introduce a metric, and labels.

Histograms of seconds: counted in buckets that are 5 % wide, exposed with few fixed edges or with all.

Theory of operation. PromQL adds series up by ``le``, so every series of a histogram has to have the same edges, whether
a bucket holds something or not. With all 275 edges in every series the exposition would be ten times as long.
Prometheus therefore gets ``EXPOSED_EDGES``, every 11th edge: each is an edge of the fine histogram, so the cumulative
counts are exact, and ``histogram_quantile`` finds the right bucket. Warmpath asks for the fine buckets
(``/metrics?buckets=fine``): only those that hold something, from which a quantile is off by 2.5 % at most.

What is of the process, whoever lives in it, as Prometheus text.
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
    """The lines that introduce a metric."""
    return (f"# HELP {prefix}{name} {text}", f"# TYPE {prefix}{name} {kind}")


def labels(**values: object) -> str:
    """Label pairs, escaped, in the order given."""
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


EDGES: Final = [0.001 * 1.05**i for i in range(275)]  # seconds, 1 ms to 10.7 minutes; inclusive upper edges
EXPOSED_EDGES: Final = EDGES[28::11]  # seconds, 3.9 ms to 8.8 minutes, each 1.71 times the one before
_LABELS: Final = [repr(edge) for edge in EDGES]
# Below each exposed edge, the fine buckets that make up its own count; the last ones are above every exposed edge.
_SLICES: Final = [slice(*ends) for ends in pairwise([0, *range(29, 276, 11), 276])]
_EXPOSED_LABELS: Final = [*_LABELS[28::11], "+Inf"]


def bucket_of(seconds: float) -> int:
    """Number of the bucket that a value falls into: looked for once, for all histograms that it enters."""
    return bisect_left(EDGES, seconds)


class Histogram:
    """Counts per bucket, with the last one for what is longer than every edge."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * (len(EDGES) + 1)))
        self._sum = 0.0

    def observe(self, seconds: float, bucket: int | None = None) -> None:
        """Count one value; ``bucket`` is its ``bucket_of``, where that is known."""
        self._counts[bucket_of(seconds) if bucket is None else bucket] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str, *, is_fine: bool = False) -> Iterator[str]:
        """Prometheus text: the buckets of ``EXPOSED_EDGES``, or the non-empty ones of all edges (``is_fine``)."""
        counts, total = self._counts[:], self._sum  # of one moment
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
    """The smallest exposed edge that is not below a fine one: where its observations are counted; inf above all."""
    index = bisect_left(EXPOSED_EDGES, edge)
    return EXPOSED_EDGES[index] if index < len(EXPOSED_EDGES) else float("inf")


_started_at: Final = time.time()


def process_lines() -> Iterator[str]:
    """What the operating system knows of it, and the mistakes that it went on after."""
    yield from header("loop_failures_total", "counter", "Mistakes of the router's own, in loops that went on.")
    for loop, count in failures().items():
        yield f"{PREFIX}loop_failures_total{{{labels(loop=loop)}}} {count}"
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = (
        ("start_time_seconds", "gauge", "Unix time at which the process started.", _started_at),
        ("cpu_seconds_total", "counter", "User and system CPU time.", usage.ru_utime + usage.ru_stime),
        ("resident_memory_bytes", "gauge", "Resident memory.", _resident_bytes(usage.ru_maxrss)),
    )
    for name, kind, text, value in figures:
        yield from header(name, kind, text, prefix="process_")
        yield f"process_{name} {value}"


def _resident_bytes(peak_kib: int) -> int:
    """Resident memory from /proc; elsewhere its peak, which is what there is."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_kib * 1024
