"""JSON read by a type, with what is wrong said in our own error."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from routing.schema.base import ConfigError

MAX_REASON_CHARS = 200  # of msgspec's, which quotes a name that nobody knows, however long it is

T = TypeVar("T")


def decoded(decoder: msgspec.json.Decoder[T], document: bytes) -> T:
    """What ``document`` says; ConfigError with the path and the reason that msgspec gives."""
    try:
        return decoder.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        text = str(error)
        reason, _, path = text.rpartition(" - at `$")
        raise ConfigError("$" + path.rstrip("`") if reason else "$", (reason or text)[:MAX_REASON_CHARS]) from None
