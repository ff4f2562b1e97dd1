"""A clock, a sender with scripted results, and queued messages, for tests of the outbox."""

from datetime import timedelta

from telemetry.channels.base import DeliveryError, Message, Receipt
from telemetry.models import Notification
from telemetry.services.notifications.outbox import DueMessages
from tests.telemetry.conftest import T0


class Clock:
    """A clock that tests set."""

    def __init__(self):
        self.now = T0

    def __call__(self):
        return self.now

    def forward(self, seconds):
        self.now += timedelta(seconds=seconds)


class ScriptedSender:
    """A sender whose attempts have the given results: an error is raised, None and no result are successes."""

    def __init__(self, *results):
        self.results = list(results)
        self.messages: list[Message] = []

    def __call__(self, _channel, message):
        self.messages.append(message)
        result = self.results.pop(0) if self.results else None
        if result is not None:
            raise result
        return Receipt(204)


def connection_error():
    return DeliveryError("connection failed", retryable=True)


def claim_next(now):
    """Claim the message that a delivery run would claim first; None for none."""
    due = DueMessages()
    due.read_if_needed(now)
    return next(iter(due.claim(1, now)), None)


def queue_messages(channel, *kinds, alert=7):
    """Queue messages about an alert, in this order."""
    return [
        Notification.objects.create(
            channel=channel, kind=kind, alert_ids=[alert], payload={"data": {"n": kind}}, next_at=T0, created_at=T0
        )
        for kind in kinds
    ]
