"""Records of decisions."""

from __future__ import annotations

from array import array
from typing import Any

from routing.balancing.decision import CandidateLoads
from routing.observability.decision_log import DecisionRing
from routing.observability.decision_record import Record


def record(name: str, blocks: array[int]) -> Record:
    placed = ("chat", "", "", "everyday", 1, "prefix_hash", "a", "affinity")
    return Record(name, 0.0, *placed, 100, 16, None, [blocks], CandidateLoads([]))


def told(ring: DecisionRing, after: int, limit: int, ratio: float = 1.0) -> dict[str, Any]:
    """A page of the latest decisions, written out."""
    page = ring.page(after, limit, ratio)
    return page.as_json(list(page.rows()))
