"""What the fleet page tells of a pool's replica sources."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from django.db.models import Prefetch

from controlplane.discovery import KINDS
from controlplane.models import DiscoveredReplica, DiscoveredState, Pool, ReplicaSource

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
    return Prefetch("sources", ReplicaSource.objects.defer("sealed").prefetch_related(Prefetch("discovered", rows)))


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
