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
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from routing.schema.access import Access, ApiKey, Caps, check_access
from routing.schema.base import ConfigError, Frozen, Hex, Model, Name, Seconds, without_secrets
from routing.schema.failures import LEAST_URGENT, PRIORITIES, BreakerConfig, ConcurrencyConfig, HealthCheck
from routing.schema.groups import AutoReplicas, GroupMatch, TaskGroupConfig, check_claimed_keys, check_groups
from routing.schema.limits import Limits
from routing.schema.models import Adapter, Alias, ModelNames, check_held, check_names
from routing.schema.openings import Boundary, Tier1
from routing.schema.policies import (
    AffinityGroupsSettings,
    BoundedLoad,
    CacheAwareSettings,
    CostSettings,
    LeastLoadSettings,
    LeastTtftSettings,
    LowestCostSettings,
    OpeningSettings,
    PolicyConfig,
    PolicySettings,
    PowerOfTwoSettings,
    PrefixHashSettings,
    RandomSettings,
    ResidencySettings,
    RoundRobinSettings,
    SessionAffinitySettings,
    Settings,
    TieredSettings,
    Trial,
    check_trial,
)
from routing.schema.signatures import KEY_HEX, Signature, key_id, signed_text
from routing.schema.warm_up import WarmUp

__all__ = [  # what stands in a file of its own; the rest is below
    "KEY_HEX",
    "LEAST_URGENT",
    "PRIORITIES",
    "Access",
    "Adapter",
    "AffinityGroupsSettings",
    "Alias",
    "ApiKey",
    "AutoReplicas",
    "Boundary",
    "BoundedLoad",
    "BreakerConfig",
    "CacheAwareSettings",
    "Caps",
    "ConcurrencyConfig",
    "ConfigError",
    "CostSettings",
    "Frozen",
    "GroupMatch",
    "HealthCheck",
    "Hex",
    "LeastLoadSettings",
    "LeastTtftSettings",
    "Limits",
    "LowestCostSettings",
    "Model",
    "Name",
    "OpeningSettings",
    "PolicyConfig",
    "PolicySettings",
    "PowerOfTwoSettings",
    "PrefixHashSettings",
    "RandomSettings",
    "ResidencySettings",
    "RoundRobinSettings",
    "Seconds",
    "SessionAffinitySettings",
    "Settings",
    "Signature",
    "TaskGroupConfig",
    "Tier1",
    "TieredSettings",
    "Trial",
    "WarmUp",
    "key_id",
    "signed_text",
    "without_secrets",
]

SCHEMA_VERSION = 1
OLDEST_SCHEMA = 1
MAX_REASON_CHARS = 200  # of msgspec's, which quotes a name that nobody knows, however long it is


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
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # relative capacity, of each data-parallel rank
    block_tokens: Annotated[int, Meta(ge=1)] | None = None  # tokens a KV block holds; None until the engine told us
    capacity_blocks: Annotated[int, Meta(ge=1)] | None = None  # KV blocks of each rank; None until the engine told us
    api_key: Annotated[str, Meta(pattern=r"^[!-~]{1,1024}$")] | None = None  # sent instead of the client's; a secret
    adapters: tuple[Model, ...] | None = None  # of its pool's, those it holds; None: those that its /v1/models lists
    data_parallel_size: Annotated[int, Meta(ge=1, le=1024)] = 1  # ranks behind the URL, each with a cache of its own

    @property
    def capacity(self) -> float:
        """Relative capacity of all its ranks."""
        return self.weight * self.data_parallel_size


class PoolConfig(Frozen, frozen=True):
    """Replicas that serve the same models, and how requests are placed among them."""

    name: Name
    policy: PolicyConfig  # for requests of no task group, and of groups without a policy of their own
    models: tuple[Model, ...] = ()  # served names; () takes any model
    aliases: tuple[Alias, ...] = ()  # other names for these
    adapters: tuple[Adapter, ...] = ()  # LoRA adapters that its replicas may hold
    replicas: tuple[ReplicaConfig, ...] = ()
    groups: tuple[TaskGroupConfig, ...] = ()
    health: HealthCheck = HealthCheck()
    breaker: BreakerConfig = BreakerConfig()
    caps: Caps = Caps()
    concurrency: ConcurrencyConfig | None = None  # for all of its requests; None: no limit
    tier1: Tier1 | None = None  # where tier 1 ends; None: where the policy says
    share_half_life: Annotated[
        int,
        Meta(
            ge=100,
            le=1_000_000,
            description="After how many of its requests one counts half in what groups with auto_replicas get.",
            extra={"unit": "requests"},
        ),
    ] = 500
    warm_up: WarmUp | None = None  # of replicas that join; None: they take traffic cold

    @property
    def names(self) -> ModelNames:
        """Every name of a model, alias or adapter that it answers to."""
        return ModelNames(self.models, self.aliases, self.adapters)


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
    signature: Signature | UnsetType = UNSET  # by the control plane; routers from before it pass it over
    config: msgspec.Raw


# --- reading and writing -----------------------------------------------------------------------------


class LoadedSnapshot(Frozen, frozen=True):
    """A snapshot that passed every check. ``document`` is the envelope as received, for the last-known-good file."""

    revision: int
    sha256: str
    config: RouterConfig
    document: bytes
    schema: int = SCHEMA_VERSION
    signature: Signature | None = None  # as it came: whether it holds is for whoever has the key to say

    @property
    def signed_text(self) -> bytes:
        """What its signature is of; AssertionError where there is none."""
        if self.signature is None:
            raise AssertionError("the snapshot is not signed")
        of = self.signature
        return signed_text(
            schema=self.schema,
            revision=self.revision,
            sha256=self.sha256,
            key=of.key,
            issued_at=of.issued_at,
            expires_at=of.expires_at,
        )


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
    return LoadedSnapshot(
        revision=envelope.revision,
        sha256=actual,
        config=config,
        document=document,
        schema=envelope.schema,
        signature=None if envelope.signature is UNSET else envelope.signature,
    )


def sign_document(
    document: bytes, *, key: str, issued_at: int, expires_at: int, sign: Callable[[bytes], bytes]
) -> bytes:
    """A snapshot's document with a signature by the key of that id; ``config`` keeps its bytes.

    ConfigError for what is no snapshot. What ``dump_snapshot`` made is not checked again.
    """
    envelope = _decoded(_envelopes, document)
    digest = hashlib.sha256(bytes(envelope.config)).hexdigest()
    text = signed_text(
        schema=envelope.schema,
        revision=envelope.revision,
        sha256=digest,
        key=key,
        issued_at=issued_at,
        expires_at=expires_at,
    )
    made = Signature(key=key, issued_at=issued_at, expires_at=expires_at, value=sign(text).hex())
    return _encoder.encode(msgspec.structs.replace(envelope, sha256=digest, signature=made))


def encode_config(config: RouterConfig) -> bytes:
    """The bytes whose digest names a config: equal configs give equal bytes within one release."""
    tree = msgspec.to_builtins(config)
    _leave_out(tree["pools"], "warm_up")
    if tree["access"] is not None:
        _leave_out(tree["access"]["keys"], "expires_at")
    return msgspec.json.encode(tree)


def _leave_out(rows: Iterable[dict[str, object]], name: str) -> None:
    """What says nothing is not written, so that routers which do not know the name read the rest all the same."""
    for row in rows:
        if row[name] is None:
            del row[name]


def load_settings(document: bytes) -> Settings:
    """Read a policy file, ``{"strategy": NAME, ...its settings}``; ConfigError names what is wrong."""
    return _decoded(_policies, document)


def check_config(config: RouterConfig) -> None:
    """The rules that types cannot say: unique names, known references, usable URLs."""
    _check_unique((pool.name for pool in config.pools), "$.pools", "pool")
    _check_unique((r.name for pool in config.pools for r in pool.replicas), "$.pools[*].replicas", "replica")
    _check_models(config)
    keys = {key.name for key in config.access.keys} if config.access else set()
    for index, pool in enumerate(config.pools):
        _check_pool(pool, f"$.pools[{index}]", keys)
    if config.access is not None:
        groups = {group.name for pool in config.pools for group in pool.groups}
        models = {name for pool in config.pools for name, _ in pool.names}
        check_access(config.access, groups, models if all(pool.models for pool in config.pools) else None)


def _check_pool(pool: PoolConfig, path: str, keys: Collection[str]) -> None:
    _check_unique((group.name for group in pool.groups), f"{path}.groups", "task group")
    adapters = {adapter.name for adapter in pool.adapters}
    for index, replica in enumerate(pool.replicas):
        check_base_url(replica.url, f"{path}.replicas[{index}].url")
        check_held(replica.adapters, adapters, f"{path}.replicas[{index}].adapters")
    replicas = {replica.name for replica in pool.replicas}
    models = {name for name, _ in pool.names} if pool.models else None
    check_groups(pool.groups, replicas, models, pool.name, f"{path}.groups")
    check_claimed_keys(pool.groups, keys, f"{path}.groups")
    check_trial(pool.policy, f"{path}.policy", {group.name for group in pool.groups if group.policy is None})
    for index, group in enumerate(pool.groups):
        if group.policy is not None:
            check_trial(group.policy, f"{path}.groups[{index}].policy", None)


def _check_models(config: RouterConfig) -> None:
    """A name belongs to one pool, and at most one pool takes any model."""
    owners: dict[str, str] = {}
    any_model: str | None = None
    for index, pool in enumerate(config.pools):
        check_names(pool.names, pool.name, f"$.pools[{index}]", owners)
        if not pool.models and any_model is not None:
            raise ConfigError(f"$.pools[{index}].models", f"every model is already served by pool {any_model!r}")
        any_model = any_model if pool.models else pool.name


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
