"""The Celery application, and the one way to wake a task.

The broker is never truth: a wake-up that is lost costs at most the time until the next beat tick, because every
task works off what the database says is due.
"""

import logging
import os
import time
from typing import Any

from celery import Celery, Task
from django.db import InterfaceError, connection, transaction
from django.db import OperationalError as DatabaseError
from kombu.exceptions import OperationalError

from controlplane.database.base import is_disk_full, is_unavailable
from controlplane.dependency_state import DependencyState

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings.production")

log = logging.getLogger(__name__)
_database = DependencyState("the database is away", "the database is back", log)
_wakes = DependencyState("no task can be woken", "tasks can be woken again", log)
_clock = DependencyState("this worker's clock is wrong", "this worker's clock is right again", log)
_room: dict[str, DependencyState] = {}  # by task: others may go on, as they only read
CLOCK_S = 30.0  # that a worker's clock may be off: as long as a router may be silent


class PatientTask(Task):  # type: ignore[type-arg]  # generic in the stubs alone
    """A task that leaves its work to the next tick while the database is away or full, and logs no stack for that.

    Most tasks compare the moments of rows with their own clock. A worker whose clock differs from the database's takes
    present routers for lost and alerts for over, so it leaves the work to others.
    """

    abstract = True

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run. What calls it by hand hears of every error."""
        issued_at_s = time.monotonic()
        try:
            if not (self.request.called_directly or _clock_is_right(issued_at_s)):
                return None
            outcome = super().__call__(*args, **options)
        except (DatabaseError, InterfaceError) as error:
            if self.request.called_directly or not (is_unavailable(error) or is_disk_full(error)):
                raise
            (_room_for(self.name) if is_disk_full(error) else _database).record_outage(error, issued_at_s)
            return None
        _database.record_recovery(issued_at_s)
        _room_for(self.name).record_recovery(issued_at_s)
        return outcome


def _room_for(task: str) -> DependencyState:
    gone, back = f"the database's disk is full: {task} stores nothing", f"the database has room again: {task} goes on"
    return _room.setdefault(task, DependencyState(gone, back, log))


def _clock_is_right(issued_at_s: float) -> bool:
    """Whether our clock and the database's tell the same time, give or take ``CLOCK_S``. A query."""
    with connection.cursor() as cursor:
        cursor.execute("select extract(epoch from clock_timestamp())")
        off_s = time.time() - float(cursor.fetchone()[0])
    if abs(off_s) > CLOCK_S:
        _clock.record_outage(f"{off_s:+.0f} s from the database's", issued_at_s)
        return False
    _clock.record_recovery(issued_at_s)
    return True


app = Celery("warmpath", task_cls=PatientTask, amqp="controlplane.broker:EagerAMQP")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["controlplane", "telemetry"])

# A person waits for the answer of the request that wakes: one more try, at once (0 would mean for ever), and a broker
# that takes the connection but says nothing is away too.
_ONCE = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "socket_timeout": 2}


def wake(task: str, *arguments: Any) -> None:
    """Run a task soon, once the current transaction is committed.

    A broker that is away is no error, and is logged once: the next tick does the work.
    """
    transaction.on_commit(lambda: _send(task, arguments))


def _send(task: str, arguments: tuple[Any, ...]) -> None:
    issued_at_s = time.monotonic()
    try:
        with app.connection_for_write(transport_options=_ONCE) as broker:
            app.send_task(task, arguments, connection=broker, retry=False, expires=30)
    except (OperationalError, OSError) as error:
        _wakes.record_outage(f"{task}: {type(error).__name__}", issued_at_s)
    else:
        _wakes.record_recovery(issued_at_s)
