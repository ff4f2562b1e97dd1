"""Whether a configuration is the control plane's own word.

Theory of operation. A router that was given public keys takes what is pushed to it only with a signature by one of
them that has not ended, and what lies on its disk only with one that may have ended since: a control plane that is
away must not end anybody's service. Two keys are accepted while one takes the place of the other. A router without
keys looks at no signature; it believes whoever has the admin port's token. A file that an operator names on the
command line is believed as the command line is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from routing.schema import ConfigError, LoadedSnapshot, Signature, key_id

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SKEW_S = 300  # that clocks may differ by
SIGNATURE = "$.signature"


class SignatureState(StrEnum):
    """What is known of the configuration in force."""

    VERIFIED = "verified"
    EXPIRED = "expired"  # verified, and its time is over: the control plane has not renewed it
    UNSIGNED = "unsigned"  # or not so that it holds, although there are keys: it came from a file
    UNCHECKED = "unchecked"  # there are no keys


class Signatures:
    """The public keys that a router accepts, each of 64 hex digits; without any it checks nothing."""

    def __init__(self, keys: Sequence[str] = (), now: Callable[[], float] = time.time) -> None:
        self._keys = {key_id(key): _public_key(key) for key in keys}
        self._now = now

    def check_pushed(self, snapshot: LoadedSnapshot) -> None:
        """ConfigError unless the signature holds and has not ended."""
        self.check_kept(snapshot)
        ends = snapshot.signature.expires_at if self._keys and snapshot.signature else None
        if ends is not None and ends + SKEW_S < self._now():
            said = datetime.fromtimestamp(ends, UTC).isoformat(timespec="seconds")
            raise ConfigError(
                f"{SIGNATURE}.expires_at", f"the signature ended at {said}: an old document was sent again"
            )

    def check_kept(self, snapshot: LoadedSnapshot) -> None:
        """ConfigError unless the signature holds, whether or not it has ended."""
        if fault := self._fault(snapshot):
            raise fault

    def believed(self, snapshot: LoadedSnapshot) -> Signature | None:
        """Its signature, where that holds or there are no keys to tell by, whether or not it has ended."""
        return None if self._fault(snapshot) else snapshot.signature

    def told(self, snapshot: LoadedSnapshot) -> dict[str, Any]:
        """What is known of a configuration in force, for whoever asks."""
        signature = self.believed(snapshot)
        return {
            "state": self._state(signature),
            "key": signature.key if signature else None,
            "expires_at": signature.expires_at if signature else None,
        }

    def _state(self, believed: Signature | None) -> SignatureState:
        if not self._keys:
            return SignatureState.UNCHECKED
        if believed is None:
            return SignatureState.UNSIGNED
        return SignatureState.EXPIRED if believed.expires_at < self._now() else SignatureState.VERIFIED

    def _fault(self, snapshot: LoadedSnapshot) -> ConfigError | None:
        """Why the signature does not hold; None where it does, or there are no keys."""
        if not self._keys:
            return None
        signature = snapshot.signature
        if signature is None:
            return ConfigError(SIGNATURE, "it is not signed, and this router takes signed configurations alone")
        key = self._keys.get(signature.key)
        if key is None:
            known = ", ".join(self._keys)
            return ConfigError(f"{SIGNATURE}.key", f"it is signed with {signature.key}; this router accepts {known}")
        if not _verifies(key, bytes.fromhex(signature.value), snapshot.signed_text):
            return ConfigError(f"{SIGNATURE}.value", "the signature is not of this document: it was altered")
        return None


def _public_key(text: str) -> Ed25519PublicKey:
    """ValueError for what is no point of the curve. Imported here: a router without keys does without."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415 - see above

    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))


def _verifies(key: Ed25519PublicKey, value: bytes, text: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - as above

    try:
        key.verify(value, text)
    except InvalidSignature:
        return False
    return True
