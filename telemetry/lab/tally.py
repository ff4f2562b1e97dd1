"""What the requests of a bin come to, group by group, while it is replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from telemetry.lab.chains import Coded, Floats, Hashes, error
from telemetry.lab.ladder import Sums

Truths = NDArray[np.bool_]


class Tally:
    """Sums by group, and the tokens of a block by where prompts part, of which ``Sums.doubt`` is made."""

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}
        self.partings: dict[str, tuple[Hashes, Floats]] = {}
        self.reason = ""  # why terms that need the caches' sizes are unknown

    def add(self, groups: Coded, columns: Mapping[str, Floats | Truths]) -> None:
        """Add requests: columns that are named as the sums are. What is true is counted."""
        added = {name: _by_group(groups, column) for name, column in columns.items()}
        for number, group in enumerate(groups.names):
            sums = self.sums.setdefault(group, Sums())
            for name, column in added.items():
                setattr(sums, name, getattr(sums, name) + column[number])

    def part(self, groups: Coded, blocks: Hashes, tokens: Floats) -> None:
        """Note where each request's prompt parts from what was there: at a block of so many tokens."""
        for number, group in enumerate(groups.names):
            ours = groups.codes == number
            before = self.partings.get(group, (blocks[:0], tokens[:0]))
            parts = np.concatenate((before[0], blocks[ours])), np.concatenate((before[1], tokens[ours]))
            self.partings[group] = _together(*parts)

    def settled(self, ratio: float) -> dict[str, Sums]:
        """The sums of a whole bin that was replayed with this part of the blocks, each term at least the one below."""
        found = {}
        for group, sums in self.sums.items():
            split = max(sums.split, sums.best)
            found[group] = replace(sums, split=split, capacity=max(sums.capacity, split))
            if group in self.partings:
                found[group].doubt = error(ratio) * sqrt(np.square(self.partings[group][1]).sum())
        return found


def _by_group(groups: Coded, column: Floats | Truths) -> list[float]:
    """Its sum for each group."""
    if column.dtype == np.bool_:
        found: list[float] = np.bincount(groups.codes[column.astype(np.bool_)], minlength=len(groups.names)).tolist()
    else:
        found = np.bincount(groups.codes, column, len(groups.names)).tolist()
    return found


def _together(blocks: Hashes, tokens: Floats) -> tuple[Hashes, Floats]:
    """Each block once."""
    once, codes = np.unique(blocks, return_inverse=True)
    return once, np.bincount(codes, tokens, len(once)).astype(np.float64)
