"""Types that strategies and the request path share: identifiers, reasons, choices and errors."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NewType, TypeVar

ReplicaId = NewType("ReplicaId", str)  # a replica's stable name
TargetId = NewType("TargetId", str)  # a replica or one of its data-parallel ranks; its identity on every ring
NameT = TypeVar("NameT", bound=str)  # a member of a hash ring: a ReplicaId or a TargetId
BLOCK_BYTES: Final = 256  # size of a block of a canonical prompt
BLOCK_TOKENS: Final = 64  # tokens of such a block until the tokenizer is known: 4 bytes a token, as in English
BYTES_PER_TOKEN: Final = BLOCK_BYTES // BLOCK_TOKENS
PrefixHash = NewType("PrefixHash", int)  # unsigned 64-bit key of a prompt's prefix, or of a session


class Reason(StrEnum):
    """Why a replica was chosen: a log field, a metric label and a text of the dashboard."""

    AFFINITY = "affinity"  # the first home of the key
    SPILL = "spill"  # another replica, because the request would wait too long at the first home
    NO_KEY = "no_key"  # the request has no key: the least loaded replica
    LEAST_LOAD = "least_load"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LESS_OF_TWO = "less_of_two"
    HIT = "hit"  # preferred or cheapest, with some of the prompt cached
    COLD = "cold"  # no replica has enough of the prompt cached
    ELSEWHERE = "elsewhere"  # cheapest by its load, though another replica has more of the prompt cached
    SPREAD = "spread"  # rebalanced: the cheapest replica had more than its share of recent requests


class MatchedBy(StrEnum):
    """The rule that put a request into its task group; rules apply in this order."""

    HEADER = "header"  # X-Task-Group names the group
    API_KEY = "api_key"  # the API key is limited to the group, or the group claims the key
    SESSION = "session"  # the group claims a prefix of the session key
    TIER1 = "tier1"  # the group claims the hash of the tier-1 prefix
    MODEL = "model"  # the group claims the model
    UNMATCHED = "unmatched"  # no group: the pool's own policy


class RoutingError(Exception):
    """Base of the errors for which a router rejects a request."""


class BodyError(RoutingError):
    """A body that cannot be placed. ``param`` is the field, as in OpenAI's errors; None: the whole body."""

    def __init__(self, param: str | None, reason: str) -> None:
        super().__init__(f"{param}: {reason}" if param else reason)
        self.param = param
        self.reason = reason


class UnknownModelError(RoutingError):
    """No pool serves the requested model."""

    def __init__(self, model: str | None) -> None:
        super().__init__("No model was named." if model is None else f"The model `{model[:256]}` does not exist.")
        self.model = model


class NoReplicaError(RoutingError):
    """No replica is eligible: none is active, up and not yet tried."""

    def __init__(self, pool: str, group: str = "", adapter: str = "") -> None:
        where = f"pool {pool!r}, task group {group!r}" if group else f"pool {pool!r}"
        with_adapter = f" with the adapter {adapter!r}" if adapter else ""
        super().__init__(f"no replica of {where}{with_adapter} is up, active and untried")
        self.pool = pool
        self.group = group
        self.adapter = adapter
