"""A snapshot of the residency index, from which a router that restarts learns what replicas probably have cached.

Theory of operation. A snapshot has one record for each prompt that a replica has cached, the latest prompt first. A
record has the prompt's last blocks, the hash of the block before them (the *parent*), and the time of use. It leaves
out blocks that a later prompt used too, so a beginning that many prompts share is stored once. The parent is always in
an earlier record, so a snapshot may end after any record. ``Residency.restore`` restores the prompts, the oldest first,
which rebuilds the LRU order. Several snapshots of one replica, such as those of several workers, are merged by time.

A record is a header (time of use in seconds since 1970, tokens of the tail, number of runs, hash of the parent or 0),
the blocks and tokens of each run, and 64-bit hashes, in this machine's byte order. Hashes are keyed, so a snapshot
reveals nothing of a prompt's text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from heapq import merge
from struct import Struct, error
from typing import Final

from routing.balancing.block_index import ReplicaBlocks, Tail, Use
from routing.balancing.residency import Residency
from routing.types import TargetId

_HEADER: Final = Struct("=dIIQ")
_RUN: Final = Struct("=II")
HASH_BYTES: Final = 8
NO_HASH: Final = 0  # the parent of a prompt's first block


class SavedUse:
    """One prompt of a snapshot."""

    def __init__(
        self, used_at: float, tail_tokens: int, parent: int, runs: list[tuple[int, int]], blocks: array[int]
    ) -> None:
        self.used_at = used_at  # seconds since 1970
        self.tail_tokens = tail_tokens
        self.runs = runs  # blocks of each run, and their tokens as an engine has reported them, 0 if they are not known
        self.parent = parent  # hash of the block before the first of ``blocks``, or NO_HASH
        self.blocks = blocks


class SavedUses:
    """The prompts of one replica in one snapshot, the latest first."""

    def __init__(self, uses: list[SavedUse]) -> None:
        self.uses = uses
        parents = {use.parent for use in uses}
        self._positions: dict[int, tuple[int, int]] = {}  # hash -> (index of its use, blocks up to it)
        for index, use in enumerate(uses):
            for hash_ in parents.intersection(use.blocks):
                self._positions.setdefault(hash_, (index, use.blocks.index(hash_) + 1))

    def chain(self, index: int) -> array[int] | None:
        """All blocks of a prompt; None if the snapshot lacks its beginning."""
        parts: list[array[int]] = [self.uses[index].blocks]
        parent = self.uses[index].parent
        while parent != NO_HASH:
            position = self._positions.get(parent)
            if position is None or position[0] >= index:
                return None
            index, blocks = position
            parts.append(self.uses[index].blocks[:blocks])
            parent = self.uses[index].parent
        chain = array("Q")
        for part in reversed(parts):
            chain.extend(part)
        return chain


def encode_uses(replica: ReplicaBlocks, now_s: float, now_at: float, max_bytes: int) -> Iterator[bytes]:
    """The records of a replica's latest prompts, of at most ``max_bytes`` in total.

    ``now_s`` is the current time by the residency's clock, ``now_at`` in seconds since 1970. Requests may change the
    replica's blocks between two records.
    """
    for use in reversed(list(replica.uses)):
        if use not in replica.uses:
            continue
        record = _encode(use, now_at - (now_s - use.used_s))
        max_bytes -= len(record)
        if max_bytes < 0:
            return
        yield record


def _encode(use: Use, used_at: float) -> bytes:
    blocks, runs, tail_tokens = array("Q"), bytearray(), 0
    for run in use.path[use.first :]:
        if isinstance(run, Tail):
            tail_tokens = run.tokens
        else:
            blocks.extend(run.hashes)
            runs += _RUN.pack(run.length, run.tokens if run.is_learned else 0)
    parent = use.path[use.first - 1].last if use.first else NO_HASH
    return _HEADER.pack(used_at, tail_tokens, len(runs) // _RUN.size, parent) + bytes(runs) + blocks.tobytes()


def decode_uses(data: bytes) -> SavedUses:
    """The records of ``encode_uses``; ValueError if there is anything else."""
    uses, at = [], 0
    try:
        while at < len(data):
            used_at, tail_tokens, count, parent = _HEADER.unpack_from(data, at)
            start = at + _HEADER.size + count * _RUN.size
            runs = list(_RUN.iter_unpack(data[at + _HEADER.size : start]))
            length = sum([blocks for blocks, _ in runs])
            at = start + length * HASH_BYTES
            blocks = array("Q")
            blocks.frombytes(data[start:at])
            if len(runs) != count or len(blocks) != length or 0 in [size for size, _ in runs]:
                raise ValueError("a record is not complete")
            uses.append(SavedUse(used_at, tail_tokens, parent, runs, blocks))
    except error as cause:
        raise ValueError(str(cause)) from None
    return SavedUses(uses)


def restore_uses(
    residency: Residency,
    target: TargetId,
    snapshots: Iterable[SavedUses],
    now_s: float,
    now_at: float,
    max_age_s: float,
) -> Iterator[int]:
    """Restore the prompts of a replica that are at most ``max_age_s`` old; yields the number of blocks of each."""
    oldest_first = [
        [(use.used_at, index, snapshot) for index, use in reversed(list(enumerate(snapshot.uses)))]
        for snapshot in snapshots
    ]
    for used_at, index, snapshot in merge(*oldest_first, key=_time_of):
        age_s = max(0.0, now_at - used_at)
        chain = snapshot.chain(index) if age_s <= max_age_s else None
        if chain:
            use = snapshot.uses[index]
            residency.restore(target, chain, now_s - age_s, use.tail_tokens, use.runs)
            yield len(chain)


def _time_of(item: tuple[float, int, SavedUses]) -> float:
    return item[0]
