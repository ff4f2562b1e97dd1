"""What requests are placed at: replicas, or the data-parallel ranks of one.

A replica with several ranks answers at one address, and ``X-data-parallel-rank`` says which rank computes. Each rank
has a KV cache and a queue of its own, so each is a target: with points on the ring, a load and a residency. What is of
the server as a whole stays the replica's: its health, its breaker, its connections, its name in figures. Where texts
speak of a replica's load, home or holding, a target's is meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from routing.core.types import TargetId
from routing.schema import ReplicaConfig

MARK: Final = "#"  # between a replica's name, in which it cannot stand, and a rank


class Target(NamedTuple):
    """Where a request can go."""

    id: TargetId
    replica: ReplicaConfig
    rank: int | None  # None: the replica has only one


def rank_of(target: TargetId) -> int | None:
    """The data-parallel rank that a target is; None where its replica has only one."""
    _, mark, rank = target.partition(MARK)
    return int(rank) if mark else None


def targets_of(replica: ReplicaConfig) -> Iterator[Target]:
    """A replica's ranks, or itself."""
    if replica.data_parallel_size == 1:
        yield Target(TargetId(replica.name), replica, None)
        return
    for rank in range(replica.data_parallel_size):
        yield Target(TargetId(f"{replica.name}{MARK}{rank}"), replica, rank)
