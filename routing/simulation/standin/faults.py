"""Misbehaviour on demand, for tests and demos: ``POST /standin/fault``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct


class NoFault(Struct, tag_field="kind", tag="none", frozen=True, forbid_unknown_fields=True):
    """Behave."""


class Slow(Struct, tag_field="kind", tag="slow", frozen=True, forbid_unknown_fields=True):
    """Every engine step takes ``factor`` times as long."""

    factor: Annotated[float, Meta(ge=0.01, le=10_000)] = 5.0


class Hang(Struct, tag_field="kind", tag="hang", frozen=True, forbid_unknown_fields=True):
    """The engine stands still: /health stays 200, a stream gets its 200 head and then nothing, gauges go stale."""


class CrashAfterChunks(Struct, tag_field="kind", tag="crash_after_chunks", frozen=True, forbid_unknown_fields=True):
    """Every stream breaks after this many ``data:`` events; an answer that is not streamed breaks at its end.

    ``how`` = ``connection``: the connection is torn, as when the API server dies. ``how`` = ``engine``: an error event
    and [DONE] inside the 200 stream, as when only the engine's process dies.
    """

    chunks: Annotated[int, Meta(ge=0, le=1_000_000)] = 3
    how: Literal["connection", "engine"] = "connection"


class Refuse(Struct, tag_field="kind", tag="refuse", frozen=True, forbid_unknown_fields=True):
    """Every request for a generation is answered with ``status`` at once."""

    status: Annotated[int, Meta(ge=400, le=599)] = 503


Fault = NoFault | Slow | Hang | CrashAfterChunks | Refuse

_decoder: msgspec.json.Decoder[Fault] = msgspec.json.Decoder(Fault)


def read_fault(document: bytes) -> Fault:
    """Read and check a fault; ValueError says what is wrong."""
    try:
        return _decoder.decode(document)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
