"""Celery without its broker for a while: quick to find it again, and quiet until then.

Stock Celery waits up to 30 s between two tries, beat logs a stack for every tick that it cannot send, and a worker with
a task under way when the connection breaks dies of the message that it cannot acknowledge. A broker here carries
wake-ups alone, so its absence is worth one line, and its return is to be noticed within seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery.app.amqp import AMQP
from celery.beat import PersistentScheduler, ScheduleEntry, SchedulingError
from kombu import Connection
from kombu.transport import redis
from kombu.transport.virtual import Message
from redis import exceptions

from controlplane.dependency_state import DependencyState

LONGEST_PAUSE_S = 3.0  # between two tries to reach a broker that is away

log = logging.getLogger(__name__)


class ForgivingMessage(Message):
    """A message whose acknowledgement may be lost: what it asked for is done, and done again does no harm."""

    def ack_log_error(self, logger: logging.Logger, errors: Any, multiple: bool = False) -> None:  # noqa: ARG002 - kombu's
        """Acknowledge it, if there is anybody to tell."""
        with suppress(*errors):
            self.ack(multiple=multiple)

    def reject_log_error(self, logger: logging.Logger, errors: Any, requeue: bool = False) -> None:  # noqa: ARG002 - kombu's
        """Refuse it, if there is anybody to tell."""
        with suppress(*errors):
            self.reject(requeue=requeue)


class EagerChannel(redis.Channel):
    """A channel that says that its connection was closed, where kombu stumbles over its own None."""

    Message = ForgivingMessage

    def _connparams(self, asynchronous: bool = False) -> Any:
        if self.connection.client is None:
            raise exceptions.ConnectionError("the connection to the broker was closed")
        return super()._connparams(asynchronous)  # type: ignore[misc]  # the stubs leave it out


class EagerTransport(redis.Transport):
    """What makes channels."""

    Channel = EagerChannel


class EagerConnection(Connection):
    """A connection that is tried again every few seconds, however long its broker is away."""

    def ensure_connection(self, errback: Callable[..., None] | None = None, *args: Any, **options: Any) -> Any:
        """Connect, sooner or later; ``errback`` hears of the first failure."""
        options = {"interval_start": 1, "interval_step": 1, "interval_max": LONGEST_PAUSE_S, **options}
        return super().ensure_connection(_once(errback), *args, **options)

    def get_transport_cls(self) -> Any:
        """Redis over whatever the URL says, with our channels."""
        found = super().get_transport_cls()
        return EagerTransport if found is redis.Transport else found


def _once(errback: Callable[..., None] | None) -> Callable[..., None]:
    heard: list[object] = []

    def hear(error: object, interval_s: float) -> None:
        if errback is not None and not heard:
            errback(error, interval_s)
        heard.append(error)

    return hear


class EagerAMQP(AMQP):
    """What makes Celery's connections."""

    Connection = EagerConnection


class QuietScheduler(PersistentScheduler):
    """A beat that says once that it cannot send, and goes on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._broker = DependencyState("the broker is away", "the broker is back", log)

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """Send what is due. A tick that is lost is made good by the next."""
        issued_at_s = time.monotonic()
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except SchedulingError as error:
            self._broker.record_outage(error, issued_at_s)
        else:
            self._broker.record_recovery(issued_at_s)
