"""The Celery application, ``wake``, and how tasks, beat and connections survive an unavailable broker or database.

The database, not the broker, records which work is due, so a lost wake-up costs at most the time until the next beat
tick. Without the classes below, Celery waits up to 30 s between two connection attempts, and beat logs a traceback for
every tick that it cannot send. A worker whose connection breaks during a task fails when it acknowledges the message.
The classes below reconnect within seconds and log an outage once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import Celery, Task
from celery.app.amqp import AMQP
from celery.beat import PersistentScheduler, ScheduleEntry, SchedulingError
from celery.signals import beat_init, worker_init
from django.db import InterfaceError, connection, transaction
from django.db import OperationalError as DatabaseError
from kombu import Connection
from kombu.exceptions import OperationalError
from kombu.transport import redis
from kombu.transport.virtual import Message
from redis.exceptions import ConnectionError as RedisConnectionError

from controlplane import tracing
from controlplane.database.base import is_disk_full, is_unavailable
from controlplane.database.schema_check import refuse_foreign_database

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings.production")

MAX_RECONNECT_INTERVAL_S = 3.0
MAX_QUEUED = 1000  # messages that wait for a worker: some ten minutes of beat's
MAX_CLOCK_SKEW_S = 30.0  # between a worker and the database: as long as a router may be silent
log = logging.getLogger(__name__)


class DependencyState:
    """Logs the outage of a dependency once when it starts, and its recovery once. Thread-safe.

    Times are of the monotonic clock. ``issued_at_s`` is when the operation began: an operation that began before the
    last change of state says nothing about the present state.
    """

    def __init__(self, outage: str, recovery: str) -> None:
        self._outage, self._recovery = outage, recovery
        self._lock = threading.Lock()
        self._down_since_s: float | None = None  # None: available
        self._last_success_s = float("-inf")

    def record_outage(self, reason: object, issued_at_s: float) -> None:
        """An operation failed. Ignored if another operation succeeded after the failed one began."""
        with self._lock:
            if self._down_since_s is None and issued_at_s > self._last_success_s:
                self._down_since_s = time.monotonic()
                line = " ".join(str(reason).split())
                log.error("%s (%s); due work is postponed", self._outage, line[:300])

    def record_recovery(self, issued_at_s: float) -> None:
        """An operation succeeded. Ends an outage only if the operation began after the outage."""
        with self._lock:
            self._last_success_s = time.monotonic()
            if self._down_since_s is not None and issued_at_s > self._down_since_s:
                log.warning("%s after %.0f s", self._recovery, self._last_success_s - self._down_since_s)
                self._down_since_s = None


class LostAckMessage(Message):
    """A message whose acknowledgement may be lost: its task is done, and running it again is harmless."""

    def ack_log_error(self, logger: logging.Logger, errors: Any, multiple: bool = False) -> None:  # noqa: ARG002 - kombu's
        with suppress(*errors):
            self.ack(multiple=multiple)

    def reject_log_error(self, logger: logging.Logger, errors: Any, requeue: bool = False) -> None:  # noqa: ARG002 - kombu's
        with suppress(*errors):
            self.reject(requeue=requeue)


class ReconnectingChannel(redis.Channel):
    """Raises a connection error for a closed connection, where kombu raises AttributeError on None."""

    Message = LostAckMessage

    def _connparams(self, asynchronous: bool = False) -> Any:
        if self.connection.client is None:
            raise RedisConnectionError("the connection to the broker was closed")
        return super()._connparams(asynchronous)  # type: ignore[misc]  # the stubs leave it out


class ReconnectingTransport(redis.Transport):
    Channel = ReconnectingChannel


class ReconnectingConnection(Connection):
    """Reconnects every few seconds for as long as the broker is unavailable."""

    def ensure_connection(self, errback: Callable[..., None] | None = None, *args: Any, **options: Any) -> Any:
        """Connect, however long that takes. ``errback`` is called for the first failure only."""
        failures: list[object] = []

        def on_error(error: object, interval_s: float) -> None:
            if errback is not None and not failures:
                errback(error, interval_s)
            failures.append(error)

        options = {"interval_start": 1, "interval_step": 1, "interval_max": MAX_RECONNECT_INTERVAL_S, **options}
        return super().ensure_connection(on_error, *args, **options)

    def get_transport_cls(self) -> Any:
        transport = super().get_transport_cls()
        return ReconnectingTransport if transport is redis.Transport else transport


class ReconnectingAMQP(AMQP):
    Connection = ReconnectingConnection


class OutageLoggingScheduler(PersistentScheduler):
    """A beat that logs an unavailable broker once and continues. The next tick does the work of a lost tick.

    Expired messages stay in the broker's memory until a worker takes them, so without a worker nothing more is sent
    once ``MAX_QUEUED`` messages wait: a worker that comes back discards them in a moment.

    On SIGTERM, Celery closes the scheduler and raises SystemExit in what it is doing. While a message is sent, the
    closed connection's error may take the place of SystemExit, which is therefore raised again.
    """

    _is_closed = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._broker = DependencyState("the broker is unavailable", "the broker is available again")
        self._workers = DependencyState("no worker takes messages", "workers take messages again")

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        issued_at_s = time.monotonic()
        try:
            if self._is_queue_full(producer):
                self._workers.record_outage(f"{MAX_QUEUED} wait", issued_at_s)
                return
            self._workers.record_recovery(issued_at_s)
            self.apply_async(entry, producer=producer, advance=False)
        except SchedulingError as error:
            if not self._is_closed:
                self._broker.record_outage(error, issued_at_s)
        else:
            self._broker.record_recovery(issued_at_s)
        if self._is_closed:
            raise SystemExit

    def close(self) -> None:
        self._is_closed = True
        super().close()

    def _is_queue_full(self, producer: Any) -> bool:
        """Whether enough messages wait. False if that is unknown for any reason: sending then logs the outage."""
        try:
            queue = self.app.conf.task_default_queue
            return bool(producer.channel.queue_declare(queue).message_count >= MAX_QUEUED)
        except Exception:  # noqa: BLE001 - kombu raises AttributeError for a closed channel; beat must go on
            return False


_database = DependencyState("the database is unavailable", "the database is available again")
_broker = DependencyState("tasks cannot be sent to the broker", "tasks can be sent to the broker again")
_clock = DependencyState("this worker's clock is wrong", "this worker's clock is right again")
_disk: dict[str, DependencyState] = {}  # by task: tasks that only read can continue while the disk is full


class ResilientTask(Task):  # type: ignore[type-arg]  # generic in the stubs alone
    """A task that leaves its work to the next tick, without a traceback, while the database is unavailable or full.

    Most tasks compare timestamps of rows with their own clock. A worker whose clock differs from the database's would
    declare live routers lost and alerts resolved, so it leaves the work to other workers. A direct call raises.
    """

    abstract = True

    def __call__(self, *args: Any, **options: Any) -> Any:
        issued_at_s = time.monotonic()
        try:
            if not (self.request.called_directly or _is_clock_right(issued_at_s)):
                return None
            result = super().__call__(*args, **options)
        except (DatabaseError, InterfaceError) as error:
            if self.request.called_directly or not (is_unavailable(error) or is_disk_full(error)):
                raise
            (_disk_state(self.name) if is_disk_full(error) else _database).record_outage(error, issued_at_s)
            return None
        _database.record_recovery(issued_at_s)
        _disk_state(self.name).record_recovery(issued_at_s)
        return result


def _disk_state(task: str) -> DependencyState:
    outage = f"the database's disk is full: {task} stores nothing"
    return _disk.setdefault(task, DependencyState(outage, f"the database's disk has space again: {task} continues"))


def _is_clock_right(issued_at_s: float) -> bool:
    """Whether our clock and the database's differ by at most ``MAX_CLOCK_SKEW_S``. One query."""
    with connection.cursor() as cursor:
        cursor.execute("select extract(epoch from clock_timestamp())")
        skew_s = time.time() - float(cursor.fetchone()[0])
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        _clock.record_outage(f"{skew_s:+.0f} s from the database's", issued_at_s)
        return False
    _clock.record_recovery(issued_at_s)
    return True


@worker_init.connect
def _trace_worker(**_: Any) -> None:
    tracing.start(tracing.WORKER)
    refuse_foreign_database()


@beat_init.connect
def _trace_beat(**_: Any) -> None:
    tracing.start(tracing.BEAT)


app = Celery("warmpath", task_cls=ResilientTask, amqp="controlplane.celery:ReconnectingAMQP")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["controlplane", "telemetry"])

# The request that wakes a task waits for the broker: one immediate retry (0 would mean no limit), and a broker that
# accepts the connection but does not respond counts as unavailable too.
_ONE_RETRY = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "socket_timeout": 2}


def wake(task: str, *arguments: Any) -> None:
    """Run a task soon, once the current transaction is committed.

    An unavailable broker is logged once and is no error: the next beat tick does the work.
    """
    transaction.on_commit(lambda: _send(task, arguments))


def _send(task: str, arguments: tuple[Any, ...]) -> None:
    issued_at_s = time.monotonic()
    try:
        with app.connection_for_write(transport_options=_ONE_RETRY) as broker:
            app.send_task(task, arguments, connection=broker, retry=False, expires=30)
    except (OperationalError, OSError) as error:
        _broker.record_outage(f"{task}: {type(error).__name__}", issued_at_s)
    else:
        _broker.record_recovery(issued_at_s)
