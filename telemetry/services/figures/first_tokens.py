"""Time to first token of one subject: its histograms by either clock, and the share that came in time (T1, T6).

Routers time streamed responses only, whose first byte is their first token (T1b); of plain ones they know the latency
of the whole response. Every TTFT of theirs therefore goes with the share of responses that it rests on. Engines time
all requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from telemetry.metrics.histograms import Merged, share_at_most
from telemetry.metrics.windows import Window
from telemetry.services.figures.subjects import Kind, Subject
from telemetry.storage import sums


@dataclass(frozen=True, slots=True)
class InTime:
    """The share of requests whose first token came within a bucket's edge, which is exact; all None while unknown."""

    ratio: float | None = None
    edge_s: float | None = None
    source: str | None = None  # "router" or "engine": whose clock


def by_router(subject: Subject, window: Window, *, whole: bool = False) -> dict[datetime, Merged]:
    """Per step, by the routers' clock. One query."""
    by = _BY.get(subject.kind)
    return _of(subject, sums.router_ttft(subject.pool_names(), window, by=by, whole=whole))


def plain_latency(subject: Subject, window: Window, *, whole: bool = False) -> dict[datetime, Merged]:
    """Per step, seconds to the last byte of responses that were not streamed, by the routers' clock. One query."""
    by = _BY.get(subject.kind)
    return _of(subject, sums.router_latency(subject.pool_names(), window, streamed=False, by=by, whole=whole))


_BY = {Kind.GROUP: "group", Kind.REPLICA: "replica"}


def _of(subject: Subject, found: dict[tuple[Any, datetime], Merged]) -> dict[datetime, Merged]:
    """What is of a subject, without its key."""
    if subject.kind in _BY and subject.pool is not None:
        name = subject.group if subject.replica is None else subject.replica.name
        found = {key: part for key, part in found.items() if key[0] == (subject.pool.name, name)}
    return sums.merged_over_keys(found)


def by_reuse(subject: Subject, window: Window, reuse: str) -> dict[datetime, Merged]:
    """Per step, of answers that came mostly from the cache ("hit") or did not ("miss"); by the routers. One query."""
    found = sums.router_ttft(subject.pool_names(), window, by="reuse")
    wanted = {
        key: part
        for key, part in found.items()
        if key[0][2] == reuse and (subject.group is None or key[0][1] == subject.group)
    }
    return sums.merged_over_keys(wanted)


def by_engine(subject: Subject, window: Window, *, whole: bool = False) -> dict[datetime, Merged]:
    """Per step, by the engines' clock; nothing for a task group, of which engines know nothing. At most two queries."""
    if subject.kind is Kind.GROUP:
        return {}
    if subject.replica is None:
        return sums.merged_over_keys(sums.pools_engine_ttft(subject.pool_names(), window, whole=whole))
    return sums.merged_over_keys(sums.engine_ttft([subject.replica.pk], window, whole=whole))


def by_any(subject: Subject, window: Window, *, whole: bool = False) -> tuple[str, dict[datetime, Merged]]:
    """(whose clock, per step): the routers' where they observed anything, else the engines'."""
    merged = by_router(subject, window, whole=whole)
    return ("router", merged) if merged else ("engine", by_engine(subject, window, whole=whole))


def edge_up_to(objective_s: float, parts: Iterable[Merged]) -> float | None:
    """The last edge up to an objective that all of these histograms have; None where there is none."""
    layouts = {part.buckets.edges for part in parts}
    common = set.intersection(*map(set, layouts)) if layouts else set()
    return max((edge for edge in common if edge <= objective_s), default=None)


def in_time(subject: Subject, window: Window, objective_s: float) -> InTime:
    """The share of a window's requests within the last bucket edge up to an objective."""
    source, merged = by_any(subject, window, whole=True)
    together = sums.remerged(merged.values())
    edge = edge_up_to(objective_s, merged.values())
    if together is None or edge is None:
        return InTime()
    return InTime(share_at_most(together.buckets, edge), edge, source)
