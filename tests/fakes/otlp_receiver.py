"""A collector of traces: OTLP over HTTP on loopback, with the spans that it got."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.fakes.http_server import FakeHandler, FakeServer, running

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # of a client


@dataclass(frozen=True)
class ReceivedSpan:
    """One exported span; ids in hexadecimal, "" for no parent."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    is_server: bool
    is_error: bool
    seconds: float
    attributes: dict[str, Any]
    resource: dict[str, Any]


class OtlpReceiver(FakeServer):
    """Accepts ``POST /v1/traces``, or responds with ``status``; None: it hangs."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.status: int | None = 200
        self.bodies: list[bytes] = []
        self.authorizations: list[str | None] = []

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All spans, in the order of their end."""
        return [span for body in self.bodies for span in _read(body)]

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]


class _Handler(FakeHandler):
    server: OtlpReceiver

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status is None:
            self.hang()
            return
        if self.server.status == 200 and self.path == "/v1/traces":
            is_compressed = self.headers["Content-Encoding"] == "gzip"
            body = gzip.decompress(body) if is_compressed else body
            is_json = self.headers["Content-Type"] == "application/json"
            self.server.bodies.append(_from_json(json.loads(body)) if is_json else body)
            self.server.authorizations.append(self.headers["Authorization"])
        self.respond(self.server.status)


def _from_json(document: Any) -> bytes:
    """OTLP's JSON as protobuf; ParseError if it has other fields. Its ids are hexadecimal instead of base64."""
    for resource_spans in document["resourceSpans"]:
        for span in (span for scope in resource_spans["scopeSpans"] for span in scope["spans"]):
            for name in {"traceId", "spanId", "parentSpanId"} & span.keys():
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return ParseDict(document, ExportTraceServiceRequest()).SerializeToString()


def _read(body: bytes) -> Iterator[ReceivedSpan]:
    for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield ReceivedSpan(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.kind == Span.SPAN_KIND_SERVER,
                    span.status.code == Status.STATUS_CODE_ERROR,
                    (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                    _values(span.attributes),
                    _values(resource_spans.resource.attributes),
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


@contextmanager
def receiving() -> Iterator[OtlpReceiver]:
    with running(OtlpReceiver()) as receiver:
        yield receiver


def server_and_clients(receiver: OtlpReceiver) -> tuple[ReceivedSpan, list[ReceivedSpan]]:
    """The spans of one request: the router's, and those of its attempts."""
    spans = receiver.spans
    (server,) = (span for span in spans if span.is_server)
    clients = [span for span in spans if not span.is_server]
    assert {(span.trace_id, span.parent_id) for span in clients} <= {(server.trace_id, server.span_id)}
    return server, clients
