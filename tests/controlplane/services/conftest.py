"""A clock that tests set."""

import pytest
import time_machine
from django.utils import timezone


@pytest.fixture
def time_machine_at():
    """Move the clock to so many seconds after the test began."""
    begun = timezone.now()
    travels = []

    def move(seconds: float) -> None:
        for travel in travels:
            travel.stop()
        travels[:] = [time_machine.travel(begun + timezone.timedelta(seconds=seconds), tick=True)]
        travels[0].start()

    yield move
    for travel in travels:
        travel.stop()
