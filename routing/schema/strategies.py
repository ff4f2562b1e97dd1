"""The settings of every strategy, by the name that a policy gives it."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from routing.schema.base import Frozen
from routing.schema.decoding import decoded
from routing.schema.tier1 import (
    Boundary,
    BoundaryBytes,
    BoundaryKind,
    BoundaryMarker,
    BoundaryMessages,
    Tier1,
)


class PolicySettings(Frozen, tag_field="strategy", frozen=True):
    """Base of the settings of every strategy; ``strategy`` in JSON names the subclass."""

    name: ClassVar[str]


class RandomSettings(PolicySettings, tag="random", frozen=True):
    """Any replica, by chance."""

    name: ClassVar[str] = "random"


class RoundRobinSettings(PolicySettings, tag="round_robin", frozen=True):
    """Each replica in turn."""

    name: ClassVar[str] = "round_robin"


class LeastLoadSettings(PolicySettings, tag="least_load", frozen=True):
    """The replica with the least outstanding work."""

    name: ClassVar[str] = "least_load"


class PowerOfTwoSettings(PolicySettings, tag="power_of_two", frozen=True):
    """Of two replicas drawn by chance the one with less outstanding work."""

    name: ClassVar[str] = "power_of_two"


class BoundedLoad(PolicySettings, frozen=True):
    """Settings shared by the strategies that walk a home order with bounded load."""

    load_factor: Annotated[
        float,
        Meta(
            ge=1.0,
            le=100.0,
            description="How far above the mean load a replica still counts as having room.",
            extra={"unit": "ratio"},
        ),
    ] = 2.0
    min_bound: Annotated[
        int, Meta(ge=1, le=100_000, description="What a replica may always hold.", extra={"unit": "requests"})
    ] = 4


class SessionAffinitySettings(BoundedLoad, tag="session_affinity", frozen=True):
    """Home order on the session key."""

    name: ClassVar[str] = "session_affinity"


class Tier1Settings(BoundedLoad, frozen=True):
    """Settings shared by the strategies that go by the tier-1 prefix; a pool's or group's ``tier1`` comes before."""

    boundary: BoundaryKind = Boundary.AUTO
    boundary_bytes: BoundaryBytes = 1024
    boundary_messages: BoundaryMessages = 1
    boundary_marker: BoundaryMarker = ""

    @property
    def tier1(self) -> Tier1:
        """The boundary alone; a marker that is not said is in no prompt, so that comes to auto."""
        boundary = Boundary.AUTO if self.boundary is Boundary.MARKER and not self.boundary_marker else self.boundary
        return Tier1(boundary, self.boundary_bytes, self.boundary_messages, self.boundary_marker)


class PrefixHashSettings(Tier1Settings, tag="prefix_hash", frozen=True):
    """Home order on the tier-1 prefix."""

    name: ClassVar[str] = "prefix_hash"


class TieredSettings(Tier1Settings, tag="tiered", frozen=True):
    """A few replicas for each tier-1 prefix, and among them home order on the conversation."""

    name: ClassVar[str] = "tiered"

    replicas: Annotated[
        int, Meta(ge=1, le=1000, description="How many replicas share one opening.", extra={"unit": "replicas"})
    ] = 2


class AffinityGroupsSettings(Tier1Settings, tag="affinity_groups", frozen=True):
    """Replicas of its own for each hot tier-1 prefix, as many as its share of the traffic; the rest for the others."""

    name: ClassVar[str] = "affinity_groups"

    hot_ratio: Annotated[
        float,
        Meta(
            ge=0.01,
            le=1.0,
            description="The share of all requests from which on an opening has replicas of its own.",
            extra={"unit": "ratio"},
        ),
    ] = 0.1
    half_life: Annotated[
        int,
        Meta(
            ge=100,
            le=1_000_000,
            description="After how many requests a request counts half in the shares.",
            extra={"unit": "requests"},
        ),
    ] = 1000


class ResidencySettings(PolicySettings, frozen=True):
    """Base of the settings of strategies that ask what each replica holds."""


class CacheAwareSettings(BoundedLoad, ResidencySettings, tag="cache_aware", frozen=True):
    """The replica that holds most of the prompt, unless that one is full."""

    name: ClassVar[str] = "cache_aware"

    min_hit_ratio: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1.0,
            description="The part of a prompt that a replica must hold to be preferred for it.",
            extra={"unit": "ratio"},
        ),
    ] = 0.3


class CostSettings(ResidencySettings, frozen=True):
    """Settings shared by the strategies that weigh what waits against what is cached."""

    alpha: Annotated[
        float,
        Meta(
            ge=0.0,
            le=10.0,
            description="What a token to prefill for this request counts at most beside one that waits there already.",
            extra={"unit": "ratio"},
        ),
    ] = 2.0


class LowestCostSettings(CostSettings, tag="lowest_cost", frozen=True):
    """The replica with the least waiting work plus prefill of its own, in tokens."""

    name: ClassVar[str] = "lowest_cost"


class LeastTtftSettings(CostSettings, tag="least_ttft", frozen=True):
    """The same in seconds, by the prefill rate that each replica showed."""

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

_policies: msgspec.json.Decoder[Settings] = msgspec.json.Decoder(Settings)


def load_settings(document: bytes) -> Settings:
    """Read a policy file, ``{"strategy": NAME, ...its settings}``; ConfigError names what is wrong."""
    return decoded(_policies, document)
