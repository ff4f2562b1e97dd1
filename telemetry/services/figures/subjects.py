"""Whose figures a page shows: everybody's, a pool's, those of one of its task groups, or a replica's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controlplane.models import Pool, Replica
from telemetry.services.figures.overview import Pools, names_of, replicas_of


class Kind(StrEnum):
    """What a subject is."""

    FLEET = "fleet"
    POOL = "pool"
    GROUP = "group"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Subject:
    """``among`` are the pools that count (None: all there are); the rest narrows them to one object."""

    among: Pools = None
    pool: Pool | None = None
    group: str | None = None  # of ``pool``; "": requests of no task group
    replica: Replica | None = None

    @classmethod
    def of_pool(cls, pool: Pool, group: str | None = None) -> Subject:
        """A pool, or one of its task groups."""
        return cls([pool], pool, group)

    @classmethod
    def of_replica(cls, replica: Replica) -> Subject:
        """A replica; its pool has to be there already."""
        return cls([replica.pool], replica.pool, None, replica)

    @property
    def kind(self) -> Kind:
        """What it is."""
        if self.replica is not None:
            return Kind.REPLICA
        if self.group is not None:
            return Kind.GROUP
        return Kind.POOL if self.pool is not None else Kind.FLEET

    def replicas(self) -> list[Replica]:
        """Those whose engines count: all that may serve it. At most one query."""
        return [self.replica] if self.replica is not None else replicas_of(self.among)

    def pool_names(self) -> list[str] | None:
        """Its pools as the routers name them; None for all."""
        return names_of(self.among)
