"""JSON log lines."""

import io
import json
import logging

import pytest

from controlplane.request_origin import JsonFormatter
from tests.controlplane.settings_files import PRODUCTION, read


@pytest.fixture
def lines():
    """The log lines since the test started, parsed."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logging.getLogger().removeHandler(handler)


def test_each_line_is_an_object_that_names_its_request(client, db, lines):
    client.get("/api/v1/nothing", headers={"X-Request-Id": "abc-1"})
    (line,) = [entry for entry in lines() if entry["logger"] == "django.request"]
    assert (line["level"], line["request_id"]) == ("WARNING", "abc-1")
    assert line["message"].endswith("/api/v1/nothing")
    assert line["at"].endswith("+00:00")


def test_log_lines_cannot_be_forged(lines):
    forged = 'a\n{"level": "INFO"}'
    logging.getLogger("controlplane").error("received %s", forged, exc_info=ValueError("two\nlines"))
    (line,) = lines()
    assert line["message"] == 'received a\n{"level": "INFO"}'
    assert line["exception"].endswith("ValueError: two\nlines")


def test_the_log_format_is_a_setting():
    formats = {}
    for form in ("line", "json"):
        values, _ = read("production", ("LOGGING",), **PRODUCTION, WARMPATH_LOG_FORMAT=form)
        formats[form] = values["LOGGING"]["handlers"]["stderr"]["formatter"]
    assert formats == {"line": "line", "json": "json"}
    values, stderr = read("production", (), **PRODUCTION, WARMPATH_LOG_FORMAT="xml")
    assert (values, "WARMPATH_LOG_FORMAT: expected line or json, not xml" in stderr) == (None, True)
