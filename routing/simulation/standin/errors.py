"""What the stand-in refuses, in vLLM's words and shapes (vLLM 0.32.0: 400 and 404, never 422)."""

from __future__ import annotations

from typing import Any

import msgspec


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
