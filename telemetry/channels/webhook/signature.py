"""Standard Webhooks signatures: ``v1,`` + base64 of HMAC-SHA256 over ``id.timestamp.body``.

Source: the specification at github.com/standard-webhooks/standard-webhooks, version 1.0.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable

PREFIX = "whsec_"
FEWEST_BYTES, MOST_BYTES = 24, 64  # of a secret


def new_secret() -> str:
    """A fresh secret of 32 bytes, in the form that libraries for receivers take."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def secret_bytes(secret: str) -> bytes:
    """The key of ``whsec_<base64>``; ValueError for another form or length."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("expected whsec_ and base64") from None
    if not FEWEST_BYTES <= len(key) <= MOST_BYTES:
        raise ValueError(f"expected {FEWEST_BYTES} to {MOST_BYTES} bytes in base64")
    return key


def checked_secret(given: object) -> str:
    """The secret as it is; ValueError for another form or length."""
    secret_bytes(str(given))
    return str(given)


def signature(keys: Iterable[bytes], message_id: str, timestamp_s: int, body: bytes) -> str:
    """The header's value: one signature per key, so that a secret can be changed without losing a message."""
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    digests = (hmac.new(key, signed, hashlib.sha256).digest() for key in keys)
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)
