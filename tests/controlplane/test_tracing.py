"""Traces of the control plane: web requests with their queries, and tasks that continue them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from controlplane import tracing
from controlplane.database.base import TimeoutConnection
from tests.fakes.otlp_receiver import OtlpReceiver, receiving

app = Celery("traced", broker="memory://", backend="cache+memory://", set_as_current=False)
app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)


@app.task(name="traced.work")
def work() -> str:
    return "done"


def wake(_: HttpRequest) -> HttpResponse:
    with TimeoutConnection.connect(**connection.get_connection_params()) as fresh:  # made after ``tracing.start``
        fresh.execute("select %s::text", ["s3cret-parameter"])
    work.delay()
    return HttpResponse("ok")


wake.login_required = False  # type: ignore[attr-defined]  # how Django's decorator marks a view
urlpatterns = [path("wake/", wake), path("healthz", wake)]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        for name in tracing.DEFAULTS:
            monkeypatch.setenv(name, tracing.DEFAULTS[name])  # removed again after the test
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1")
        yield receiver


@pytest.mark.django_db
@pytest.mark.urls("tests.controlplane.test_tracing")
def test_a_task_and_a_query_continue_the_trace_of_the_request(collector: OtlpReceiver, settings: Any) -> None:
    settings.MIDDLEWARE = list(settings.MIDDLEWARE)
    stop = tracing.start(tracing.WEB)
    assert stop is not None
    try:
        with start_worker(app, pool="solo", perform_ping_check=False):
            client = Client(headers={"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
            assert client.get("/wake/?code=s3cret").status_code == 200
            assert client.get("/healthz").status_code == 200
            assert work.delay().get(timeout=30) == "done"  # of the same worker: the first task is over
    finally:
        stop()

    spans = [span for span in collector.spans if span.trace_id == "1" * 32]
    (web,) = (span for span in spans if span.is_server)
    assert (web.name, web.parent_id, web.resource["service.name"]) == ("GET wake/", "2" * 16, "warmpath-web")
    published = next(span for span in spans if span.name == "apply_async/traced.work")
    ran = next(span for span in spans if span.name == "run/traced.work")
    assert published.parent_id == web.span_id
    assert ran.parent_id == published.span_id
    assert any(span.parent_id == web.span_id and "select" in str(span.attributes) for span in spans)
    assert b"s3cret" not in b"".join(collector.bodies)


@pytest.mark.parametrize(
    "variables",
    [{"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}],
)
def test_tracing_is_off_unless_a_collector_is_named(
    collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert tracing.start(tracing.WEB) is None


def test_without_the_sdk_the_site_runs_and_says_what_to_install(
    collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.instrumentation.celery", None)
    with caplog.at_level(logging.WARNING):
        assert tracing.start(tracing.WORKER) is None

    assert "install warmpath[otel]" in caplog.text
