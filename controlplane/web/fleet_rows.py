"""What the fleet page tells of a pool's replica sources.

How far joining replicas are that routers warm up before they take traffic, as routers told in their heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from django.db.models import Prefetch, QuerySet

from controlplane.discovery import KINDS
from controlplane.models import DiscoveredReplica, DiscoveredState, Pool, Replica, ReplicaSource, Router

MOST_SHOWN = 50  # of each sort; REST has all


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A source on the fleet page, with those of its engines that are not simply replicas."""

    source: ReplicaSource
    kind: str
    waiting: list[DiscoveredReplica]  # for a person, or until they are ready
    missing: list[DiscoveredReplica]  # replicas that the source does not find, or cannot bring in line
    dismissed: list[DiscoveredReplica]


def with_sources() -> Prefetch[str]:
    """What a query of pools prefetches, so that ``source_lines`` asks nothing more."""
    rows = DiscoveredReplica.objects.select_related("replica").order_by("key")
    return Prefetch("sources", ReplicaSource.objects.defer("encrypted").prefetch_related(Prefetch("discovered", rows)))


def source_lines(pool: Pool) -> list[SourceLine]:
    """A pool's sources, by name."""
    return [_line(source) for source in pool.sources.all()]


def _line(source: ReplicaSource) -> SourceLine:
    rows = list(source.discovered.all())
    return SourceLine(
        source,
        KINDS[source.kind].label if source.kind in KINDS else source.kind,
        waiting=_few(row for row in rows if row.is_open),
        missing=_few(row for row in rows if row.replica and (row.missing_since or row.drained_at or row.problem)),
        dismissed=_few(row for row in rows if row.state == DiscoveredState.DISMISSED and row.missing_since is None),
    )


def _few(rows: Iterable[DiscoveredReplica]) -> list[DiscoveredReplica]:
    return list(islice(rows, MOST_SHOWN))


Told = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """One replica that is kept back, all routers that warm it up together."""

    replica: Replica
    routers: int
    prefixes_done: int
    prefixes: int
    tokens_done: int
    tokens: int  # estimated

    @property
    def ratio(self) -> float:
        """The share that is done, 0 to 1, by tokens; 0 before routers know what to send."""
        return min(1.0, self.tokens_done / self.tokens) if self.tokens else 0.0


def warm_ups(replicas: QuerySet[Replica]) -> list[WarmUp]:
    """Those of the replicas that are warmed up now, by name. A query, and another where there are any.

    A router that is lost tells nothing any more, and neither does its last word.
    """
    told: dict[str, list[Told]] = {}
    for warming in Router.objects.filter(lost_at=None).exclude(warming={}).values_list("warming", flat=True):
        for name, progress in warming.items():
            told.setdefault(name, []).append(progress)
    if not told:
        return []
    rows = replicas.filter(name__in=told).select_related("pool").order_by("name")
    return [_together(replica, told[replica.name]) for replica in rows]


def _together(replica: Replica, told: list[Told]) -> WarmUp:
    def total(what: str) -> int:
        return sum(progress.get(what, 0) for progress in told)

    return WarmUp(replica, len(told), total("prefixes_done"), total("prefixes"), total("tokens_done"), total("tokens"))
