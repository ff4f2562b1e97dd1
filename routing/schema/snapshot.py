"""The rules of a whole configuration that types cannot say; those of one part stand with that part.

A numbered configuration on its way to routers: written, signed and read again.

Theory of operation. A ``Snapshot`` is an envelope whose ``config`` is kept as raw bytes: the schema number is read
before anything inside is, and ``sha256`` is of exactly those bytes, so that two releases which would encode a
config differently still agree on its digest. ``load_snapshot`` goes envelope -> schema -> digest -> config -> the
rules that types cannot say, and the first thing wrong is a ``ConfigError`` that names the path.

Who numbered a configuration, and until when its word holds: what of a snapshot is signed, and how that is written.

The signature is Ed25519's (RFC 8032). A router needs the public key alone, so nothing that lies on its host, nor the
token that it shares with the control plane, is enough to tell other routers what to do. It covers every field of the
envelope: ``config`` by its digest, itself without ``value``. This module knows no cryptography; who signs and who
verifies bring their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from routing.schema.access import check_access
from routing.schema.fields import AddressRules, ConfigError, Frozen, check_base_url, decoded, of_form
from routing.schema.fleet import PoolConfig, RouterConfig, check_held, check_names
from routing.schema.groups import check_claimed_keys, check_groups
from routing.schema.limits import Limits
from routing.schema.ring import MAX_ON_RING
from routing.schema.strategies import check_trial


def check_config(config: RouterConfig) -> None:
    """The rules that types cannot say: unique names, known references, usable URLs."""
    _check_unique((pool.name for pool in config.pools), "$.pools", "pool")
    _check_unique((r.name for pool in config.pools for r in pool.replicas), "$.pools[*].replicas", "replica")
    _check_models(config)
    if config.replica_networks is not None:
        AddressRules(config.replica_networks)  # ConfigError for what is no network
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
    ranks = sum(replica.data_parallel_size for replica in pool.replicas)
    if ranks > MAX_ON_RING:
        raise ConfigError(f"{path}.replicas", f"{ranks} replicas and ranks, where a pool has at most {MAX_ON_RING}")
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


KEY_HEX = r"[0-9a-f]{64}"  # a public key, 32 bytes

Moment = Annotated[int, Meta(ge=0, le=2**53)]  # seconds since 1970


class Signature(Struct, frozen=True, kw_only=True):
    """A signature with what it says besides the configuration."""

    key: Annotated[str, of_form(r"[0-9a-f]{16}")]  # id of the public key that it is checked with
    issued_at: Moment
    expires_at: Moment  # after it a document is not taken any more, and one in force is served on
    value: Annotated[str, of_form(r"[0-9a-f]{128}")]


def key_id(public_key: str) -> str:
    """What a public key, of 64 hex digits, is called: the beginning of its SHA-256."""
    return hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:16]


def signed_text(*, schema: int, revision: int, sha256: str, key: str, issued_at: int, expires_at: int) -> bytes:
    """The bytes that are signed. Each field has its line, and none can hold a line's end."""
    fields = (schema, revision, sha256, key, issued_at, expires_at)
    return "\n".join(("warmpath configuration 1", *map(str, fields))).encode()


SCHEMA_VERSION = 1
OLDEST_SCHEMA = 1


class Snapshot(Struct, frozen=True, kw_only=True):
    """A numbered config on its way to routers. Of two snapshots the higher ``revision`` wins."""

    schema: int = SCHEMA_VERSION
    revision: Annotated[int, Meta(ge=1)]
    sha256: str | UnsetType = UNSET  # of the bytes of ``config``; a hand-written file may leave it out
    signature: Signature | UnsetType = UNSET  # by the control plane; routers from before it pass it over
    config: msgspec.Raw


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


_DEFAULT_LIMITS = Limits()
_encoder = msgspec.json.Encoder(order="deterministic")
_envelopes = msgspec.json.Decoder(Snapshot)
_configs = msgspec.json.Decoder(RouterConfig)


def dump_snapshot(config: RouterConfig, revision: int) -> LoadedSnapshot:
    """Number a config and seal it with its digest; ConfigError if a router would refuse it."""
    body = encode_config(config)
    encrypted = Snapshot(revision=revision, sha256=hashlib.sha256(body).hexdigest(), config=msgspec.Raw(body))
    return load_snapshot(_encoder.encode(encrypted))


def load_snapshot(document: bytes) -> LoadedSnapshot:
    """Read and check a whole snapshot; ConfigError names the first thing wrong."""
    envelope = decoded(_envelopes, document)
    if not OLDEST_SCHEMA <= envelope.schema <= SCHEMA_VERSION:
        known = f"{OLDEST_SCHEMA} to {SCHEMA_VERSION}"
        raise ConfigError("$.schema", f"schema {envelope.schema} is not one this router reads ({known})")
    body = bytes(envelope.config)
    actual = hashlib.sha256(body).hexdigest()
    if envelope.sha256 is not UNSET and envelope.sha256 != actual:
        raise ConfigError(
            "$.sha256", f"the config's digest is {actual}, not {envelope.sha256[:64]}: it was altered or torn"
        )
    config = decoded(_configs, body)
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
    envelope = decoded(_envelopes, document)
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
    _leave_out([tree], "replica_networks")
    _leave_out(tree["pools"], "warm_up")
    _leave_out([tree["limits"]], "response_timeout_s", _DEFAULT_LIMITS.response_timeout_s)
    _leave_out([tree["limits"]], "retry_on", _DEFAULT_LIMITS.retry_on)
    if tree["access"] is not None:
        _leave_out(tree["access"]["keys"], "expires_at")
    return msgspec.json.encode(tree)


def _leave_out(rows: Iterable[dict[str, object]], name: str, default: object = None) -> None:
    """What says nothing is not written, so that routers which do not know the name read the rest all the same."""
    for row in rows:
        if row[name] == default:
            del row[name]
