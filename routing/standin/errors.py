"""What the stand-in refuses, in vLLM's words and shapes (vLLM 0.32.0: 400 and 404, never 422).

Misbehaviour on demand, for tests and demos: ``POST /standin/fault``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct


class ApiError(Exception):
    """A refusal. ``kind`` and ``param`` are the fields ``type`` and ``param`` of the error object."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The error object as vLLM words it."""
        return error_body(self.status, self.kind, str(self), self.param)


def error_body(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    """``{"error": {...}}``, compact."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A 400 that vLLM itself decides."""
    return ApiError(400, "BadRequestError", message, param)


def invalid(fact: str, location: str, message: str, given: Any, context: str = "") -> ApiError:
    """A 400 that the framework's validation decides; ``location`` is such as ``body.max_tokens``."""
    detail = f"{{'type': '{fact}', 'loc': '{location}', 'msg': '{message}', 'input': '{_shown(given)}'{context}}}"
    return ApiError(400, "Bad Request", f"1 validation error:\n  {detail}", location)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def unknown_model(asked: str, served: str) -> ApiError:
    """404: this replica serves another model."""
    message = f"The model `{asked}` does not exist. Valid aliases: {served}."
    return ApiError(404, "NotFoundError", message, "model")


def queue_full() -> ApiError:
    """503 of a bounded queue; vLLM sends no Retry-After."""
    message = "The engine is currently busy and cannot accept new requests. "
    return ApiError(503, "Service Unavailable", f"{message}Please try again later or on a different instance.", None)


def prompt_too_long(tokens: int, max_model_len: int) -> ApiError:
    """400: the prompt leaves no room for an answer."""
    known = min(tokens, max_model_len + 1)
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
        f"{known} input tokens, which exceeds this limit even without any output tokens. Please reduce the length of "
        f"the input prompt. (parameter=input_tokens, value={known})"
    )
    return bad_request(message, "input_tokens")


def total_too_long(tokens: int, max_tokens: int, max_model_len: int) -> ApiError:
    """400: prompt and answer together do not fit."""
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {max_tokens} output "
        f"tokens and your prompt contains at least {tokens} input tokens, for a total of at least "
        f"{tokens + max_tokens} tokens. Please reduce the length of the input prompt or the number of requested "
        f"output tokens. (parameter=input_tokens, value={tokens})"
    )
    return bad_request(message, "input_tokens")


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
