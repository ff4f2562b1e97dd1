"""What the picker reads of a response that Envoy carries: its first token, its usage, and whether it failed."""

from __future__ import annotations

from routing.http.response import ResponseHead, is_encoded
from routing.http.response_json import ParsedResponse, Usage
from routing.http.usage import ResponseTail, UsageFilter, has_abort, has_token_event, is_aborted, parse_response
from routing.observability.metrics import Outcome
from routing.proxy.exchange import PRELUDE_PATHS
from routing.proxy.response_relay import response_outcome


class ObservedResponse:
    """One response. Keeps the end of its body only.

    ``hides_usage``: the engine was asked for the usage of the stream, and the client did not ask for it.
    """

    __slots__ = ("_filter", "_has_prelude", "_parsed", "_tail", "has_begun", "has_token", "head")

    def __init__(self, head: ResponseHead, path: bytes, *, hides_usage: bool) -> None:
        self.head = head
        self.has_begun = False  # the first body bytes have arrived
        self.has_token = False  # the first token has arrived; known of streams only
        self._has_prelude = path in PRELUDE_PATHS
        self._tail = ResponseTail()
        self._parsed: ParsedResponse | None = None  # a JSON response that arrived in one message
        self._filter = UsageFilter() if hides_usage and head.is_stream and not is_encoded(head) else None

    def add(self, data: bytes, *, last: bool) -> bytes:
        """Read body bytes; returns those that the client gets."""
        if last and not (self.has_begun or self.head.is_stream):
            self._parsed = parse_response(data)
        if self.head.is_stream and not self.has_token:
            self.has_token = has_token_event(data) if self._has_prelude else bool(data)
        self.has_begun = self.has_begun or bool(data)
        self._tail.add(data)
        if self._filter is None:
            return data
        return self._filter.feed(data) + (self._filter.flush() if last else b"")

    def held_back(self) -> bytes:
        """The incomplete event at the end of a stream that ends with trailers."""
        return b"" if self._filter is None else self._filter.flush()

    @property
    def error_body(self) -> bytes:
        """The end of an error's body."""
        return self._tail.text

    def usage(self) -> Usage | None:
        """The token usage that the complete response reports; None for an error or if it is not reported."""
        if self.head.status >= 300:
            return None
        return self._tail.usage() if self._parsed is None else self._parsed.usage

    def outcome(self) -> Outcome:
        """The outcome of the complete response."""
        return response_outcome(self.head.status, is_failed=self._is_failed())

    def _is_failed(self) -> bool:
        if self._parsed is not None:
            return is_aborted(self._parsed)
        return self._tail.has_error() if self.head.is_stream else has_abort(self._tail.text)
