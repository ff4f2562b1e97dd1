"""Who numbered a configuration, and until when its word holds: what of a snapshot is signed, and how that is written.

The signature is Ed25519's (RFC 8032). A router needs the public key alone, so nothing that lies on its host, nor the
token that it shares with the control plane, is enough to tell other routers what to do. It covers every field of the
envelope: ``config`` by its digest, itself without ``value``. This module knows no cryptography; who signs and who
verifies bring their own.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import Meta, Struct

from routing.schema.base import of_form

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
