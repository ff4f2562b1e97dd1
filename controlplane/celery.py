"""The Celery application, and the one way to wake a task.

The broker is never truth: a wake-up that is lost costs at most the time until the next beat tick, because every
task works off what the database says is due.
"""

import logging
import os
from typing import Any

from celery import Celery
from django.db import transaction
from kombu.exceptions import OperationalError

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings.production")

app = Celery("warmpath")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["controlplane", "telemetry"])

log = logging.getLogger(__name__)

# A person waits for the answer of the request that wakes: one more try, at once (0 would mean for ever), and a broker
# that takes the connection but says nothing is away too.
_ONCE = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "socket_timeout": 2}


def wake(task: str, *arguments: Any) -> None:
    """Run a task soon, once the current transaction is committed. A broker that is away is logged, never an error."""
    transaction.on_commit(lambda: _send(task, arguments))


def _send(task: str, arguments: tuple[Any, ...]) -> None:
    try:
        with app.connection_for_write(transport_options=_ONCE) as connection:
            app.send_task(task, arguments, connection=connection, retry=False, expires=30)
    except (OperationalError, OSError) as error:
        log.warning("could not wake %s (%s); the next tick does its work", task, type(error).__name__)
