"""Where the tier-1 prefix of a prompt ends: one rule for pools, task groups and policies.

The settings of every strategy, by the name that a policy gives it.

Policies: a policy's revision in force, and the next one that is tried beside it.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from inspect import cleandoc
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from routing.schema.fields import ConfigError, Frozen, Name, decoded


class Boundary(StrEnum):
    """Where the tier-1 prefix ends: the part of the prompt whose hash names a home."""

    AUTO = "auto"  # the end of tools and system prompt if that is at least one block, else the first boundary_bytes
    SYSTEM = "system"  # the end of tools and system prompt
    BYTES = "bytes"  # the first boundary_bytes of the canonical prompt
    MESSAGES = "messages"  # the end of message number boundary_messages
    MARKER = "marker"  # where boundary_marker first stands; as auto in a prompt without it


BoundaryKind = Annotated[Boundary, Meta(description=cleandoc(Boundary.__doc__ or ""))]
BoundaryBytes = Annotated[
    int,
    Meta(ge=64, le=524_288, description="Length of the opening, for bytes and auto.", extra={"unit": "bytes"}),
]  # of the canonical prompt
BoundaryMessages = Annotated[
    int,
    Meta(
        ge=1,
        le=64,
        description="Length of the opening, for messages; the system message counts.",
        extra={"unit": "messages"},
    ),
]
BoundaryMarker = Annotated[
    str, Meta(max_length=256, description="Text that ends the opening, for marker; it is no part of it.")
]


class Tier1(Frozen, frozen=True):
    """The boundary of a pool or a task group, in the words of a policy's settings."""

    boundary: BoundaryKind = Boundary.AUTO
    boundary_bytes: BoundaryBytes = 1024
    boundary_messages: BoundaryMessages = 1
    boundary_marker: BoundaryMarker = ""

    def __post_init__(self) -> None:
        if self.boundary is Boundary.MARKER and not self.boundary_marker:
            raise ValueError("boundary marker: say which text in boundary_marker")


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


Revision = Annotated[int, Meta(ge=1)]  # 1, 2, 3 ... within the policy


class Trial(Frozen, frozen=True):
    """A policy's next revision, tried on some of its requests before it replaces the revision in force.

    A request's place in the prefix space decides, so that one prefix's requests stay together; a request without a
    prompt is never tried. Who is in stays in when ``share`` grows.
    """

    revision: Revision
    settings: Settings
    share: Annotated[
        float,
        Meta(gt=0, le=1, description="Part of the prefix space that is tried.", extra={"unit": "ratio"}),
    ] = 1.0
    routers: tuple[Name, ...] | None = None  # on these routers only; None: on all
    groups: tuple[Name, ...] | None = None  # for these task groups only; None: for all that the policy places


class PolicyConfig(Frozen, frozen=True, omit_defaults=True):
    """A policy's revision in force. ``name`` and ``revision`` label every figure that it produces.

    A trial that there is not is left out of what is written, so that routers which know no trials read it all the same.
    """

    name: Name
    revision: Revision
    settings: Settings
    trial: Trial | None = None


def check_trial(policy: PolicyConfig, path: str, groups: Collection[str] | None) -> None:
    """A trial of another revision, for somebody; ConfigError otherwise.

    ``groups`` are the task groups that a pool's policy places; None: the policy is a task group's own.
    """
    trial = policy.trial
    if trial is None:
        return
    if trial.revision == policy.revision:
        raise ConfigError(f"{path}.trial.revision", f"revision {trial.revision} is in force; only another can be tried")
    if trial.routers == ():
        raise ConfigError(f"{path}.trial.routers", "a trial on no router tries nothing; use null for all")
    if trial.groups is None:
        return
    if groups is None:
        reason = "only a pool's policy places several task groups; leave groups out of a task group's own"
        raise ConfigError(f"{path}.trial.groups", reason)
    if trial.groups == ():
        raise ConfigError(f"{path}.trial.groups", "a trial for no task group tries nothing; use null for all")
    for at, name in enumerate(trial.groups):
        if name not in groups:
            reason = f"the pool's policy places no task group {name!r}: the pool has none, or it has its own policy"
            raise ConfigError(f"{path}.trial.groups[{at}]", reason)
