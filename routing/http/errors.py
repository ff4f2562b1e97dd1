"""What the router answers by itself: OpenAI's error object, and an SSE event of it for a stream already begun."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from routing.http.response import LocalResponse

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    502: "bad_gateway_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


@dataclass(slots=True, eq=False)
class RejectedRequestError(Exception):
    """A request that the router refuses. ``must_close`` where the rest of the connection cannot be trusted or read."""

    status: int
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    must_close: bool = False
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())
    kind: str | None = None  # the error's type; None: the usual one of its status

    def answer(self) -> LocalResponse:
        """The refusal as a client sees it."""
        headers = self.headers
        if self.retry_after_s is not None:
            headers = (*headers, (b"Retry-After", b"%d" % self.retry_after_s))
        return LocalResponse(self.status, error_body(self.status, self.message, self.param, self.kind), headers)


def error_body(status: int, message: str, param: str | None = None, kind: str | None = None) -> bytes:
    """OpenAI's error object; ``code`` is the HTTP status, as vLLM has it."""
    kind = kind or _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def error_event(status: int, message: str, *, torn: bool) -> bytes:
    """The last event of a stream that cannot go on. ``torn``: the bytes before it did not end an event."""
    return (b"\n\n" if torn else b"") + b"data: " + error_body(status, message) + b"\n\n"
