"""The configuration that a router runs: one immutable, versioned snapshot.

The control plane builds it, a file may hold it, the router validates and runs it. This is the one package of
``routing`` that others import, so it depends on msgspec alone and does no I/O.

Theory of operation. A ``Snapshot`` is an envelope whose ``config`` is kept as raw bytes: the schema number is read
before anything inside is, and ``sha256`` is of exactly those bytes, so that two releases which would encode a
config differently still agree on its digest. ``load_snapshot`` goes envelope -> schema -> digest -> config -> the
rules that types cannot say, and the first thing wrong is a ``ConfigError`` that names the path.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from enum import StrEnum
from inspect import cleandoc
from typing import Annotated, ClassVar, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from routing.schema.access import Access, ApiKey, Caps, check_access
from routing.schema.base import ConfigError, Frozen, Hex, Model, Name, Seconds, without_secrets
from routing.schema.failures import LEAST_URGENT, PRIORITIES, BreakerConfig, ConcurrencyConfig

__all__ = [  # what stands in a file of its own; the rest is below
    "LEAST_URGENT",
    "PRIORITIES",
    "Access",
    "ApiKey",
    "BreakerConfig",
    "Caps",
    "ConcurrencyConfig",
    "ConfigError",
    "Frozen",
    "Hex",
    "Model",
    "Name",
    "Seconds",
    "without_secrets",
]

SCHEMA_VERSION = 1
OLDEST_SCHEMA = 1
MAX_REASON_CHARS = 200  # of msgspec's, which quotes a name that nobody knows, however long it is


# --- policies ----------------------------------------------------------------------------------------


class Boundary(StrEnum):
    """Where the tier-1 prefix ends: the part of the prompt whose hash names a home."""

    AUTO = "auto"  # the end of tools and system prompt if that is at least one block, else the first boundary_bytes
    SYSTEM = "system"  # the end of tools and system prompt
    BYTES = "bytes"  # the first boundary_bytes of the canonical prompt
    MESSAGES = "messages"  # the end of message number boundary_messages


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
    """Settings shared by the strategies that walk a home order with bounded load (ALGORITHMS: home order)."""

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


class OpeningSettings(BoundedLoad, frozen=True):
    """Settings shared by the strategies that go by the tier-1 prefix."""

    boundary: Annotated[Boundary, Meta(description=cleandoc(Boundary.__doc__ or ""))] = Boundary.AUTO
    boundary_bytes: Annotated[
        int,
        Meta(ge=64, le=524_288, description="Length of the opening, for bytes and auto.", extra={"unit": "bytes"}),
    ] = 1024  # of the canonical prompt
    boundary_messages: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Length of the opening, for messages; the system message counts.",
            extra={"unit": "messages"},
        ),
    ] = 1


class PrefixHashSettings(OpeningSettings, tag="prefix_hash", frozen=True):
    """Home order on the tier-1 prefix."""

    name: ClassVar[str] = "prefix_hash"


class TieredSettings(OpeningSettings, tag="tiered", frozen=True):
    """A few replicas for each tier-1 prefix, and among them home order on the conversation."""

    name: ClassVar[str] = "tiered"

    replicas: Annotated[
        int, Meta(ge=1, le=1000, description="How many replicas share one opening.", extra={"unit": "replicas"})
    ] = 2


class AffinityGroupsSettings(OpeningSettings, tag="affinity_groups", frozen=True):
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
            description="What a token to prefill for this request counts beside one that waits there already.",
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


class PolicyConfig(Frozen, frozen=True):
    """A policy's revision in force. ``name`` and ``revision`` label every figure that it produces."""

    name: Name
    revision: Annotated[int, Meta(ge=1)]  # 1, 2, 3 ... within the policy
    settings: Settings


# --- the fleet ---------------------------------------------------------------------------------------


class ReplicaState(StrEnum):
    """What an operator wants of a replica; whether it answers is for the router's health checks to say."""

    ACTIVE = "active"
    DRAINING = "draining"  # running requests finish, new ones go elsewhere
    DISABLED = "disabled"  # not even health-checked


class ReplicaConfig(Frozen, frozen=True):
    """One vLLM engine behind a base URL. ``name`` is its identity on every ring; the URL may change."""

    name: Name
    url: Annotated[str, Meta(max_length=2048)]  # http(s)://host[:port][/base], no query
    state: ReplicaState = ReplicaState.ACTIVE
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # relative capacity
    block_tokens: Annotated[int, Meta(ge=1)] | None = None  # tokens a KV block holds; None until the engine told us
    capacity_blocks: Annotated[int, Meta(ge=1)] | None = None  # KV blocks; None until the engine told us
    api_key: Annotated[str, Meta(pattern=r"^[!-~]{1,1024}$")] | None = None  # sent instead of the client's; a secret


class TaskGroupConfig(Frozen, frozen=True):
    """Requests with one purpose. Matched by ``X-Task-Group: <name>``; unmatched requests are the pool's own."""

    name: Name
    policy: PolicyConfig | None = None  # None: the pool's
    replicas: tuple[Name, ...] | None = None  # the subset of the pool it may use; None: all
    caps: Caps | None = None  # None: the pool's
    concurrency: ConcurrencyConfig | None = None  # beside the pool's own; None: no limit
    priority: Annotated[
        int,
        Meta(
            ge=0, le=LEAST_URGENT, description="Place in line, 0 first; X-Priority may only put a request further back."
        ),
    ] = 0


class HealthCheck(Frozen, frozen=True):
    """How a router finds out whether a replica answers."""

    path: Annotated[str, Meta(pattern=r"^/[!-~]*$", max_length=256)] = "/health"
    interval_s: Seconds = 2.0
    timeout_s: Seconds = 2.0
    failures: Annotated[int, Meta(ge=1, le=100)] = 2  # in a row, until it counts as down
    successes: Annotated[int, Meta(ge=1, le=100)] = 1  # in a row, until it counts as up again


class PoolConfig(Frozen, frozen=True):
    """Replicas that serve the same models, and how requests are placed among them."""

    name: Name
    policy: PolicyConfig  # for requests of no task group, and of groups without a policy of their own
    models: tuple[Model, ...] = ()  # served names; () takes any model
    replicas: tuple[ReplicaConfig, ...] = ()
    groups: tuple[TaskGroupConfig, ...] = ()
    health: HealthCheck = HealthCheck()
    breaker: BreakerConfig = BreakerConfig()
    caps: Caps = Caps()
    concurrency: ConcurrencyConfig | None = None  # for all of its requests; None: no limit


class Limits(Frozen, frozen=True):
    """What a router accepts and how long it waits."""

    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 8 << 20
    max_header_bytes: Annotated[int, Meta(ge=1024, le=1 << 20)] = 32 << 10
    max_headers: Annotated[int, Meta(ge=8, le=1000)] = 100
    header_timeout_s: Seconds = 10.0  # a client's whole request head
    body_idle_timeout_s: Seconds = 30.0  # between two reads of a client's body
    write_stall_timeout_s: Seconds = 60.0  # a client that takes nothing
    keep_alive_timeout_s: Seconds = 75.0  # an idle client connection
    connect_timeout_s: Seconds = 3.0
    first_byte_timeout_s: Seconds = 120.0  # until the replica's first body byte
    idle_timeout_s: Seconds = 60.0  # between two reads of a replica's answer
    retries: Annotated[int, Meta(ge=0, le=8)] = 2  # further replicas tried before the first byte
    retry_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Further tries that requests of the last 10 s allow.", extra={"unit": "ratio"}),
    ] = 0.2
    retry_floor_per_s: Annotated[
        float,
        Meta(ge=0, le=10_000, description="Further tries allowed whatever the traffic.", extra={"unit": "tries/s"}),
    ] = 10.0
    max_in_flight: Annotated[int, Meta(ge=1, le=1_000_000)] = 8192  # requests in this router at once
    drain_timeout_s: Seconds = 30.0  # how long a stopping router lets streams finish


class RouterConfig(Frozen, frozen=True):
    """Everything that a router needs to place requests."""

    hash_secret: Hex  # mixed into every prefix hash; the same on all routers of a fleet; never shown
    pools: tuple[PoolConfig, ...]
    limits: Limits = Limits()
    access: Access | None = None  # None: requests are taken from anybody


class Snapshot(Struct, frozen=True, kw_only=True):
    """A numbered config on its way to routers. Of two snapshots the higher ``revision`` wins."""

    schema: int = SCHEMA_VERSION
    revision: Annotated[int, Meta(ge=1)]
    sha256: str | UnsetType = UNSET  # of the bytes of ``config``; a hand-written file may leave it out
    config: msgspec.Raw


# --- reading and writing -----------------------------------------------------------------------------


class LoadedSnapshot(Frozen, frozen=True):
    """A snapshot that passed every check. ``document`` is the envelope as received, for the last-known-good file."""

    revision: int
    sha256: str
    config: RouterConfig
    document: bytes


_encoder = msgspec.json.Encoder(order="deterministic")
_envelopes = msgspec.json.Decoder(Snapshot)
_configs = msgspec.json.Decoder(RouterConfig)
_policies: msgspec.json.Decoder[Settings] = msgspec.json.Decoder(Settings)


def dump_snapshot(config: RouterConfig, revision: int) -> LoadedSnapshot:
    """Number a config and seal it with its digest; ConfigError if a router would refuse it."""
    body = encode_config(config)
    sealed = Snapshot(revision=revision, sha256=hashlib.sha256(body).hexdigest(), config=msgspec.Raw(body))
    return load_snapshot(_encoder.encode(sealed))


def load_snapshot(document: bytes) -> LoadedSnapshot:
    """Read and check a whole snapshot; ConfigError names the first thing wrong."""
    envelope = _decoded(_envelopes, document)
    if not OLDEST_SCHEMA <= envelope.schema <= SCHEMA_VERSION:
        known = f"{OLDEST_SCHEMA} to {SCHEMA_VERSION}"
        raise ConfigError("$.schema", f"schema {envelope.schema} is not one this router reads ({known})")
    body = bytes(envelope.config)
    actual = hashlib.sha256(body).hexdigest()
    if envelope.sha256 is not UNSET and envelope.sha256 != actual:
        raise ConfigError(
            "$.sha256", f"the config's digest is {actual}, not {envelope.sha256[:64]}: it was altered or torn"
        )
    config = _decoded(_configs, body)
    check_config(config)
    return LoadedSnapshot(revision=envelope.revision, sha256=actual, config=config, document=document)


def encode_config(config: RouterConfig) -> bytes:
    """The bytes whose digest names a config: equal configs give equal bytes within one release."""
    return _encoder.encode(config)


def load_settings(document: bytes) -> Settings:
    """Read a policy file, ``{"strategy": NAME, ...its settings}``; ConfigError names what is wrong."""
    return _decoded(_policies, document)


def check_config(config: RouterConfig) -> None:
    """The rules that types cannot say: unique names, known references, usable URLs."""
    _check_unique((pool.name for pool in config.pools), "$.pools", "pool")
    _check_unique((r.name for pool in config.pools for r in pool.replicas), "$.pools[*].replicas", "replica")
    _check_models(config)
    for index, pool in enumerate(config.pools):
        _check_pool(pool, f"$.pools[{index}]")
    if config.access is not None:
        groups = {group.name for pool in config.pools for group in pool.groups}
        models = {model for pool in config.pools for model in pool.models}
        check_access(config.access, groups, models if all(pool.models for pool in config.pools) else None)


def _check_pool(pool: PoolConfig, path: str) -> None:
    _check_unique((group.name for group in pool.groups), f"{path}.groups", "task group")
    for index, replica in enumerate(pool.replicas):
        check_base_url(replica.url, f"{path}.replicas[{index}].url")
    known = {replica.name for replica in pool.replicas}
    for index, group in enumerate(pool.groups):
        for position, name in enumerate(group.replicas or ()):
            if name not in known:
                where = f"{path}.groups[{index}].replicas[{position}]"
                raise ConfigError(where, f"pool {pool.name!r} has no replica {name!r}")
        if group.replicas == ():
            raise ConfigError(
                f"{path}.groups[{index}].replicas", "a group without replicas serves nothing; use null for all"
            )


def _check_models(config: RouterConfig) -> None:
    """A model belongs to one pool, and at most one pool takes any model."""
    owners: dict[str | None, str] = {}
    for index, pool in enumerate(config.pools):
        for model in pool.models or (None,):
            if model in owners:
                what = "every model" if model is None else f"model {model!r}"
                raise ConfigError(f"$.pools[{index}].models", f"{what} is already served by pool {owners[model]!r}")
            owners[model] = pool.name


def _check_unique(names: Iterator[str], path: str, noun: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(path, f"two {noun}s are named {name!r}")
        seen.add(name)


_host = re.compile(r"^[A-Za-z0-9._-]+$|^[0-9A-Fa-f:.]+$")


def check_base_url(url: str, path: str = "url") -> None:
    """A replica's base URL: http or https, a host, nothing after the path; ConfigError names ``path``."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(path, f"not a URL: {error}") from None
    if parts.scheme not in {"http", "https"}:
        raise ConfigError(path, "expected http://host[:port] or https://host[:port]")
    if not parts.hostname or not _host.match(parts.hostname) or port == 0:
        raise ConfigError(path, "the host or port is missing or malformed")
    if (
        parts.username is not None
        or parts.query
        or parts.fragment
        or not url.isascii()
        or not url.isprintable()
        or " " in url
    ):
        raise ConfigError(path, "expected no credentials, query, fragment or blanks")


T = TypeVar("T")


def _decoded(decoder: msgspec.json.Decoder[T], document: bytes) -> T:
    """Decode, with msgspec's own path and reason in a ConfigError."""
    try:
        return decoder.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        text = str(error)
        reason, _, path = text.rpartition(" - at `$")
        raise ConfigError("$" + path.rstrip("`") if reason else "$", (reason or text)[:MAX_REASON_CHARS]) from None
