"""An outage is logged once and so is its recovery."""

import logging
import time

import pytest

from controlplane.celery import DependencyState


@pytest.fixture
def absence():
    return DependencyState("it is away", "it is back")


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage().partition(" (")[0].partition(" after ")[0] for record in caplog.records]


def test_an_outage_is_logged_once(absence, said):
    for _ in range(3):
        absence.record_outage("why", time.monotonic())
    for _ in range(3):
        absence.record_recovery(time.monotonic())
    absence.record_outage("why", time.monotonic())
    assert said() == ["it is away", "it is back", "it is away"]


def test_an_operation_issued_before_the_outage_is_no_recovery(absence, said):
    early = time.monotonic()
    absence.record_outage("why", time.monotonic())
    absence.record_recovery(early)
    assert said() == ["it is away"]


def test_a_failure_issued_before_the_recovery_is_no_outage(absence, said):
    early = time.monotonic()
    absence.record_outage("why", time.monotonic())
    absence.record_recovery(time.monotonic())
    absence.record_outage("gave up waiting", early)
    assert said() == ["it is away", "it is back"]
