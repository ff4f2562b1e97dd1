"""The words that strategies and the request path share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

ReplicaId = NewType("ReplicaId", str)  # a replica's stable name, its identity on every ring
PrefixHash = NewType("PrefixHash", int)  # unsigned 64-bit key of a prompt's opening


class Reason(StrEnum):
    """Why a replica was chosen: the log field, the metric label and the dashboard's text."""

    AFFINITY = "affinity"  # the home that the key names
    SPILL = "spill"  # a later home, because earlier ones are full
    NO_KEY = "no_key"  # the request carries no key to place it by: the least loaded
    ALL_FULL = "all_full"  # every home refused: the least loaded
    LEAST_LOAD = "least_load"
    ROUND_ROBIN = "round_robin"


@dataclass(slots=True)
class Load:
    """Outstanding work at one replica, as this router dispatched it."""

    running: int = 0  # requests sent and not ended
    waiting_tokens: int = 0  # estimated prompt tokens of requests whose first byte has not come
    weight: float = 1.0  # relative capacity, > 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and the rule that said so."""

    replica: ReplicaId
    reason: Reason


class Keys(Protocol):
    """What a strategy may ask about a request. Computed when asked, and then kept."""

    session_key: str | None

    @property
    def tier1(self) -> PrefixHash:
        """Key of the opening that a whole task group shares, at the policy's boundary."""
        ...


class Strategy(Protocol):
    """Pick one of the candidates. Pure but for its own counters; costs microseconds."""

    def choose(self, keys: Keys, candidates: Mapping[ReplicaId, Load]) -> Choice:
        """Choose among ``candidates`` (eligible replicas of the request's group); NoReplicaError if there are none."""
        ...


class RoutingError(Exception):
    """Base of what routing itself can refuse."""


class NoReplicaError(RoutingError):
    """No replica is eligible: none is configured, up and not yet tried."""
