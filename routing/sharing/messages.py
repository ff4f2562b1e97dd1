"""Updates as messages on a channel of the server: sealed with a key that the server does not have.

A message is the identity of the router's process, a sequence number, a nonce and the update in MessagePack, encrypted
with AES-256-GCM. Channel, identity and number are authenticated with it. Key and channel follow from the fleet's
``hash_secret``, so fleets that share a server do not see each other, and whoever can publish on the channel, but has no
key, can tell routers nothing. A message that was recorded and is published again is older than what its receiver has.
"""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from struct import Struct as Layout
from struct import error
from typing import Final, NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from routing.schema import derived_key
from routing.sharing.view import Update

VERSION: Final = 1
IDENTITY_BYTES: Final = 8
_HEADER: Final = Layout(f"!{IDENTITY_BYTES}sQ")
_NONCE_BYTES: Final = 12

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Update).decode


class Message(NamedTuple):
    """An update and its origin."""

    identity: bytes
    sequence: int
    update: Update


class Seal:
    """Seals and opens messages of one fleet."""

    def __init__(self, hash_secret: str) -> None:
        name = f"{VERSION} {sys.byteorder}".encode()  # of hashes, whose bytes are this machine's
        digest = blake2b(name, digest_size=8, key=derived_key(hash_secret, "shared state names")).hexdigest()
        self.channel = f"warmpath-state:{digest}".encode()
        self._cipher = AESGCM(derived_key(hash_secret, "shared state"))

    def close(self, message: Message) -> bytes:
        """A message as bytes."""
        header, nonce = _HEADER.pack(message.identity, message.sequence), os.urandom(_NONCE_BYTES)
        return header + nonce + self._cipher.encrypt(nonce, _encode(message.update), self.channel + header)

    def open(self, data: bytes) -> Message | None:
        """The message; None if it is not one of this fleet's."""
        try:
            identity, sequence = origin_of(data)
            header, nonce = data[: _HEADER.size], data[_HEADER.size : _HEADER.size + _NONCE_BYTES]
            text = self._cipher.decrypt(nonce, data[_HEADER.size + _NONCE_BYTES :], self.channel + header)
            return Message(identity, sequence, _decode(text))
        except (InvalidTag, ValueError, error, msgspec.MsgspecError):
            return None


def origin_of(data: bytes) -> tuple[bytes, int]:
    """Identity and sequence number that a message claims; struct.error if it is too short."""
    identity, sequence = _HEADER.unpack_from(data)
    return identity, sequence
