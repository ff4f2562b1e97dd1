"""The words that strategies and the request path share."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NewType, TypeVar

ReplicaId = NewType("ReplicaId", str)  # a replica's stable name: what is up, out of order, joined
TargetId = NewType("TargetId", str)  # where a request goes: a replica, or one of its ranks; its identity on every ring
NameT = TypeVar("NameT", bound=str)  # of what is on a ring: a ReplicaId or a TargetId
BLOCK_BYTES: Final = 256  # of a canonical prompt: the blocks that prompts are hashed in
BLOCK_TOKENS: Final = 64  # of such a block, 4 bytes a token as in English, until the tokenizer is known
BYTES_PER_TOKEN: Final = BLOCK_BYTES // BLOCK_TOKENS
PrefixHash = NewType("PrefixHash", int)  # unsigned 64-bit key of a prompt's opening, or of a session


class Reason(StrEnum):
    """Why a replica was chosen: the log field, the metric label and the dashboard's text."""

    AFFINITY = "affinity"  # the home that the key names
    SPILL = "spill"  # a later home, because earlier ones are full
    NO_KEY = "no_key"  # the request carries no key to place it by: the least loaded
    LEAST_LOAD = "least_load"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LESS_OF_TWO = "less_of_two"
    HOT = "hot"  # one of the replicas that a hot opening has to itself
    HIT = "hit"  # preferred or cheapest, and it holds some of the prompt
    COLD = "cold"  # nobody holds as much of the prompt as would count
    ELSEWHERE = "elsewhere"  # cheapest for its load, though another replica holds more of the prompt
    SPREAD = "spread"  # another replica holds more and is cheaper, but had more than its share of requests of late


class MatchedBy(StrEnum):
    """What made a request its task group's; the rules in the order in which they are asked."""

    HEADER = "header"  # X-Task-Group names it
    API_KEY = "api_key"  # the key is good for it, or it claims the key
    SESSION = "session"  # it claims how the session key begins
    TIER1 = "tier1"  # it claims the hash of the opening
    MODEL = "model"  # it claims the model
    UNMATCHED = "unmatched"  # none: the pool's own


class Choice:
    """Where a request goes, and the rule that said so."""

    __slots__ = ("bound", "hit_tokens", "reason", "refused", "target")

    def __init__(
        self,
        target: TargetId,
        reason: Reason,
        refused: tuple[TargetId, ...] = (),
        bound: int | None = None,
        hit_tokens: int | None = None,
    ) -> None:
        self.target = target
        self.reason = reason
        self.refused = refused  # homes that came earlier and were full, in order
        self.bound = bound  # requests the replica may hold by the bounded-load rule; None: no bound was asked
        self.hit_tokens = hit_tokens  # predicted cached tokens there; None where the strategy does not ask


class RoutingError(Exception):
    """Base of what routing itself can refuse."""


class BodyError(RoutingError):
    """A body that cannot be placed. ``param`` names the field, as OpenAI's errors do; None is the whole body."""

    def __init__(self, param: str | None, reason: str) -> None:
        super().__init__(f"{param}: {reason}" if param else reason)
        self.param = param
        self.reason = reason


class UnknownModelError(RoutingError):
    """No pool serves the model that was asked for."""

    def __init__(self, model: str | None) -> None:
        super().__init__("No model was named." if model is None else f"The model `{model[:256]}` does not exist.")
        self.model = model


class NoReplicaError(RoutingError):
    """No replica is eligible: none is configured, up and not yet tried."""

    def __init__(self, pool: str, group: str = "", adapter: str = "") -> None:
        where = f"pool {pool!r}, task group {group!r}" if group else f"pool {pool!r}"
        holding = f" holds the adapter {adapter!r} and" if adapter else ""
        super().__init__(f"no replica of {where}{holding} is up, active and untried")
        self.pool = pool
        self.group = group
        self.adapter = adapter
