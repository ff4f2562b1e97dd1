"""Keys by which the engines of a pool know the same block of a prompt.

Theory of operation. An engine's block hash stands for a block and everything before it. Since vLLM 0.29 engines agree
on it unless they are configured differently; before, each process had a random seed. So a pool begins with the engines'
own hashes as keys, which cost nothing. Of each block that begins a prompt, the router compares the hashes that the
engines have for the same tokens. Once two differ, it computes *token keys* instead: chained hashes of the encoded token
ids, the adapter and the extra keys, which are the same for all engines but cost 0.2 us a block, and more to encode.
Until then engines that disagree only miss matches; no block is taken for another one.

Bounds: ``MAX_FIRST_BLOCKS`` in each of two generations.
"""

from __future__ import annotations

from typing import Final

from xxhash import xxh3_64_intdigest

from routing.kv_events.decoding import BlockStored
from routing.kv_events.payload_format import BlockHash

MAX_FIRST_BLOCKS: Final = 8192

Key = int | bytes


class BlockKeys:
    """The kind of keys of one pool."""

    def __init__(self) -> None:
        self.are_hashes = True  # whether all engines have the same hash for the same block, as far as is known
        self._first_blocks: dict[int, BlockHash] = {}  # by token key
        self._older_first_blocks: dict[int, BlockHash] = {}  # the previous generation

    def compare(self, event: BlockStored) -> bool:
        """Compare the hash of a prompt's first block; whether this shows that engines disagree."""
        if not self.are_hashes or event.parent is not None:
            return False
        blocks = event.tokens.blocks(event.block_tokens, 1)
        if not blocks:
            return False
        key, hash_ = xxh3_64_intdigest(blocks[0] + event.extra_bytes(0), adapter_key(event)), event.hashes[0]
        known = self._first_blocks.get(key)
        if known is None:
            known = self._older_first_blocks.get(key, hash_)
            self._first_blocks[key] = hash_
            if len(self._first_blocks) >= MAX_FIRST_BLOCKS:
                self._older_first_blocks, self._first_blocks = self._first_blocks, {}
        if known == hash_:
            return False
        self.are_hashes = False
        self._first_blocks, self._older_first_blocks = {}, {}
        return True


def adapter_key(event: BlockStored) -> int:
    """The key before the first block of a prompt."""
    return xxh3_64_intdigest(event.adapter.encode()) if event.adapter else 0


def token_keys(event: BlockStored, key: int) -> list[Key]:
    """Token keys of an event's blocks, the first one chained to ``key``; none if its token ids are no numbers."""
    blocks = event.tokens.blocks(event.block_tokens, len(event.hashes))
    if len(blocks) < len(event.hashes):
        return []
    keys: list[Key] = []
    for position, block in enumerate(blocks):
        key = xxh3_64_intdigest(block + event.extra_bytes(position), key)
        keys.append(key)
    return keys
