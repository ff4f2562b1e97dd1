"""Sums of a replay, and a simple LRU cache to compare it with."""

from __future__ import annotations

from collections import OrderedDict

from telemetry.lab.breakdown import Sums
from telemetry.lab.replay import BinSums, Replay
from tests.telemetry.lab.traces import HASH_TOKENS, Request, columns


def replayed(requests: list[Request], capacities: dict[str, int] | None, replay: Replay | None = None) -> Sums:
    """Sums of requests as if all were of one group; ``capacities`` in blocks."""
    capacities_tokens = {name: blocks * HASH_TOKENS for name, blocks in capacities.items()} if capacities else None
    replay, bin_sums = replay or Replay(capacities_tokens), BinSums()
    replay.use(columns([request._replace(group="") for request in requests]), bin_sums)
    return bin_sums.result(replay.ratio)[""]


class PlainCache:
    """An LRU cache that processes one block at a time, tail first."""

    def __init__(self, capacity: float) -> None:
        self.capacity, self.blocks = capacity, OrderedDict()

    def match(self, blocks: list[int]) -> int:
        return next((at for at, block in enumerate(blocks) if block not in self.blocks), len(blocks))

    def use(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
