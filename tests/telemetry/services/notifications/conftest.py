"""A clock, a channel, and a test message queued for the channel."""

import pytest

from telemetry.services.notifications.channels import create_channel, test_send
from tests.telemetry.conftest import T0
from tests.telemetry.services.notifications.scripted import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def channel(receiver):
    return create_channel("ops", config={"url": receiver.url})


@pytest.fixture
def queued(channel, time_machine):
    time_machine.move_to(T0, tick=False)
    return test_send(channel)
