"""Encryption at rest, keyed hashes of secrets that are only compared, and the Ed25519 key that signs configurations.

Every key is derived from ``SECRET_KEY``, one per purpose. Decryption also tries ``SECRET_KEY_FALLBACKS``, so a key is
rotated by moving the old one there.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.conf import settings
from django.utils.encoding import force_bytes

from controlplane.errors import DecryptionError


def encrypt(plain: bytes) -> bytes:
    """Encrypt and authenticate; the result is about 4/3 of the length."""
    return _fernet().encrypt(plain)


def decrypt(encrypted: bytes | memoryview) -> bytes:
    """The plain bytes. DecryptionError if the data was altered or its key is unknown."""
    try:
        return _fernet().decrypt(bytes(encrypted))
    except InvalidToken:
        raise DecryptionError(
            "A stored secret cannot be read: WARMPATH_SECRET_KEY is not the key it was encrypted with. "
            "Put the former key into WARMPATH_SECRET_KEY_FALLBACKS."
        ) from None


def reencrypt(encrypted: bytes | memoryview) -> bytes | None:
    """The data encrypted with the current key; None where it is already. DecryptionError as for ``decrypt``."""
    current = _fernets()[0]
    try:
        current.decrypt(bytes(encrypted))
    except InvalidToken:
        return current.encrypt(decrypt(encrypted))
    return None


def keyed_digest(purpose: str, value: str) -> str:
    """HMAC-SHA256 in hex, for secrets that are compared and never shown again."""
    return next(_digests(purpose, value))


def matches_digest(purpose: str, value: str, digest: str) -> bool:
    """Whether ``digest`` is of this value, with the current key or a former one. Constant time for each key."""
    results = [hmac.compare_digest(candidate, digest) for candidate in _digests(purpose, value)]
    return any(results)


def _digests(purpose: str, value: str) -> Iterator[str]:
    for key in _keys(purpose):
        yield hmac.new(key, value.encode(), hashlib.sha256).hexdigest()


def _fernet() -> MultiFernet:
    return MultiFernet(_fernets())


def _fernets() -> list[Fernet]:
    return [Fernet(base64.urlsafe_b64encode(key)) for key in _keys("at rest")]


def _keys(purpose: str) -> Iterator[bytes]:
    """32 bytes for each secret key, the current one first."""
    for secret in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS):
        yield hmac.new(force_bytes(secret), f"warmpath {purpose}".encode(), hashlib.sha256).digest()


def private_key(secret: str) -> Ed25519PrivateKey:
    """The signing key derived from a secret: the same key for the same secret."""
    return Ed25519PrivateKey.from_private_bytes(
        hmac.new(secret.encode(), b"warmpath configurations", hashlib.sha256).digest()
    )


def public_key(secret: str) -> str:
    """The public key for routers: 64 hex digits."""
    return private_key(secret).public_key().public_bytes_raw().hex()
