"""What the outbox's tests send, and to whom: channels that end as they are told, and messages about an alert."""

from datetime import timedelta

from telemetry.channels.base import DeliveryError, Message, Receipt
from telemetry.models import Notification
from tests.telemetry.conftest import T0


class Clock:
    """A set clock."""

    def __init__(self):
        self.now = T0

    def __call__(self):
        return self.now

    def forward(self, seconds):
        self.now += timedelta(seconds=seconds)


class Scripted:
    """A channel whose sends end as scripted: None is a success."""

    def __init__(self, *endings):
        self.endings = list(endings)
        self.messages: list[Message] = []

    def __call__(self, _channel, message):
        self.messages.append(message)
        ending = self.endings.pop(0) if self.endings else None
        if ending is not None:
            raise ending
        return Receipt(204)


def away():
    return DeliveryError("connection failed", retryable=True)


def told(channel, *kinds, alert=7):
    """Messages about an alert, in this order."""
    return [
        Notification.objects.create(
            channel=channel, kind=kind, alert_ids=[alert], payload={"data": {"n": kind}}, next_at=T0, created_at=T0
        )
        for kind in kinds
    ]
