"""A numbered configuration on its way to routers: written, signed and read again.

Theory of operation. A ``Snapshot`` is an envelope whose ``config`` is kept as raw bytes: the schema number is read
before anything inside is, and ``sha256`` is of exactly those bytes, so that two releases which would encode a
config differently still agree on its digest. ``load_snapshot`` goes envelope -> schema -> digest -> config -> the
rules that types cannot say, and the first thing wrong is a ``ConfigError`` that names the path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from routing.schema.base import ConfigError, Frozen
from routing.schema.checks import check_config
from routing.schema.decoding import decoded
from routing.schema.fleet import RouterConfig
from routing.schema.limits import Limits
from routing.schema.signatures import Signature, signed_text

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
    sealed = Snapshot(revision=revision, sha256=hashlib.sha256(body).hexdigest(), config=msgspec.Raw(body))
    return load_snapshot(_encoder.encode(sealed))


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
