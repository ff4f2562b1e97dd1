"""R16: workers that are killed around a send, with a real kill -9 of real processes."""

import os
import signal
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from telemetry.models import DeliveryAttempt, Notification
from telemetry.services.notifications import outbox
from telemetry.services.notifications.channels import create_channel, test_send
from tests.telemetry.services.notifications.kills import killed_deliveries

CHILD = """
    import os, signal, sys
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings.test"
    from django.conf import settings
    settings.DATABASES["default"].update(HOST=sys.argv[1], NAME=sys.argv[2])
    import django
    django.setup()
    from telemetry.services.notifications import outbox
    from telemetry.services.notifications.channels import send

    def send_and_die(channel, message):
        send(channel, message)
        os.kill(os.getpid(), signal.SIGKILL)  # after the message is sent, before the result is stored

    outbox.deliver_due(sender=send_and_die)
"""


@pytest.mark.django_db(transaction=True)
def test_processes_that_are_killed_around_the_send_lose_nothing_and_send_at_most_twice():
    """R16, in short; ``make bench-soak`` has its 1,000 cycles."""
    database = connection.settings_dict
    counted = killed_deliveries(str(database["HOST"]), database["NAME"], cycles=24, seed=7, timeout_s=100)

    assert (counted.messages, counted.lost, counted.too_often) == (24, 0, 0)
    assert 0 < counted.sent_again <= counted.moments["after the send"] + counted.moments["while it is sent"]


@pytest.mark.django_db(transaction=True)
def test_a_worker_killed_between_send_and_mark_sends_it_again_under_the_same_id(receiver, time_machine):
    """R16, with a real kill -9 of a real process."""
    test_send(create_channel("ops", config={"url": receiver.url}))
    database = connection.settings_dict
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(database["HOST"]), database["NAME"]],
        timeout=30,
        check=False,
        env={**os.environ},
        capture_output=True,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert len(receiver.received) == 1
    assert Notification.objects.get().state == "pending"

    assert outbox.deliver_due() == 0  # the lease of the dead worker still stands
    time_machine.move_to(datetime.now(UTC) + timedelta(seconds=outbox.LEASE_S + 1), tick=False)
    assert outbox.deliver_due() == 1

    first, second = receiver.received
    assert first.id == second.id
    assert first.body == second.body
    assert Notification.objects.get().state == "delivered"
    lost, last = DeliveryAttempt.objects.order_by("number")
    assert (lost.duration_s, last.status) == (None, 200)
