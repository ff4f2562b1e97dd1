"""OpenTelemetry traces of web requests, tasks and queries, if the environment names a collector.

They need ``warmpath[otel]``, and are on if ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` is
set; the SDK reads all its other variables itself. By default one of a hundred requests without a parent is sampled. A
task continues the trace of the request that woke it. Spans contain no query strings and no parameters of SQL.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from controlplane.request_origin import without_tokens

if TYPE_CHECKING:
    from django.http import HttpRequest

WEB, WORKER, BEAT = "warmpath-web", "warmpath-worker", "warmpath-beat"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
DEFAULTS = {
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.01",
    "OTEL_PYTHON_DJANGO_EXCLUDED_URLS": "healthz,readyz,metrics$",
}
Stop = Callable[[], None]
log = logging.getLogger(__name__)


def is_enabled() -> bool:
    """Whether the environment asks for traces."""
    return (
        any(os.environ.get(name) for name in ENDPOINTS)
        and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"
        and os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"
    )


def start(service: str) -> Stop | None:
    """Trace this process if the environment asks for it; None if it does not. The result ends it."""
    if not is_enabled():
        return None
    # The SDK's lines may quote the headers that authenticate the exporter.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        return _start(service)
    except ImportError:
        log.warning("traces are off: install warmpath[otel]")
        return None


def _start(service: str) -> Stop:
    from opentelemetry.instrumentation.celery import CeleryInstrumentor  # noqa: PLC0415 - optional, as those below
    from opentelemetry.instrumentation.django import DjangoInstrumentor  # noqa: PLC0415
    from opentelemetry.instrumentation.psycopg import PsycopgInstrumentor  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    facts = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(facts))
    exporter: Any = LoggingExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    kinds: list[Any] = [CeleryInstrumentor, PsycopgInstrumentor, *([DjangoInstrumentor] if service == WEB else [])]
    for kind in kinds:  # one instance each
        options = {"request_hook": _without_query} if kind is DjangoInstrumentor else {}
        kind().instrument(tracer_provider=provider, **options)

    def stop() -> None:
        for kind in kinds:
            kind().uninstrument()
        provider.shutdown()

    return stop


def _without_query(span: Any, request: HttpRequest) -> None:
    """Replace URLs by paths without tokens: a query may hold a code of single sign-on."""
    if span.is_recording():
        for name in ("http.url", "http.target", "url.full", "url.path"):
            if name in span.attributes:
                span.set_attribute(name, without_tokens(request.path))
        if "url.query" in span.attributes:
            span.set_attribute("url.query", "")


class LoggingExporter:
    """The SDK's exporter, which logs an outage of the collector once when it starts and once when it ends."""

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - optional

        from controlplane.celery import DependencyState  # noqa: PLC0415 - it imports this module

        self._exporter: Any = OTLPSpanExporter()
        self._state = DependencyState("traces cannot be exported", "traces are exported again")

    def export(self, spans: Sequence[Any]) -> Any:
        """Send a batch; the SDK's result."""
        issued_at_s = time.monotonic()
        result = self._exporter.export(spans)
        if result.name == "SUCCESS":
            self._state.record_recovery(issued_at_s)
        else:
            self._state.record_outage("the collector did not accept them; spans are dropped", issued_at_s)
        return result

    def shutdown(self) -> None:
        """Send nothing more."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002 - the SDK's name
        """Nothing is buffered here."""
        return True
