"""One line for what everybody misses, and one for its return, whoever asks when."""

import logging
import time

import pytest

from controlplane.celery import DependencyState


@pytest.fixture
def absence():
    return DependencyState("it is away", "it is back", logging.getLogger(__name__))


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage().partition(" (")[0].partition(" after ")[0] for record in caplog.records]


def test_many_who_miss_it_say_so_once(absence, said):
    for _ in range(3):
        absence.record_outage("why", time.monotonic())
    for _ in range(3):
        absence.record_recovery(time.monotonic())
    absence.record_outage("why", time.monotonic())
    assert said() == ["it is away", "it is back", "it is away"]


def test_an_answer_to_who_asked_before_it_went_is_no_return(absence, said):
    early = time.monotonic()
    absence.record_outage("why", time.monotonic())
    absence.record_recovery(early)
    assert said() == ["it is away"]


def test_who_asked_before_it_answered_others_tells_no_news(absence, said):
    early = time.monotonic()
    absence.record_outage("why", time.monotonic())
    absence.record_recovery(time.monotonic())
    absence.record_outage("gave up waiting", early)
    assert said() == ["it is away", "it is back"]
