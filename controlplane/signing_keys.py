"""The pair of keys that configurations are signed and checked with, out of one secret text."""

from __future__ import annotations

import hashlib
import hmac

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def private_key(secret: str) -> Ed25519PrivateKey:
    """The same for the same text, and of no use to whoever has another key that is derived from it."""
    return Ed25519PrivateKey.from_private_bytes(
        hmac.new(secret.encode(), b"warmpath configurations", hashlib.sha256).digest()
    )


def public_key(secret: str) -> str:
    """What routers are given: 64 hex digits."""
    return private_key(secret).public_key().public_bytes_raw().hex()
