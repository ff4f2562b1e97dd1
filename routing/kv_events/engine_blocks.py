"""The blocks that one engine has cached, as its KV events report them.

Theory of operation. An engine's block hash depends on its release, algorithm and seed. So each block gets a *token key*
as well: a chained hash of its token ids, adapter and extra keys, which is the same for all engines. The blocks of one
event form a *stored run*. A run whose parent is not known, because it was stored before the router began to follow the
events, has no keys and no depth.

The same hash may be in several physical blocks; it leaves the cache with the last of them. Only device memory counts,
and of several groups of cache layers only the first with full attention, because the others have the same prompts.

Bounds. ``max_blocks`` limits the hashes of one engine; beyond it the ones stored first are forgotten, which are the
next ones that the engine evicts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

from xxhash import xxh3_64_intdigest

from routing.kv_events.decoding import FULL_ATTENTION, BlockHash, BlockRemoved, BlockStored

DEVICE: Final = frozenset({None, "GPU"})  # the name of device memory on every platform
MAX_BLOCK: Final = 1 << 40  # above every position
_TOKEN_BYTES: Final = array("I").itemsize


class StoredRun:
    """Consecutive blocks that one event stored."""

    __slots__ = ("depth", "hashes", "keys", "parent", "stored_s")

    def __init__(
        self, hashes: list[BlockHash], parent: Place | None, keys: array[int], depth: int, stored_s: float
    ) -> None:
        self.hashes = hashes
        self.parent = parent  # the block before the first; None: there is none, or it is unknown
        self.keys = keys  # token keys; empty: unknown
        self.depth = depth  # blocks of the prompt before the first; 0 if that is unknown
        self.stored_s = stored_s

    @property
    def end(self) -> int:
        """Blocks of the prompt up to the last of this run."""
        return self.depth + len(self.hashes)

    def keys_upwards(self, position: int) -> Iterator[tuple[int, int]]:
        """``(token key, blocks of the prompt up to it)`` of a block and of all before it, the last first."""
        run: StoredRun | None = self
        while run is not None:
            for at in range(position, -1, -1):
                yield run.keys[at], run.depth + at + 1
            run, position = run.parent or (None, 0)


Place = tuple[StoredRun, int]  # a block: its run and its position there


class EngineBlocks:
    """The cached blocks of one engine. Times are of the router's clock."""

    def __init__(self, max_blocks: int) -> None:
        self.block_tokens = 0  # of the latest stored block; 0: none was stored
        self.is_complete = False  # whether all events since the engine's start were seen
        self.blocks = 0  # copies included
        self.max_seen_blocks = 0
        self._max_blocks = max_blocks
        self._places: dict[BlockHash, Place] = {}  # of the first copy, in the order of storage
        self._copies: dict[BlockHash, int] = {}  # beyond the first
        self._keys: set[int] = set()
        self._group: int | None = None

    def __len__(self) -> int:
        """Distinct hashes."""
        return len(self._places)

    def has_key(self, key: int) -> bool:
        """Whether a block with this token key is cached."""
        return key in self._keys

    def clear(self, *, is_complete: bool) -> None:
        """Forget all blocks. ``is_complete``: because the engine has none, not because they are unknown."""
        self._places.clear()
        self._copies.clear()
        self._keys.clear()
        self.blocks, self.is_complete = 0, is_complete

    def store(self, event: BlockStored, now_s: float) -> StoredRun | None:
        """Add the blocks of an event; None if they are not in device memory or of another group of layers."""
        if event.medium not in DEVICE or event.kind not in FULL_ATTENTION or not event.hashes:
            return None
        if self._group is None:
            self._group = event.group
        if event.group != self._group:
            return None
        self.block_tokens = event.block_tokens
        run = self._run_of(event, now_s)
        if self._places.keys().isdisjoint(event.hashes):
            self._places.update(
                zip(event.hashes, [(run, position) for position in range(len(event.hashes))], strict=True)
            )
            self._keys.update(run.keys)
        else:
            self._add_copies(run)
        self.blocks += len(event.hashes)
        self.max_seen_blocks = max(self.max_seen_blocks, self.blocks)
        while len(self._places) > self._max_blocks:
            self._forget_oldest()
        return run

    def remove(self, event: BlockRemoved) -> dict[StoredRun, int]:
        """Remove one copy of each block of an event.

        Returns the runs of those that are no longer cached, with the lowest position of a removed block in each.
        """
        lowest: dict[StoredRun, int] = {}
        if event.medium not in DEVICE or event.group != (self._group or 0):
            return lowest
        places, copies, keys = self._places, self._copies, list[int]()
        for hash_ in event.hashes:
            if hash_ in copies:
                self._remove_copy(hash_)
                self.blocks -= 1
            elif (place := places.pop(hash_, None)) is not None:
                run, position = place
                self.blocks -= 1
                if run.keys:
                    keys.append(run.keys[position])
                if position < lowest.get(run, MAX_BLOCK):
                    lowest[run] = position
        self._keys.difference_update(keys)
        return lowest

    def _add_copies(self, run: StoredRun) -> None:
        """Add blocks of which some are cached already."""
        for position, hash_ in enumerate(run.hashes):
            if hash_ in self._places:
                self._copies[hash_] = self._copies.get(hash_, 0) + 1
            else:
                self._places[hash_] = run, position
                self._keys.update(run.keys[position : position + 1])

    def _remove_copy(self, hash_: BlockHash) -> None:
        self._copies[hash_] -= 1
        if not self._copies[hash_]:
            del self._copies[hash_]

    def _forget_oldest(self) -> None:
        hash_ = next(iter(self._places))
        run, position = self._places.pop(hash_)
        self.blocks -= 1 + self._copies.pop(hash_, 0)
        self._keys.difference_update(run.keys[position : position + 1])

    def _run_of(self, event: BlockStored, now_s: float) -> StoredRun:
        parent = None if event.parent is None else self._places.get(event.parent)
        if event.parent is not None and (parent is None or not parent[0].keys):
            return StoredRun(event.hashes, None, array("Q"), 0, now_s)
        seed = xxh3_64_intdigest(event.adapter) if parent is None else parent[0].keys[parent[1]]
        depth = 0 if parent is None else parent[0].depth + parent[1] + 1
        return StoredRun(event.hashes, parent, token_keys(event, seed), depth, now_s)


def token_keys(event: BlockStored, key: int) -> array[int]:
    """Token keys of an event's blocks, the first one chained to ``key``. 0.4 us a block of 16 tokens."""
    data, size, extra_keys = event.tokens.tobytes(), event.block_tokens * _TOKEN_BYTES, event.extra_keys
    blocks = [data[at : at + size] for at in range(0, len(data), size)]
    if extra_keys is not None and any(extra_keys):
        blocks = [block + extra for block, extra in zip(blocks, extra_keys, strict=True)]
    return array("Q", [key := xxh3_64_intdigest(block, key) for block in blocks])
