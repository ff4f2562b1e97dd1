"""Whether full caches are crowded: how much of what they were about to push out is asked for after all."""

from __future__ import annotations


class Reuse:
    """Counts of blocks, of the latest turnover of all caches together."""

    __slots__ = ("_pushed_out", "_reused", "ratio")

    def __init__(self) -> None:
        self.ratio = 0.0  # of what full caches have not used for long: the share asked for before it is evicted
        self._reused = 0.0  # blocks of that, of late
        self._pushed_out = 0.0  # and blocks that were evicted

    def asked_for(self, blocks: int) -> None:
        """Blocks of a full cache that had not been used for long."""
        self._reused += blocks

    def pushed_out(self, blocks: int, capacity: int) -> None:
        """Blocks that had no room, and the capacity of all caches together: by then older counts have halved."""
        self._pushed_out += blocks
        judged = self._reused + self._pushed_out
        self.ratio = self._reused / judged
        if judged > capacity:
            self._reused /= 2
            self._pushed_out /= 2
