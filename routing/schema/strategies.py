"""The settings of every strategy, the boundary of the tier-1 prefix, and policies with their canaries."""

from __future__ import annotations

import struct
from enum import StrEnum
from inspect import cleandoc
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from routing.schema.fields import Frozen, Name, decode, number


class Boundary(StrEnum):
    """Where the tier-1 prefix ends: the part of a prompt whose hash determines the preferred replica."""

    AUTO = "auto"  # after tools and system prompt if they have at least one block, else after boundary_bytes
    SYSTEM = "system"  # after tools and system prompt
    BYTES = "bytes"  # after boundary_bytes of the canonical prompt
    MESSAGES = "messages"  # after message number boundary_messages
    MARKER = "marker"  # before the first boundary_marker; as auto in a prompt without it


BoundaryKind = Annotated[Boundary, Meta(description=cleandoc(Boundary.__doc__ or ""))]
BoundaryBytes = Annotated[int, number("bytes", 64, 524_288, "Length of the tier-1 prefix, for bytes and auto.")]
BoundaryMessages = Annotated[
    int,
    number("messages", 1, 64, "Length of the tier-1 prefix, for messages; the system message counts."),
]
BoundaryMarker = Annotated[
    str, Meta(max_length=256, description="Text before which the tier-1 prefix ends, for marker.")
]


class Tier1(Frozen, frozen=True):
    """The tier-1 boundary of a pool or a task group, with the same fields as in a policy's settings."""

    boundary: BoundaryKind = Boundary.AUTO
    boundary_bytes: BoundaryBytes = 1024
    boundary_messages: BoundaryMessages = 1
    boundary_marker: BoundaryMarker = ""

    def __post_init__(self) -> None:
        if self.boundary is Boundary.MARKER and not self.boundary_marker:
            raise ValueError("boundary marker needs a text in boundary_marker")


class PolicySettings(Frozen, tag_field="strategy", frozen=True):
    """Base of the settings of every strategy; ``strategy`` in JSON names the subclass."""

    name: ClassVar[str]
    uses_residency: ClassVar[bool] = False  # whether it compares the estimated cached blocks of replicas


class RandomSettings(PolicySettings, tag="random", frozen=True):
    """Picks a replica at random."""

    name: ClassVar[str] = "random"


class RoundRobinSettings(PolicySettings, tag="round_robin", frozen=True):
    """Sends requests to all replicas in turn."""

    name: ClassVar[str] = "round_robin"


class LeastLoadSettings(PolicySettings, tag="least_load", frozen=True):
    """Sends each request to the replica with the least outstanding work."""

    name: ClassVar[str] = "least_load"


class PowerOfTwoSettings(PolicySettings, tag="power_of_two", frozen=True):
    """Picks two replicas at random and uses the one with less outstanding work."""

    name: ClassVar[str] = "power_of_two"


class ResidencySettings(PolicySettings, frozen=True):
    """Base of the settings of strategies that use the estimated cached blocks of each replica."""

    uses_residency = True


class AffinitySettings(ResidencySettings, frozen=True):
    """Base of the settings of strategies that prefer a home."""

    slack_s: Annotated[
        float,
        number(
            "seconds",
            0.0,
            60.0,
            "Additional wait for a preferred replica, beyond what its cached prefix saves.",
        ),
    ] = 0.06


class SessionAffinitySettings(AffinitySettings, tag="session_affinity", frozen=True):
    """Keeps each conversation on one replica."""

    name: ClassVar[str] = "session_affinity"


class Tier1Settings(AffinitySettings, frozen=True):
    """Settings of the strategies that hash the tier-1 prefix; a pool's or group's ``tier1`` takes precedence."""

    boundary: BoundaryKind = Boundary.AUTO
    boundary_bytes: BoundaryBytes = 1024
    boundary_messages: BoundaryMessages = 1
    boundary_marker: BoundaryMarker = ""

    @property
    def tier1(self) -> Tier1:
        """The boundary alone; a marker without text, which no prompt contains, is the same as auto."""
        boundary = Boundary.AUTO if self.boundary is Boundary.MARKER and not self.boundary_marker else self.boundary
        return Tier1(boundary, self.boundary_bytes, self.boundary_messages, self.boundary_marker)


class PrefixHashSettings(Tier1Settings, tag="prefix_hash", frozen=True):
    """Sends requests that share a system prompt to the same replica."""

    name: ClassVar[str] = "prefix_hash"


class TieredSettings(Tier1Settings, tag="tiered", frozen=True):
    """Assigns each shared prompt a small group of replicas and each conversation one of them."""

    name: ClassVar[str] = "tiered"

    replicas: Annotated[int, number("replicas", 1, 1000, "Number of replicas that share one tier-1 prefix.")] = 2


class AffinityGroupsSettings(Tier1Settings, tag="affinity_groups", frozen=True):
    """Gives each very frequent prompt its own set of replicas."""

    name: ClassVar[str] = "affinity_groups"

    hot_ratio: Annotated[
        float,
        number("ratio", 0.01, 1.0, "Share of the tokens to prefill above which a tier-1 prefix gets its own replicas."),
    ] = 0.1
    half_life: Annotated[
        int, number("requests", 100, 1_000_000, "Number of requests after which a request counts half in the shares.")
    ] = 1000


class CacheAwareSettings(AffinitySettings, tag="cache_aware", frozen=True):
    """Sends each request to the replica that has most of its prompt cached, unless waiting there costs more."""

    name: ClassVar[str] = "cache_aware"

    min_hit_ratio: Annotated[
        float, number("ratio", 0.0, 1.0, "Share of a prompt that must be cached at a replica for it to be preferred.")
    ] = 0.3


class CostSettings(ResidencySettings, frozen=True):
    """Settings of the strategies that compare queued work with cached tokens."""

    alpha: Annotated[
        float,
        number(
            "ratio",
            0.0,
            10.0,
            "Highest weight of this request's own uncached tokens relative to tokens already queued at the replica.",
        ),
    ] = 2.0


class LowestCostSettings(CostSettings, tag="lowest_cost", frozen=True):
    """Balances cache hits against queue length; the best choice for most traffic."""

    name: ClassVar[str] = "lowest_cost"


class LeastTtftSettings(CostSettings, tag="least_ttft", frozen=True):
    """Like lowest_cost, but with each replica's measured prefill speed; for replicas of different speeds."""

    name: ClassVar[str] = "least_ttft"


Settings = (
    LowestCostSettings
    | LeastTtftSettings
    | CacheAwareSettings
    | AffinityGroupsSettings
    | TieredSettings
    | PrefixHashSettings
    | SessionAffinitySettings
    | LeastLoadSettings
    | PowerOfTwoSettings
    | RoundRobinSettings
    | RandomSettings
)

_settings: msgspec.json.Decoder[Settings] = msgspec.json.Decoder(Settings)


def load_settings(document: bytes) -> Settings:
    """Read a policy file, ``{"strategy": NAME, ...its settings}``; ConfigError names what is wrong."""
    return decode(_settings, document)


Revision = Annotated[int, Meta(ge=1)]  # 1, 2, 3 ... within the policy


class Canary(Frozen, frozen=True):
    """A policy's next revision, which places a share of the requests while it is compared with the active revision.

    A hash of the prefix decides, so that requests of one prefix stay together, and a prefix that the canary places
    remains with it when ``share`` grows. Requests without a prompt use the active revision.
    """

    revision: Revision
    settings: Settings
    share: Annotated[
        float,
        Meta(gt=0, le=1, description="Share of all prefixes that the canary places.", extra={"unit": "ratio"}),
    ] = 1.0
    routers: tuple[Name, ...] | None = None  # on these routers only; None: on all
    groups: tuple[Name, ...] | None = None  # for these task groups only; None: for all that the policy places


PREFIX_SPACE: Final = 1 << 64
_pack_word: Final = struct.Struct("<Q").pack


def split_seed(policy: str) -> int:
    """The seed of a policy's ``split_position``: different policies choose different prefixes for their canaries."""
    return xxh3_64_intdigest(policy.encode())


def split_position(prefix: int, seed: int) -> int:
    """Position of a tier-1 prefix in ``PREFIX_SPACE``; a canary places those below its share of the space."""
    return xxh3_64_intdigest(_pack_word(prefix), seed)


class PolicyConfig(Frozen, frozen=True, omit_defaults=True):
    """A policy's active revision. ``name`` and ``revision`` are labels of the metrics of the requests that it places.

    A missing canary is not written, so that routers from before canaries can read the document.
    """

    name: Name
    revision: Revision
    settings: Settings
    canary: Canary | None = None
