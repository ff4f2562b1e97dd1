"""JSON log lines."""

import io
import json
import logging

import pytest

from controlplane.request_origin import JsonFormatter
from tests.controlplane.settings_files import PRODUCTION, read


@pytest.fixture
def lines():
    """The log lines written since the start of the test, parsed."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logging.getLogger().removeHandler(handler)


def test_each_line_is_an_object_that_names_its_request(client, db, lines):
    client.get("/api/v1/nothing", headers={"X-Request-Id": "abc-1"})
    (line,) = [line for line in lines() if line["logger"] == "django.request"]
    assert (line["level"], line["request_id"]) == ("WARNING", "abc-1")
    assert line["message"].endswith("/api/v1/nothing")
    assert line["at"].endswith("+00:00")


def test_a_refused_page_is_one_line_and_a_failure_keeps_its_traceback(client, django_user_model, lines, monkeypatch):
    client.force_login(django_user_model.objects.create_user("viewer"))
    assert client.get("/users/").status_code == 403
    (line,) = [line for line in lines() if line["logger"] == "django.request"]
    assert (line["level"], "/users/" in line["message"], "exception" in line) == ("WARNING", True, False)

    monkeypatch.setattr("controlplane.access.middleware.check_page", lambda *_: 1 / 0)
    client.raise_request_exception = False
    assert client.get("/users/").status_code == 500
    assert lines()[-1]["exception"].endswith("ZeroDivisionError: division by zero")


def test_log_lines_cannot_be_forged(lines):
    message = 'a\n{"level": "INFO"}'
    logging.getLogger("controlplane").error("received %s", message, exc_info=ValueError("two\nlines"))
    (line,) = lines()
    assert line["message"] == 'received a\n{"level": "INFO"}'
    assert line["exception"].endswith("ValueError: two\nlines")


def test_the_log_format_is_a_setting():
    formats = {}
    for log_format in ("line", "json"):
        values, _ = read("production", ("LOGGING",), **PRODUCTION, WARMPATH_LOG_FORMAT=log_format)
        formats[log_format] = values["LOGGING"]["handlers"]["stderr"]["formatter"]
    assert formats == {"line": "line", "json": "json"}
    values, errors = read("production", (), **PRODUCTION, WARMPATH_LOG_FORMAT="xml")
    assert (values, "WARMPATH_LOG_FORMAT: expected line or json, not xml" in errors) == (None, True)
