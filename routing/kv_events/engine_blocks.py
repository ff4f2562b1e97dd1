"""The blocks that one engine has cached, as its KV events report them.

Theory of operation. Consecutive blocks of one prompt that were stored form a *stored run*. The engine's hash of a block
stands for it and everything before it, but depends on the engine's seed and algorithm. So each block also has a *key*,
which is the same for all engines that this process follows: a hash of its tokens, its extra keys (salt, media) and the
key before it, which is the adapter before the first block. Where the ids of tokens are not reported, hashes are keys.
The place of a run in its prompt, and so its keys, are unknown if its parent was stored before the router began to
follow the events.

The same hash may be in several physical blocks; it leaves the cache with the last of them. Of several groups of cache
layers only the first with full attention counts, because the others have the same prompts.

Lower cache tiers: engines that offload blocks to the host's memory or to disks report these copies by hash, with the
name of the medium. A block that device memory loses stays cached while a lower tier has a copy (*offloaded*).

There is one entry for each cached hash, which names its run. Engines evict the last block of a prompt first, so where
a removed block is in its run is mostly known without a search; the first search of a run indexes it.

Bounds. ``max_blocks`` limits the hashes of one engine in device memory, and those in lower tiers. Beyond it the ones
stored first are forgotten, which the engine will probably evict next.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final

from routing.kv_events.decoding import DEVICE, FULL_ATTENTION, BlockHash, Key, KvEvent

FORGOTTEN_PART: Final = 256  # of the limit, forgotten at once


class StoredRun:
    """Consecutive blocks that one event stored."""

    __slots__ = ("_left", "_positions", "depth", "hashes", "keys", "parent", "parent_position", "stored_s")

    def __init__(
        self,
        hashes: list[BlockHash],
        parent: StoredRun | None,
        parent_position: int,
        keys: list[Key],
        stored_s: float,
    ) -> None:
        self.hashes = hashes
        self.parent = parent  # the run of the block before the first; None: there is none, or it is unknown
        self.parent_position = parent_position  # of that block in its run
        self.keys = keys  # of each block; empty: its place in the prompt is unknown
        self.depth: int = 0 if parent is None else parent.depth + parent_position + 1  # blocks before; 0: or unknown
        self.stored_s = stored_s
        self._left = len(hashes)  # blocks up to the last one that may be cached
        self._positions: dict[BlockHash, int] | None = None  # of each block; None: none was searched

    @property
    def end(self) -> int:
        """Blocks of the prompt up to the last of this run."""
        return self.depth + len(self.hashes)

    def position(self, hash_: BlockHash) -> int:
        """The position of one of its blocks."""
        left = self._left - 1
        if left >= 0 and self.hashes[left] == hash_:
            return left
        if self._positions is None:
            self._positions = {}
            for position, each in enumerate(self.hashes):
                self._positions.setdefault(each, position)
        return self._positions[hash_]

    def remove(self, hash_: BlockHash) -> int:
        """Record that a block is no longer cached; its position. The next one is probably the one before it."""
        self._left = left = self.position(hash_)
        return left


class EngineBlocks:
    """The cached blocks of one engine. Times are of the router's clock."""

    def __init__(self, max_blocks: int) -> None:
        self.block_tokens = 0  # of the latest stored block; 0: none was stored
        self.is_complete = False  # whether all events since the engine's start were seen
        self.blocks = 0  # in device memory, copies included
        self.max_seen_blocks = 0  # in device memory at one time
        self.max_seen_offloaded = 0  # offloaded at one time
        self._max_blocks = max_blocks
        self._runs: dict[BlockHash, StoredRun] = {}  # of the first copy, in the order of storage
        self._copies: dict[BlockHash, int] = {}  # beyond the first
        self._lower_copies: dict[BlockHash, int] = {}  # in lower tiers, in the order of storage
        self._offloaded: dict[BlockHash, StoredRun] = {}  # with a copy in lower tiers only
        self._keys: set[Key] = set()  # of the blocks in device memory and of offloaded ones
        self._group: int | None = None

    def __len__(self) -> int:
        """Number of distinct hashes in device memory."""
        return len(self._runs)

    @property
    def offloaded(self) -> int:
        """Known blocks that only lower cache tiers have."""
        return len(self._offloaded)

    @property
    def has_lower_tiers(self) -> bool:
        """Whether lower cache tiers have blocks."""
        return bool(self._lower_copies)

    def __contains__(self, key: Key) -> bool:
        """Whether the block with this key is cached, in any tier."""
        return key in self._keys

    def clear(self, *, is_complete: bool) -> None:
        """Forget all blocks. ``is_complete``: whether the engine has none; else it has unknown ones."""
        self._runs.clear()
        self._copies.clear()
        self._lower_copies.clear()
        self._offloaded.clear()
        self._keys.clear()
        self.blocks, self.is_complete = 0, is_complete

    def counts(self, event: KvEvent) -> bool:
        """Whether an event is about blocks in device memory, of the group of layers that counts."""
        if event.medium not in DEVICE or event.kind not in FULL_ATTENTION or not event.hashes:
            return False
        if self._group is None:
            self._group = event.group or 0
        if self.blocks and event.block_tokens < self.block_tokens:  # the beginning of a block
            return False
        return (event.group or 0) == self._group

    def store(self, event: KvEvent, now_s: float) -> StoredRun | None:
        """Add the blocks of an event; None if they do not count."""
        if not self.counts(event):
            return None
        self.block_tokens = event.block_tokens
        run, runs, hashes = self._run_of(event, now_s), self._runs, event.hashes
        before = len(runs)
        if self._offloaded:
            for hash_ in hashes:
                self._drop_offloaded(hash_)
        if runs.keys().isdisjoint(hashes):
            runs.update(dict.fromkeys(hashes, run))
            self._keys.update(run.keys)
        if len(runs) - before < len(hashes):
            self._add_copies(run, are_added=len(runs) > before)
        self.blocks += len(hashes)
        self.max_seen_blocks = max(self.max_seen_blocks, self.blocks)
        if len(runs) > self._max_blocks:
            for hash_ in self._oldest(self._runs):
                self._forget(hash_)
        return run

    def store_in_lower_tiers(self, event: KvEvent) -> None:
        """Add a copy of each block of an event in a lower tier, unless the event is of another group of layers."""
        if (event.group or 0) != (self._group or 0):
            return
        copies = self._lower_copies
        for hash_ in event.hashes:
            copies[hash_] = copies.get(hash_, 0) + 1
        if len(copies) > self._max_blocks:
            for hash_ in self._oldest(copies):
                del copies[hash_]
                self._drop_offloaded(hash_)

    def _oldest(self, stored: Mapping[BlockHash, object]) -> list[BlockHash]:
        """The first blocks of a dictionary that has too many, some more than necessary.

        A dictionary is searched past the entries that were deleted at its front, so one search finds many.
        """
        excess = len(stored) - self._max_blocks
        return list(islice(stored, excess + self._max_blocks // FORGOTTEN_PART))

    def remove(self, event: KvEvent) -> list[tuple[StoredRun, int]]:
        """Remove one copy of each block of an event, in device memory or below.

        Returns the runs of those that no tier has any more, with the lowest position of a removed block in each; a run
        is there again if others were between its blocks.
        """
        if (event.group or 0) != (self._group or 0):
            return []
        return self._remove(event.hashes) if event.medium in DEVICE else self._remove_from_lower_tiers(event.hashes)

    def _remove(self, hashes: list[BlockHash]) -> list[tuple[StoredRun, int]]:
        removed: list[tuple[StoredRun, int]] = []
        runs, copies, latest, left = self._runs, self._copies, None, 0
        for hash_ in self._move_to_lower_tiers(hashes):
            if copies and hash_ in copies:
                self._remove_copy(hash_)
                self.blocks -= 1
                continue
            run = runs.pop(hash_, None)
            if run is None:
                continue
            self.blocks -= 1
            position = run.remove(hash_)
            if run.keys:
                self._keys.discard(run.keys[position])
            if run is not latest:
                if latest is not None:
                    removed.append((latest, left))
                latest, left = run, position
            elif position < left:
                left = position
        if latest is not None:
            removed.append((latest, left))
        return removed

    def _move_to_lower_tiers(self, hashes: list[BlockHash]) -> list[BlockHash]:
        """Move blocks with copies in lower tiers out of device memory; returns the others."""
        if not self._lower_copies:
            return hashes
        others: list[BlockHash] = []
        for hash_ in hashes:
            if hash_ in self._copies or hash_ not in self._lower_copies or hash_ not in self._runs:
                others.append(hash_)
            else:
                self._offloaded[hash_] = self._runs.pop(hash_)
                self.blocks -= 1
        self.max_seen_offloaded = max(self.max_seen_offloaded, len(self._offloaded))
        return others

    def _remove_from_lower_tiers(self, hashes: list[BlockHash]) -> list[tuple[StoredRun, int]]:
        """Remove copies in lower tiers; the blocks that no tier has any more, as of ``remove``."""
        removed, copies = list[tuple[StoredRun, int]](), self._lower_copies
        for hash_ in hashes:
            left = copies.pop(hash_, 0) - 1
            if left > 0:
                copies[hash_] = left
            elif (run := self._drop_offloaded(hash_)) is not None:
                removed.append((run, run.position(hash_)))
        return removed

    def _add_copies(self, run: StoredRun, *, are_added: bool) -> None:
        """Add blocks of which some are cached already, or that occur twice in an event (``are_added``)."""
        seen: set[BlockHash] = set()
        for position, hash_ in enumerate(run.hashes):
            known = self._runs.get(hash_)
            if known is not None and (not are_added or hash_ in seen):
                self._copies[hash_] = self._copies.get(hash_, 0) + 1
            if known is None or not known.keys:
                self._runs[hash_] = run
                self._keys.update(run.keys[position : position + 1])
            seen.add(hash_)

    def _remove_copy(self, hash_: BlockHash) -> None:
        self._copies[hash_] -= 1
        if not self._copies[hash_]:
            del self._copies[hash_]

    def _forget(self, hash_: BlockHash) -> None:
        self._drop_key(hash_, self._runs.pop(hash_))
        self.blocks -= 1 + self._copies.pop(hash_, 0)

    def _drop_offloaded(self, hash_: BlockHash) -> StoredRun | None:
        run = self._offloaded.pop(hash_, None)
        if run is not None:
            self._drop_key(hash_, run)
        return run

    def _drop_key(self, hash_: BlockHash, run: StoredRun) -> None:
        if run.keys:
            self._keys.discard(run.keys[run.position(hash_)])

    def _run_of(self, event: KvEvent, now_s: float) -> StoredRun:
        if event.parent is None:
            return StoredRun(event.hashes, None, 0, event.keys(event.adapter), now_s)
        parent = self._runs.get(event.parent) or self._offloaded.get(event.parent)
        if parent is None or not parent.keys:
            return StoredRun(event.hashes, None, 0, [], now_s)
        position = parent.position(event.parent)
        return StoredRun(event.hashes, parent, position, event.keys(parent.keys[position]), now_s)
