"""Periodic tasks: runs their items apart from one another, and detects that no task runs at all.

Theory of operation. A periodic task works through pools, routers, rules or channels. ``isolated_items`` opens a run,
and every item runs inside ``item(name)``, which catches the item's exception, logs it with its traceback when it is
new, and stores an ``ItemFailure``. The other items continue. Pages, ``/metrics`` and alerts read these rows, so a
failure stays visible until the item succeeds. The row of an item that no longer runs, such as a removed pool's, expires
after ``EXPIRES``.

Errors that concern every item pass through: an unavailable or full database, and the task's time limit.

That no task runs at all is detected from one row. Beat sends ``reconcile_routers`` every few seconds and a worker runs
it, so the row that each run updates shows that beat, the broker and a worker work. Web processes read it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings
from django.db import InterfaceError, OperationalError
from django.db.models import F
from django.utils import timezone

from controlplane.database.base import is_disk_full, is_unavailable
from controlplane.models import ItemFailure, PeriodicTask, WorkerLiveness

EXPIRES = timedelta(hours=2)  # without a further failure; the slowest isolated task runs once an hour
MAX_NAME_LENGTH = 200  # characters
LATE_AFTER_S = 30.0  # and at least three intervals; a worker restarts in about 5 s

log = logging.getLogger(__name__)


class Items:
    """One run of a task. ``item(name)`` is the exception boundary of one item.

    An item that writes inside its caller's transaction opens a savepoint: ``with item(name), transaction.atomic()``.
    """

    def __init__(self, task: PeriodicTask) -> None:
        self.task = task
        self.succeeded: set[str] = set()
        self.failed: set[str] = set()

    def __call__(self, name: str) -> Boundary:
        """Run one item; its exception is logged and stored."""
        return Boundary(lambda: self.succeeded.add(name), lambda error: self._fail(name, error))

    def all_of(self, names: Sequence[str]) -> Boundary:
        """Run several items together; after an exception the caller runs each item separately."""
        return Boundary(lambda: self.succeeded.update(names), self._warn)

    def _fail(self, name: str, error: Exception) -> None:
        self.failed.add(name)
        _record_failure(self.task, name[:MAX_NAME_LENGTH], error, timezone.now())

    def _warn(self, error: Exception) -> None:
        log.warning("%s: running several items together failed; each item runs separately: %r", self.task.label, error)


class Boundary:
    """Suppresses an exception of its block, unless that concerns every item, and hands it to ``on_error``."""

    def __init__(self, on_success: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        self._on_success = on_success
        self._on_error = on_error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None:
            self._on_success()
            return False
        if not isinstance(error, Exception) or _concerns_every_item(error):
            return False
        self._on_error(error)
        return True


@contextmanager
def isolated_items(task: PeriodicTask, *, is_complete: bool = False) -> Iterator[Items]:
    """Open one run of a task. One query besides those of the items.

    A run that ``is_complete`` runs every existing item, so stored failures of other items are obsolete.
    """
    items = Items(task)
    yield items
    _record_recoveries(items, timezone.now(), is_complete=is_complete)


def failing_items(now: datetime) -> dict[PeriodicTask, int]:
    """How many items of each task fail now, 0 included. One query."""
    counts = Counter(ItemFailure.objects.filter(at__gt=now - EXPIRES).values_list("task", flat=True))
    return {task: counts[task] for task in PeriodicTask}


def _concerns_every_item(error: BaseException) -> bool:
    """Whether the cause is not the item: the database is unavailable or full, or the task's time limit expired."""
    if isinstance(error, OperationalError | InterfaceError):
        return is_unavailable(error) or is_disk_full(error)
    return isinstance(error, SoftTimeLimitExceeded)


def _record_failure(task: PeriodicTask, name: str, error: Exception, now: datetime) -> None:
    """Store a failure, and log it unless the item's last failure was of the same kind."""
    kind = type(error).__name__[:64]
    failures = ItemFailure.objects.filter(task=task, item=name)
    if failures.filter(error=kind).update(at=now, failures=F("failures") + 1):
        return
    log.error("%s: %s failed; the other items continue", task.label, name, exc_info=error)
    latest = {"at": now, "error": kind}
    ItemFailure.objects.update_or_create(
        task=task, item=name, defaults=latest, create_defaults={**latest, "since": now}
    )


def _record_recoveries(items: Items, now: datetime, *, is_complete: bool) -> None:
    """Delete the rows of items that succeeded, and of items that no longer run."""
    failed, succeeded = ({name[:MAX_NAME_LENGTH] for name in names} for names in (items.failed, items.succeeded))
    for failure in ItemFailure.objects.filter(task=items.task).exclude(item__in=failed):
        if failure.item in succeeded:
            failed_s = (now - failure.since).total_seconds()
            log.warning("%s: %s succeeds again after %.0f s", items.task.label, failure.item, failed_s)
        elif failure.at > now - EXPIRES and not is_complete:
            continue
        ItemFailure.objects.filter(pk=failure.pk, failures=failure.failures).delete()


def record_worker_seen(now: datetime) -> None:
    """Record a run of scheduled work. One upsert, so that two first runs at once do not collide."""
    row = WorkerLiveness(pk=1, seen_at=now)
    WorkerLiveness.objects.bulk_create([row], update_conflicts=True, unique_fields=["id"], update_fields=["seen_at"])


def worker_silence_s(now: datetime) -> float | None:
    """Seconds since scheduled work last ran, at least 0; None: never. One query."""
    seen_at = WorkerLiveness.objects.values_list("seen_at", flat=True).first()
    return None if seen_at is None else max(0.0, (now - seen_at).total_seconds())


def is_late(silence_s: float) -> bool:
    return silence_s > max(LATE_AFTER_S, 3 * settings.RECONCILE_INTERVAL_S)
