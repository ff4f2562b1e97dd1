"""Exports the router's spans by OTLP over HTTP, as JSON, in a thread of its own.

It is on if an endpoint is set, by the SDK's variables: ``OTEL_EXPORTER_OTLP_ENDPOINT`` or
``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``. ``OTEL_SDK_DISABLED`` and ``OTEL_TRACES_EXPORTER=none`` turn it off.
``OTEL_TRACES_SAMPLER`` may be ``traceidratio``, ``always_on`` or ``always_off``, alone or after ``parentbased_``;
``OTEL_TRACES_SAMPLER_ARG`` is the ratio.

Theory of operation. The request path only appends to the tracer's queue. The thread sends batches of it; a batch that
the collector does not accept is dropped and counted, and the queue bounds what waits meanwhile. An outage is logged
once when it starts and once when it ends, without the headers that authenticate the exporter. The SDK is not used: its
own spans and its encoder take 180 to 290 us a span, several percent of the router's CPU at a ratio of 1 %, and even its
exporter alone, for spans recorded here, takes three times as long as this one and a dozen more packages.
"""

from __future__ import annotations

import gzip
import http.client
import logging
import os
import ssl
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec

from routing.log import event
from routing.observability.tracing import Span, Tracer

DEFAULT_RATIO: Final = 0.01
BATCH: Final = 512  # spans of one export
EVERY_S: Final = 1.0  # at most between two exports
CLOSE_S: Final = 2.0  # for the last spans of a router that ends
TIMEOUT_S: Final = 10.0  # of one export, as in the SDK
PARENT_BASED: Final = "parentbased_"
SERVER, CLIENT = 2, 3  # kinds of spans
ERROR = 2  # a status

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


def variable(environ: Mapping[str, str], name: str) -> str:
    """``OTEL_EXPORTER_OTLP_<name>``, that for traces first; empty if neither is set."""
    return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def is_enabled(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for traces."""
    return (
        bool(variable(environ, "ENDPOINT"))
        and environ.get("OTEL_SDK_DISABLED", "").lower() != "true"
        and environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"
    )


def tracer_of(environ: Mapping[str, str]) -> Tracer:
    """The sampler that the environment names; the default for an invalid one, as in the SDK, with a warning."""
    name = environ.get("OTEL_TRACES_SAMPLER") or f"{PARENT_BASED}traceidratio"
    kind = name.removeprefix(PARENT_BASED)
    ratios = {"always_on": 1.0, "always_off": 0.0, "traceidratio": _ratio(environ.get("OTEL_TRACES_SAMPLER_ARG"))}
    if kind not in ratios:
        event(logger, "sampler_invalid", level=logging.WARNING, expected=" ".join(ratios))
    return Tracer(ratios.get(kind, DEFAULT_RATIO), is_parent_based=kind not in ratios or name.startswith(PARENT_BASED))


def _ratio(text: str | None) -> float:
    try:
        ratio = DEFAULT_RATIO if not text else float(text)
    except ValueError:
        ratio = -1.0
    if 0 <= ratio <= 1:
        return ratio
    event(logger, "sampler_invalid", level=logging.WARNING, expected="a ratio from 0 to 1")
    return DEFAULT_RATIO


class Collector:
    """An OTLP endpoint over HTTP; ValueError or OSError if the environment's settings of it are invalid."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        own = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        url = urlsplit(own or environ["OTEL_EXPORTER_OTLP_ENDPOINT"].rstrip("/") + "/v1/traces")
        if url.scheme not in {"http", "https"} or not url.hostname:
            raise ValueError("expected an endpoint such as http://127.0.0.1:4318")
        self._is_compressed = variable(environ, "COMPRESSION") == "gzip"
        self._path = url.path or "/"
        self._headers = {"Content-Type": "application/json", **_headers(variable(environ, "HEADERS"))}
        timeout_s = float(variable(environ, "TIMEOUT") or TIMEOUT_S)
        self._connection = (
            http.client.HTTPConnection(url.hostname, url.port, timeout=timeout_s)
            if url.scheme == "http"
            else http.client.HTTPSConnection(url.hostname, url.port, timeout=timeout_s, context=_tls(environ))
        )

    def send(self, body: bytes) -> str | None:
        """Send one request; why it was not accepted, or None."""
        headers = self._headers
        if self._is_compressed:
            body, headers = gzip.compress(body, 1), {**headers, "Content-Encoding": "gzip"}
        try:
            self._connection.request("POST", self._path, body, headers)
            response = self._connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request connects again
            return type(error).__name__
        return None if response.status < 300 else f"status {response.status}"

    def close(self) -> None:
        self._connection.close()


def _headers(text: str) -> dict[str, str]:
    """``name=value`` pairs, separated by commas, with values in percent encoding; others are ignored."""
    pairs = (item.partition("=") for item in text.split(","))
    return {name.strip(): unquote(value.strip()) for name, separator, value in pairs if separator and name.strip()}


def _tls(environ: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=variable(environ, "CERTIFICATE") or None)
    if certificate := variable(environ, "CLIENT_CERTIFICATE"):
        context.load_cert_chain(certificate, variable(environ, "CLIENT_KEY") or None)
    return context


class SpanExport:
    """The tracer of a router process and the thread that exports its spans."""

    def __init__(self, tracer: Tracer, collector: Collector, resource: Mapping[str, str], version: str) -> None:
        self.tracer = tracer
        self._collector = collector
        self._resource = {"attributes": _attributes(resource)}
        self._scope = {"name": "warmpath.router", "version": version}
        self._is_failing = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Export what is queued, within ``CLOSE_S``."""
        self._stopping.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._export_queued()
        self._export_queued()
        self._collector.close()

    def _export_queued(self) -> None:
        tracer = self.tracer
        while tracer.queue:
            batch = [tracer.queue.popleft() for _ in range(min(BATCH, len(tracer.queue)))]
            if self._export(batch):
                tracer.exported += len(batch)
            else:
                tracer.failed += len(batch)
                if self._stopping.is_set():
                    return

    def _export(self, batch: Sequence[Span]) -> bool:
        error = self._collector.send(self.encode(batch))
        if (error is not None) is not self._is_failing:
            self._is_failing = error is not None
            if error is None:
                event(logger, "span_export_recovered")
            else:
                event(logger, "span_export_failed", level=logging.WARNING, reason=error)
        return error is None

    def encode(self, batch: Sequence[Span]) -> bytes:
        """An ``ExportTraceServiceRequest`` in OTLP's JSON: ids in hexadecimal, 64-bit numbers as strings."""
        scope_spans = {"scope": self._scope, "spans": [_span(span) for span in batch]}
        return _encode({"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope_spans]}]})


def _span(span: Span) -> dict[str, Any]:
    attributes = span.attributes | {"error.type": span.error} if span.error else span.attributes
    encoded = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "flags": 1,  # sampled
        "name": span.name,
        "kind": SERVER if span.is_server else CLIENT,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(attributes),
        "status": {"code": ERROR} if span.error else {},
    }
    if span.parent_id:
        encoded["parentSpanId"] = f"{span.parent_id:016x}"
    return encoded


def _attributes(values: Mapping[str, str | int | float]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: str | float) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}


def open_span_export(name: str, boot: str, version: str, environ: Mapping[str, str] = os.environ) -> SpanExport | None:
    """Start to export spans if the environment asks for it; None if it does not, or if its settings are invalid."""
    if not is_enabled(environ):
        return None
    try:
        collector = Collector(environ)
    except (ValueError, OSError) as error:  # no text of the variables, which may contain secrets
        event(logger, "tracing_unavailable", level=logging.WARNING, reason=type(error).__name__)
        return None
    facts = {"service.name": "warmpath-router", "service.version": version, "service.instance.id": f"{name}/{boot}"}
    resource = facts | _headers(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    if service := environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = service
    event(logger, "tracing_enabled")
    return SpanExport(tracer_of(environ), collector, resource, version)
