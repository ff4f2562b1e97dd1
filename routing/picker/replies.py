"""Responses of the picker to Envoy, in the protocol of external processing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from routing.http.response import LocalResponse
from routing.picker.messages import ProcessingResponse

ENDPOINT: Final = "x-gateway-destination-endpoint"
NAMESPACE: Final = "envoy.lb"  # of dynamic metadata
CHUNK_BYTES: Final = 62_000  # of a streamed body; data planes may limit a chunk to 64 KiB
OVERWRITE: Final = 2  # OVERWRITE_IF_EXISTS_OR_ADD: no value of the client remains

Fields = Sequence[tuple[str, bytes]]


def mutation(fields: Fields, removed: Sequence[str] = ()) -> dict[str, Any]:
    """A header mutation: fields to set, in place of all others with their names, and names to remove."""
    options = [
        {"header": {"key": name, "raw_value": value}, "append_action": OVERWRITE, "keep_empty_value": True}
        for name, value in fields
    ]
    return {"set_headers": options, "remove_headers": removed}


def headers_reply(kind: str, fields: Fields = (), removed: Sequence[str] = (), *, metadata: Any = None) -> Any:
    """The reply to ``request_headers`` or ``response_headers``."""
    response = {"header_mutation": mutation(fields, removed)} if fields or removed else {}
    return ProcessingResponse(**{kind: {"response": response}}, dynamic_metadata=metadata)


class DecisionReply:
    """A decision: the endpoints, and the header fields of the request to the replica."""

    def __init__(self, endpoints: str, fields: list[tuple[str, bytes]], removed: Sequence[str]) -> None:
        self._fields = fields
        self._removed = removed
        named = {"fields": {ENDPOINT: {"string_value": endpoints}}}
        self._metadata = {"fields": {NAMESPACE: {"struct_value": named}}}

    def headers_reply(self) -> Any:
        """The decision as the reply to the headers of the request."""
        return headers_reply("request_headers", self._fields, self._removed, metadata=self._metadata)

    def body_reply(self, body: bytes | None) -> Any:
        """The decision as the reply to a buffered body. ``body``: in its place; None: it is unchanged."""
        length = [] if body is None else [("content-length", b"%d" % len(body))]
        response: dict[str, Any] = {"header_mutation": mutation([*self._fields, *length], self._removed)}
        if body is not None:
            response["body_mutation"] = {"body": body}
        return ProcessingResponse(request_body={"response": response}, dynamic_metadata=self._metadata)


def body_replies(kind: str, body: bytes, *, is_end: bool) -> Iterator[Any]:
    """The body in chunks, for a body that is streamed in full duplex. ``is_end``: no trailers follow."""
    for start in range(0, max(1, len(body)), CHUNK_BYTES):
        chunk, end = body[start : start + CHUNK_BYTES], is_end and start + CHUNK_BYTES >= len(body)
        streamed = {"body": chunk, "end_of_stream": end}
        yield ProcessingResponse(**{kind: {"response": {"body_mutation": {"streamed_response": streamed}}}})


def response_body_reply(body: bytes | None) -> Any:
    """The reply to a part of a response's body in any other mode. ``body``: in its place; None: it is unchanged."""
    if body is None:
        return ProcessingResponse(response_body={})
    changed: dict[str, Any] = {"body": body} if body else {"clear_body": True}
    return ProcessingResponse(response_body={"response": {"body_mutation": changed}})


def trailers_reply(kind: str) -> Any:
    """The reply to trailers, which stay unchanged."""
    return ProcessingResponse(**{kind: {}})


def immediate_reply(response: LocalResponse, request_id: str) -> Any:
    """A response of the picker's own, in place of the replica's."""
    fields = [(name.decode().lower(), value) for name, value in response.headers]
    if response.body:
        fields.append(("content-type", b"application/json"))
    if request_id:
        fields.append(("x-request-id", request_id.encode()))
    immediate = {"status": {"code": response.status}, "headers": mutation(fields), "body": response.body}
    return ProcessingResponse(immediate_response=immediate)
