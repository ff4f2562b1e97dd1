"""What a replay comes to, and the plain cache that it is held against."""

from __future__ import annotations

from collections import OrderedDict

from telemetry.lab.ladder import Sums
from telemetry.lab.replay import BinSums, Replay
from tests.telemetry.lab.traces import HASH_TOKENS, Request, columns


def replayed(requests: list[Request], rooms: dict[str, int] | None, replay: Replay | None = None) -> Sums:
    """The sums of these requests, as if of one group, each term at least the one below; ``rooms`` in blocks."""
    told = {name: blocks * HASH_TOKENS for name, blocks in rooms.items()} if rooms else None
    replay, tally = replay or Replay(told), BinSums()
    replay.use(columns([one._replace(group="") for one in requests]), tally)
    return tally.result(replay.ratio)[""]


class PlainCache:
    """LRU, one block at a time, tail first."""

    def __init__(self, room: float) -> None:
        self.room, self.held = room, OrderedDict()

    def match(self, blocks: list[int]) -> int:
        return next((at for at, block in enumerate(blocks) if block not in self.held), len(blocks))

    def use(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.held[block] = None
            self.held.move_to_end(block)
        while len(self.held) > self.room:
            self.held.popitem(last=False)
