"""Snapshots: numbered configurations as documents, with their digest, their signature and all checks.

A ``Snapshot`` is an envelope that keeps ``config`` as raw bytes. The schema number is read before anything inside is,
and ``sha256`` is the digest of exactly those bytes, so that two releases which would encode a config differently agree
on its digest. ``load_snapshot`` checks the envelope, the schema number, the digest, the types of the config and then
the rules that types cannot express; the first problem is a ``ConfigError`` that names the path.

The signature is Ed25519 (RFC 8032). A router needs the public key alone, so the secrets on a router's host do not
suffice to publish a configuration to other routers. The signature covers every field of the envelope: ``config`` by its
digest, and itself without ``value``. This module contains no cryptography; callers pass functions that sign and verify.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from routing.schema.access import check_access
from routing.schema.fields import AddressRules, ConfigError, Frozen, check_base_url, decode, of_form
from routing.schema.fleet import PoolConfig, RouterConfig, check_groups, check_model_names
from routing.schema.limits import Limits
from routing.schema.ring import MAX_ON_RING
from routing.schema.strategies import check_canary


def check_config(config: RouterConfig) -> None:
    """Check the rules that types cannot express: unique names, known references, usable URLs; ConfigError."""
    _check_unique((pool.name for pool in config.pools), "$.pools", "pool")
    _check_unique(
        (replica.name for pool in config.pools for replica in pool.replicas), "$.pools[*].replicas", "replica"
    )
    check_model_names(config.pools)
    if config.replica_networks is not None:
        AddressRules(config.replica_networks)  # ConfigError for a text that is not a network
    keys = {key.name for key in config.access.keys} if config.access else set()
    for index, pool in enumerate(config.pools):
        path = f"$.pools[{index}]"
        _check_replicas(pool, f"{path}.replicas")
        _check_unique((group.name for group in pool.groups), f"{path}.groups", "task group")
        check_groups(pool, keys, f"{path}.groups")
        check_canary(pool.policy, f"{path}.policy", {group.name for group in pool.groups if group.policy is None})
        for at, group in enumerate(pool.groups):
            if group.policy is not None:
                check_canary(group.policy, f"{path}.groups[{at}].policy", None)
    if config.access is not None:
        groups = {group.name for pool in config.pools for group in pool.groups}
        models = {name for pool in config.pools for name, _ in pool.names}
        check_access(config.access, groups, models if all(pool.models for pool in config.pools) else None)


def _check_replicas(pool: PoolConfig, path: str) -> None:
    adapters = {adapter.name for adapter in pool.adapters}
    for index, replica in enumerate(pool.replicas):
        check_base_url(replica.url, f"{path}[{index}].url")
        for position, name in enumerate(replica.adapters or ()):
            if name not in adapters:
                raise ConfigError(f"{path}[{index}].adapters[{position}]", f"the pool has no adapter {name!r}")
    ranks = sum(replica.data_parallel_size for replica in pool.replicas)
    if ranks > MAX_ON_RING:
        raise ConfigError(path, f"{ranks} replicas and ranks, where a pool has at most {MAX_ON_RING}")


def _check_unique(names: Iterable[str], path: str, noun: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(path, f"two {noun}s are named {name!r}")
        seen.add(name)


KEY_HEX = r"[0-9a-f]{64}"  # a public key, 32 bytes

UnixSeconds = Annotated[int, Meta(ge=0, le=2**53)]


class Signature(Struct, frozen=True, kw_only=True):
    """The control plane's signature of a snapshot, and when it was made and expires."""

    key: Annotated[str, of_form(r"[0-9a-f]{16}")]  # id of the public key that verifies it
    issued_at: UnixSeconds
    expires_at: UnixSeconds  # later the document is rejected; a router that runs it already keeps running it
    value: Annotated[str, of_form(r"[0-9a-f]{128}")]


def key_id(public_key: str) -> str:
    """The id of a public key of 64 hex digits: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:16]


def signed_text(*, schema: int, revision: int, sha256: str, key: str, issued_at: int, expires_at: int) -> bytes:
    """The bytes that are signed: one field a line, none of which can contain a newline."""
    fields = (schema, revision, sha256, key, issued_at, expires_at)
    return "\n".join(("warmpath configuration 1", *map(str, fields))).encode()


SCHEMA_VERSION = 1
OLDEST_SCHEMA = 1


class Snapshot(Struct, frozen=True, kw_only=True):
    """The envelope of a numbered config. Of two snapshots the one with the higher ``revision`` wins."""

    schema: int = SCHEMA_VERSION
    revision: Annotated[int, Meta(ge=1)]
    sha256: str | UnsetType = UNSET  # of the bytes of ``config``; a hand-written file may leave it out
    signature: Signature | UnsetType = UNSET  # by the control plane; routers from before signatures ignore it
    config: msgspec.Raw


class LoadedSnapshot(Frozen, frozen=True):
    """A snapshot that passed every check. ``document`` is the envelope as received, for the last-known-good file."""

    revision: int
    sha256: str
    config: RouterConfig
    document: bytes
    schema: int = SCHEMA_VERSION
    signature: Signature | None = None  # not verified yet

    @property
    def signed_text(self) -> bytes:
        """The bytes that its signature covers; AssertionError if there is no signature."""
        if self.signature is None:
            raise AssertionError("the snapshot is not signed")
        return signed_text(
            schema=self.schema,
            revision=self.revision,
            sha256=self.sha256,
            key=self.signature.key,
            issued_at=self.signature.issued_at,
            expires_at=self.signature.expires_at,
        )


_DEFAULT_LIMITS = Limits()
_encoder = msgspec.json.Encoder(order="deterministic")
_envelopes = msgspec.json.Decoder(Snapshot)
_configs = msgspec.json.Decoder(RouterConfig)


def dump_snapshot(config: RouterConfig, revision: int) -> LoadedSnapshot:
    """Number a config and add its digest; ConfigError if a router would reject it."""
    body = encode_config(config)
    envelope = Snapshot(revision=revision, sha256=hashlib.sha256(body).hexdigest(), config=msgspec.Raw(body))
    return load_snapshot(_encoder.encode(envelope))


def load_snapshot(document: bytes) -> LoadedSnapshot:
    """Read and check a whole snapshot; ConfigError names the first problem."""
    envelope = decode(_envelopes, document)
    if not OLDEST_SCHEMA <= envelope.schema <= SCHEMA_VERSION:
        known = f"{OLDEST_SCHEMA} to {SCHEMA_VERSION}"
        raise ConfigError("$.schema", f"schema {envelope.schema} is not supported by this router ({known})")
    body = bytes(envelope.config)
    actual = hashlib.sha256(body).hexdigest()
    if envelope.sha256 is not UNSET and envelope.sha256 != actual:
        reason = f"the config's digest is {actual}, not {envelope.sha256[:64]}: it was altered or truncated"
        raise ConfigError("$.sha256", reason)
    config = decode(_configs, body)
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
    """A snapshot's document with a signature by the key with this id; ``config`` keeps its bytes.

    Raises ConfigError if the document is not a snapshot. The config itself is not checked again.
    """
    envelope = decode(_envelopes, document)
    digest = hashlib.sha256(bytes(envelope.config)).hexdigest()
    text = signed_text(
        schema=envelope.schema,
        revision=envelope.revision,
        sha256=digest,
        key=key,
        issued_at=issued_at,
        expires_at=expires_at,
    )
    signature = Signature(key=key, issued_at=issued_at, expires_at=expires_at, value=sign(text).hex())
    return _encoder.encode(msgspec.structs.replace(envelope, sha256=digest, signature=signature))


def encode_config(config: RouterConfig) -> bytes:
    """The bytes whose digest identifies a config: equal configs give equal bytes within one release.

    Settings that older routers do not know are left out where they have their default.
    """
    tree = msgspec.to_builtins(config)
    _omit_default([tree], "replica_networks")
    _omit_default(tree["pools"], "warm_up")
    _omit_default([tree["limits"]], "response_timeout_s", _DEFAULT_LIMITS.response_timeout_s)
    _omit_default([tree["limits"]], "retry_on", _DEFAULT_LIMITS.retry_on)
    if tree["access"] is not None:
        _omit_default(tree["access"]["keys"], "expires_at")
    return msgspec.json.encode(tree)


def _omit_default(rows: Iterable[dict[str, object]], name: str, default: object = None) -> None:
    for row in rows:
        if row[name] == default:
            del row[name]
