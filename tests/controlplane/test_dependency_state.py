"""An outage is logged once and so is its recovery."""

import logging
import time

import pytest

from controlplane.celery import DependencyState


@pytest.fixture
def dependency():
    return DependencyState("unavailable", "recovered")


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage().partition(" (")[0].partition(" after ")[0] for record in caplog.records]


def test_an_outage_is_logged_once(dependency, messages):
    for _ in range(3):
        dependency.record_outage("refused", time.monotonic())
    for _ in range(3):
        dependency.record_recovery(time.monotonic())
    dependency.record_outage("refused", time.monotonic())
    assert messages() == ["unavailable", "recovered", "unavailable"]


def test_an_operation_issued_before_the_outage_is_no_recovery(dependency, messages):
    early = time.monotonic()
    dependency.record_outage("refused", time.monotonic())
    dependency.record_recovery(early)
    assert messages() == ["unavailable"]


def test_a_failure_issued_before_the_recovery_is_no_outage(dependency, messages):
    early = time.monotonic()
    dependency.record_outage("refused", time.monotonic())
    dependency.record_recovery(time.monotonic())
    dependency.record_outage("gave up waiting", early)
    assert messages() == ["unavailable", "recovered"]
