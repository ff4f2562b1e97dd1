"""What a judge says, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class CauseKind(StrEnum):
    """Why a hit rate may fall."""

    PROMPT_CHANGED = "prompt_changed"
    WORKLOAD_CHANGED = "workload_changed"
    CAPACITY = "capacity"
    REPLICA_RESTARTED = "replica_restarted"
    REPLICA_ADDED = "replica_added"
    REPLICA_LOST = "replica_lost"
    REVISION = "revision"
    AFFINITY_GIVEN_UP = "affinity_given_up"
    INDEX_STALE = "index_stale"
    ENGINE_SILENT = "engine_silent"


@dataclass(frozen=True, slots=True)
class Finding:
    """One judge's answer: how many tokens its cause explains, and how sure it is that these are its doing."""

    kind: CauseKind
    tokens: float
    certainty: float  # 0 to 1
    summary: str  # a sentence with figures
    advice: str
    evidence: Mapping[str, Any] = field(default_factory=dict)  # JSON


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of a drop, as alerts keep it and pages show it."""

    kind: str
    confidence: float  # 0 to 1: the part of the drop that it explains, by how sure that is
    summary: str
    evidence: Mapping[str, Any]
    advice: str

    def as_json(self) -> dict[str, Any]:
        """As a document keeps it."""
        return asdict(self)


def percent(ratio: float | None) -> str:
    """A ratio as people read it."""
    return "an unknown share" if ratio is None else f"{ratio * 100:.0f} %"


def listed(names: list[str], most: int = 3) -> str:
    """Names in a sentence."""
    shown = names[:most]
    rest = len(names) - len(shown)
    if rest:
        return f"{', '.join(shown)} and {rest} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
