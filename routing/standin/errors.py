"""Error responses with the messages of vLLM 0.32.0 (400 and 404, never 422), and faults of ``POST /standin/fault``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct


class ApiError(Exception):
    """An error response. ``kind`` and ``param`` are the fields ``type`` and ``param`` of its error object."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The error object as JSON."""
        return error_body(self.status, self.kind, str(self), self.param)


def error_body(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    """``{"error": {...}}``, compact."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A 400 of vLLM's own checks."""
    return ApiError(400, "BadRequestError", message, param)


def invalid(kind: str, location: str, message: str, value: Any, context: str = "") -> ApiError:
    """A 400 of the framework's validation; ``location`` is a path such as ``body.max_tokens``."""
    shown = f"<{type(value).__name__} of {len(value)} items>" if isinstance(value, dict | list) else str(value)
    detail = f"{{'type': '{kind}', 'loc': '{location}', 'msg': '{message}', 'input': '{shown}'{context}}}"
    return ApiError(400, "Bad Request", f"1 validation error:\n  {detail}", location)


def unknown_model(requested: str, served: str) -> ApiError:
    """404: this replica serves another model."""
    message = f"The model `{requested}` does not exist. Valid aliases: {served}."
    return ApiError(404, "NotFoundError", message, "model")


def queue_full() -> ApiError:
    """503 of a bounded queue; vLLM sends no Retry-After."""
    message = "The engine is currently busy and cannot accept new requests. "
    return ApiError(503, "Service Unavailable", f"{message}Please try again later or on a different instance.")


def prompt_too_long(tokens: int, max_model_len: int) -> ApiError:
    """400: the prompt leaves no space for output."""
    counted = min(tokens, max_model_len + 1)
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
        f"{counted} input tokens, which exceeds this limit even without any output tokens. Please reduce the length of "
        f"the input prompt. (parameter=input_tokens, value={counted})"
    )
    return bad_request(message, "input_tokens")


def total_too_long(tokens: int, max_tokens: int, max_model_len: int) -> ApiError:
    """400: prompt and output together do not fit."""
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {max_tokens} output "
        f"tokens and your prompt contains at least {tokens} input tokens, for a total of at least "
        f"{tokens + max_tokens} tokens. Please reduce the length of the input prompt or the number of requested "
        f"output tokens. (parameter=input_tokens, value={tokens})"
    )
    return bad_request(message, "input_tokens")


class NoFault(Struct, tag_field="kind", tag="none", frozen=True, forbid_unknown_fields=True):
    """Normal operation."""


class Slow(Struct, tag_field="kind", tag="slow", frozen=True, forbid_unknown_fields=True):
    """Every engine step takes ``factor`` times as long."""

    factor: Annotated[float, Meta(ge=0.01, le=10_000)] = 5.0


class Hang(Struct, tag_field="kind", tag="hang", frozen=True, forbid_unknown_fields=True):
    """The engine takes no steps: /health stays 200, a stream gets its headers and then nothing, gauges go stale."""


class CrashAfterChunks(Struct, tag_field="kind", tag="crash_after_chunks", frozen=True, forbid_unknown_fields=True):
    """Every stream breaks after this many ``data:`` events; a response that is not streamed breaks at its end.

    ``how`` = ``connection``: the connection is aborted, as when the API server crashes. ``how`` = ``engine``: an error
    event and [DONE] inside the 200 stream, as when only the engine's process crashes.
    """

    chunks: Annotated[int, Meta(ge=0, le=1_000_000)] = 3
    how: Literal["connection", "engine"] = "connection"


class Refuse(Struct, tag_field="kind", tag="refuse", frozen=True, forbid_unknown_fields=True):
    """Every request for a generation gets ``status`` at once."""

    status: Annotated[int, Meta(ge=400, le=599)] = 503


Fault = NoFault | Slow | Hang | CrashAfterChunks | Refuse

_decoder: msgspec.json.Decoder[Fault] = msgspec.json.Decoder(Fault)


def read_fault(document: bytes) -> Fault:
    """Read and check a fault; ApiError describes what is wrong."""
    try:
        return _decoder.decode(document)
    except msgspec.DecodeError as error:
        raise bad_request(str(error)) from None
