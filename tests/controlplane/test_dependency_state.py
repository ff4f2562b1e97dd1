"""An outage is logged once and so is its recovery."""

import logging
import time

import pytest

from controlplane.celery import DependencyState


@pytest.fixture
def dependency():
    return DependencyState("the server is unavailable", "the server is available again")


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage().partition(" (")[0].partition(" after ")[0] for record in caplog.records]


def test_an_outage_is_logged_once(dependency, logged):
    for _ in range(3):
        dependency.record_outage("refused", time.monotonic())
    for _ in range(3):
        dependency.record_recovery(time.monotonic())
    dependency.record_outage("refused", time.monotonic())
    assert logged() == ["the server is unavailable", "the server is available again", "the server is unavailable"]


def test_an_operation_issued_before_the_outage_is_no_recovery(dependency, logged):
    issued_at_s = time.monotonic()
    dependency.record_outage("refused", time.monotonic())
    dependency.record_recovery(issued_at_s)
    assert logged() == ["the server is unavailable"]


def test_a_failure_issued_before_the_recovery_is_no_outage(dependency, logged):
    issued_at_s = time.monotonic()
    dependency.record_outage("refused", time.monotonic())
    dependency.record_recovery(time.monotonic())
    dependency.record_outage("gave up waiting", issued_at_s)
    assert logged() == ["the server is unavailable", "the server is available again"]
