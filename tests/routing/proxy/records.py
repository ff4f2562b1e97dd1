"""Records of decisions."""

from __future__ import annotations

from array import array

from routing.placement.decision import CandidateLoads
from routing.proxy.decisions.record import Record


def record(name: str, blocks: array[int]) -> Record:
    placed = ("chat", "", "", "everyday", 1, "prefix_hash", "a", "affinity")
    return Record(name, 0.0, *placed, 100, 16, None, [blocks], CandidateLoads([]))
