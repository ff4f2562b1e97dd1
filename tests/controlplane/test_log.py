"""JSON log lines."""

import io
import json
import logging

import pytest

from controlplane.request_origin import JsonFormatter
from tests.controlplane.settings_files import PRODUCTION, read


@pytest.fixture
def lines():
    """What is logged from now on, line by line."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    logging.getLogger().removeHandler(handler)


def test_each_line_is_an_object_that_names_its_request(client, db, lines):
    client.get("/api/v1/nothing", headers={"X-Request-Id": "abc-1"})
    (line,) = [one for one in lines() if one["logger"] == "django.request"]
    assert (line["level"], line["request_id"]) == ("WARNING", "abc-1")
    assert line["message"].endswith("/api/v1/nothing")
    assert line["at"].endswith("+00:00")


def test_log_lines_cannot_be_forged(lines):
    said = 'a\n{"level": "INFO"}'
    logging.getLogger("controlplane").error("it said %s", said, exc_info=ValueError("two\nlines"))
    (line,) = lines()
    assert line["message"] == 'it said a\n{"level": "INFO"}'
    assert line["exception"].endswith("ValueError: two\nlines")


def test_the_log_format_is_a_setting():
    formats = {}
    for form in ("line", "json"):
        values, _ = read("production", ("LOGGING",), **PRODUCTION, WARMPATH_LOG_FORMAT=form)
        formats[form] = values["LOGGING"]["handlers"]["stderr"]["formatter"]
    assert formats == {"line": "line", "json": "json"}
    values, said = read("production", (), **PRODUCTION, WARMPATH_LOG_FORMAT="xml")
    assert (values, "WARMPATH_LOG_FORMAT: expected line or json, not xml" in said) == (None, True)
