"""Spans of sampled requests, and the W3C trace context that replicas get with them.

Theory of operation. A request that is not sampled costs a look at its ``traceparent`` and a random number, and its
headers pass unchanged. A sampled one has a server span and a client span for each attempt at a replica, a prefill leg
included; the replica's ``traceparent`` names its client span, so that an engine's own spans are children of it.
``tracestate`` is forwarded with it, unless the client's ``traceparent`` was missing or invalid, which starts a new
trace (W3C Trace Context, sections 3.2.2 and 3.3.1). Ended spans are appended to a bounded queue, which another thread
exports (``span_export.py``); if it is full, they are dropped and counted. Attributes are names, numbers and
enumerations, never text of a prompt or response.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from random import Random
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from routing.observability.metrics import PREFIX, header

if TYPE_CHECKING:
    from routing.balancing.placement import Decision
    from routing.http.request import Request
    from routing.observability.decision_log import Record

MAX_QUEUED: Final = 2048  # spans, a few MB; the SDK's default
MAX_NAME: Final = 256  # characters of a model's name in a span
PREFILL: Final = "prefill"
RESENT: Final = "resent"  # the same replica got the request again

_traceparent: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?").fullmatch
_context_lines: Final = re.compile(rb"(?<=\r\n)(?:traceparent|tracestate)[ \t]*:[^\r\n]*\r\n", re.IGNORECASE)
_parent_lines: Final = re.compile(rb"(?<=\r\n)traceparent[ \t]*:[^\r\n]*\r\n", re.IGNORECASE)
_FAILED: Final = frozenset(
    {"replica_error", "router_error", "cancelled"}
)  # outcomes; the response may be 200 and truncated
LENGTH: Final = 55  # of a traceparent of version 00
_IDS: Final = 1 << 64

Attributes = dict[str, str | int | float]


class Span:
    """A span as it is recorded; times are Unix nanoseconds."""

    def __init__(
        self, name: str, trace_id: int, span_id: int, parent_id: int, start_ns: int, *, is_server: bool = False
    ) -> None:
        self.name = name
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id  # 0: a root
        self.is_server = is_server  # else a client span
        self.start_ns = start_ns
        self.end_ns = start_ns
        self.error = ""  # error.type; "": the status is not an error
        self.attributes: Attributes = {}


class Tracer:
    """Decides which requests are sampled, and queues their ended spans."""

    def __init__(self, ratio: float, *, is_parent_based: bool = True, seed: int | None = None) -> None:
        """``ratio``: of the requests that are sampled, 0 to 1; of those without a parent if ``is_parent_based``."""
        self.queue: deque[Span] = deque()
        self.dropped = 0  # spans that found the queue full
        self.exported = 0  # the next two are the exporter's
        self.failed = 0
        self._threshold = round(ratio * _IDS)
        self._is_parent_based = is_parent_based
        self._random = Random(seed)  # noqa: S311 - ids need no secrecy
        self._clock_offset_ns = time.time_ns() - monotonic_ns()

    def start(self, request: Request) -> RequestTrace | None:
        """The trace of a request; None if it is not sampled."""
        value = request.head.traceparent_with(request.values)
        if not value:
            return self._start_root(request)
        if len(value) == LENGTH and not self._may_be_sampled(value):
            return None
        match = _traceparent(value)
        if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5] is not None):
            return self._start_root(request)
        trace_id, parent_id = int(match[2], 16), int(match[3], 16)
        if not trace_id or not parent_id:
            return self._start_root(request)
        is_sampled = int(match[4], 16) & 1 == 1 if self._is_parent_based else trace_id % _IDS < self._threshold
        return RequestTrace(self, request, trace_id, parent_id) if is_sampled else None

    def _start_root(self, request: Request) -> RequestTrace | None:
        """The trace of a request without a valid parent, if the ratio samples it."""
        low = self._random.getrandbits(64)
        if low >= self._threshold:
            return None
        return RequestTrace(self, request, self._random.getrandbits(64) << 64 | low or 1, 0)

    def _may_be_sampled(self, value: bytes) -> bool:
        """A quick look at a ``traceparent`` of the usual length, because most are not sampled."""
        if not self._is_parent_based:
            try:
                return int(value[19:35], 16) < self._threshold
            except ValueError:
                return True
        digit = value[LENGTH - 1]
        return (digit + (digit > 0x39)) & 1 == 1  # the lowest bit of a hexadecimal digit: letters are one off

    def now_ns(self) -> int:
        """Unix time that does not go back while the process runs."""
        return monotonic_ns() + self._clock_offset_ns

    def unix_ns(self, monotonic_s: float) -> int:
        """A time of the monotonic clock as Unix nanoseconds."""
        return int(monotonic_s * 1e9) + self._clock_offset_ns

    def new_id(self) -> int:
        """A random id of a span."""
        return self._random.getrandbits(64) or 1

    def add(self, span: Span) -> None:
        """Queue an ended span for export."""
        if len(self.queue) >= MAX_QUEUED:
            self.dropped += 1
        else:
            self.queue.append(span)

    def lines(self) -> Iterator[str]:
        """Prometheus text."""
        yield from header("spans_exported_total", "counter", "Spans that the collector accepted.")
        yield f"{PREFIX}spans_exported_total {self.exported}"
        yield from header("spans_dropped_total", "counter", "Spans that were lost, by cause.")
        yield f'{PREFIX}spans_dropped_total{{cause="queue_full"}} {self.dropped}'
        yield f'{PREFIX}spans_dropped_total{{cause="export_failed"}} {self.failed}'


class RequestTrace:
    """The spans of one sampled request; one attempt is open at a time."""

    def __init__(self, tracer: Tracer, request: Request, trace_id: int, parent_id: int) -> None:
        head = request.head
        self.status: int | None = None  # of a response by the router itself
        self._tracer = tracer
        self._path = head.path
        self._operation = "" if head.endpoint is None else head.endpoint.operation
        self._model = ""
        self._attempt: Span | None = None
        self._attempts = 0
        method = head.method.decode("latin-1")
        name = f"{method} {head.path.decode('latin-1')}" if self._operation else method
        start_ns = tracer.unix_ns(request.arrived_at)
        self._server = server = Span(name, trace_id, tracer.new_id(), parent_id, start_ns, is_server=True)
        server.attributes["http.request.method"] = method
        server.attributes["url.path"] = head.path.decode("latin-1")[:MAX_NAME]
        server.attributes["warmpath.request_id"] = request.request_id

    def begin_attempt(self, decision: Decision, model: str | None) -> None:
        """A replica was chosen, and the request is about to be sent to it."""
        self._model = (model or decision.served.model or "")[:MAX_NAME]
        replica, choice = decision.replica, decision.choice
        span = self._begin(replica.name)
        span.attributes["warmpath.decision.reason"] = choice.reason
        if choice.hit_tokens is not None:
            span.attributes["warmpath.predicted_cached_tokens"] = choice.hit_tokens

    def begin_prefill(self, replica: str) -> None:
        """The prompt is about to be sent to a prefill replica."""
        self._begin(replica).attributes["warmpath.leg"] = PREFILL

    def _begin(self, replica: str) -> Span:
        self.end_attempt(RESENT)
        server, tracer = self._server, self._tracer
        name = f"{self._operation or 'request'} {self._model}".rstrip()
        span = self._attempt = Span(name, server.trace_id, tracer.new_id(), server.span_id, tracer.now_ns())
        span.attributes["warmpath.replica"] = replica
        if self._attempts:
            span.attributes["http.request.resend_count"] = self._attempts
        self._attempts += 1
        return span

    def head_with_context(self, head: bytes) -> bytes:
        """A request head that names the open attempt as parent instead of the client's span."""
        server, span = self._server, self._attempt
        if span is None:
            return head
        lines = (_parent_lines if server.parent_id else _context_lines).sub(b"", head)
        return b"%btraceparent: 00-%032x-%016x-01\r\n\r\n" % (lines[:-2], span.trace_id, span.span_id)

    def context_for_replica(self) -> tuple[bytes, bool]:
        """The ``traceparent`` of the open attempt, and whether the client's ``tracestate`` belongs to it."""
        span = self._server if self._attempt is None else self._attempt
        return b"00-%032x-%016x-01" % (span.trace_id, span.span_id), self._server.parent_id != 0

    def end_attempt(self, error: str = "", status: int | None = None) -> None:
        """The open attempt is over, if there is one. ``error``: why it failed."""
        span, self._attempt = self._attempt, None
        if span is None:
            return
        self._describe(span, status)
        span.error = error or (str(status) if status is not None and status >= 400 else "")
        self._end(span)

    def finish(self, outcome: str, record: Record | None, pool: str, group: str) -> None:
        """The request is over; ``record`` is None if it was sent to no replica."""
        status = self.status if record is None else record.status
        if self._attempt is not None and record is not None:
            _add_usage(self._attempt.attributes, record)
        error = _error_of(outcome, status)
        self.end_attempt(error, status)
        server = self._server
        attributes = server.attributes
        self._describe(server, status)
        attributes["warmpath.outcome"] = outcome
        attributes["warmpath.pool"] = pool
        attributes["warmpath.task_group"] = group
        if record is not None:
            _add_decision(attributes, record)
            _add_usage(attributes, record)
        server.error = error
        self._end(server)

    def _describe(self, span: Span, status: int | None) -> None:
        if self._operation:
            span.attributes["gen_ai.operation.name"] = self._operation
        if self._model:
            span.attributes["gen_ai.request.model"] = self._model
        if status is not None:
            span.attributes["http.response.status_code"] = status

    def _end(self, span: Span) -> None:
        span.end_ns = self._tracer.now_ns()
        self._tracer.add(span)


def _error_of(outcome: str, status: int | None) -> str:
    """``error.type`` of a request; empty for a client's own error."""
    if status is not None and status >= 500:
        return str(status)
    return outcome if outcome in _FAILED else ""


def _add_decision(attributes: Attributes, record: Record) -> None:
    attributes["warmpath.replica"] = record.replica
    attributes["warmpath.decision.reason"] = record.reason
    attributes["warmpath.policy"] = record.policy
    attributes["warmpath.policy.revision"] = record.revision
    attributes["warmpath.retries"] = record.retries


def _add_usage(attributes: Attributes, record: Record) -> None:
    """Tokens as the response reports them, and the time to the first token of a stream, in seconds."""
    if record.prompt_tokens is not None:
        attributes["gen_ai.usage.input_tokens"] = record.prompt_tokens
    if record.generated_tokens is not None:
        attributes["gen_ai.usage.output_tokens"] = record.generated_tokens
    if record.cached_tokens is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
    if record.ttft_s is not None:
        attributes["gen_ai.server.time_to_first_token"] = record.ttft_s
