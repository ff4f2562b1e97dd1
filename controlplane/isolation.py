"""Runs the items of a periodic task apart from one another: an exception of one item does not stop the others.

Theory of operation. A periodic task works through pools, routers, rules or channels. ``isolated_items`` opens a run,
and every item runs inside ``item(name)``, which catches the item's exception, logs it with its traceback when it is
new, and stores an ``ItemFailure``. Pages, ``/metrics`` and alerts read these rows, so a failure stays visible until
the item succeeds. The row of an item that nobody tries any more, such as a removed pool's, expires after ``EXPIRES``.

Errors that concern every item pass through: a database that is away or full, and a task that ran out of time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

from celery.exceptions import SoftTimeLimitExceeded
from django.db import InterfaceError, OperationalError
from django.db.models import F
from django.utils import timezone

from controlplane.database.base import is_disk_full, is_unavailable
from controlplane.models import ItemFailure, PeriodicTask

EXPIRES = timedelta(hours=2)  # without a further failure; the slowest isolated task runs once an hour
LONGEST_NAME = 200  # characters

log = logging.getLogger(__name__)


class Items:
    """One run of a task. ``item(name)`` is the exception boundary of one item.

    An item that writes inside somebody else's transaction opens a savepoint: ``with item(name), transaction.atomic()``.
    """

    def __init__(self, task: PeriodicTask) -> None:
        self.task = task
        self.succeeded: set[str] = set()
        self.failed: set[str] = set()

    def __call__(self, name: str) -> Boundary:
        """Run one item; its exception is logged and stored."""
        return Boundary(lambda: self.succeeded.add(name), lambda error: self._fail(name, error))

    def all_of(self, names: Sequence[str]) -> Boundary:
        """Try several items as one; after an exception the caller runs each of them by itself."""
        return Boundary(lambda: self.succeeded.update(names), self._warn)

    def _fail(self, name: str, error: Exception) -> None:
        self.failed.add(name)
        _record_failure(self.task, name[:LONGEST_NAME], error, timezone.now())

    def _warn(self, error: Exception) -> None:
        log.warning("%s: several items failed together; each is tried by itself: %r", self.task.label, error)


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
    """Open one run of a task. One query beside those of the items.

    A run that ``is_complete`` tries every item there is, so failures of other items are obsolete after it.
    """
    items = Items(task)
    yield items
    _record_recoveries(items, timezone.now(), is_complete=is_complete)


def failing_items(now: datetime) -> dict[PeriodicTask, int]:
    """How many items of each task fail now, 0 included. One query."""
    counts = Counter(ItemFailure.objects.filter(at__gt=now - EXPIRES).values_list("task", flat=True))
    return {task: counts[task] for task in PeriodicTask}


def _concerns_every_item(error: BaseException) -> bool:
    """Whether an exception is not the fault of one item: the database is away or full, or the time is over."""
    if isinstance(error, OperationalError | InterfaceError):
        return is_unavailable(error) or is_disk_full(error)
    return isinstance(error, SoftTimeLimitExceeded)


def _record_failure(task: PeriodicTask, name: str, error: Exception, now: datetime) -> None:
    """Store it, and log it unless the item's last failure was of the same kind."""
    kind = type(error).__name__[:64]
    known = ItemFailure.objects.filter(task=task, item=name)
    if known.filter(error=kind).update(at=now, failures=F("failures") + 1):
        return
    log.error("%s: %s failed; the others continue", task.label, name, exc_info=error)
    changed = {"at": now, "error": kind}
    ItemFailure.objects.update_or_create(
        task=task, item=name, defaults=changed, create_defaults={**changed, "since": now}
    )


def _record_recoveries(items: Items, now: datetime, *, is_complete: bool) -> None:
    """Delete the rows of items that succeeded, and of items that nobody tries any more."""
    failed, succeeded = ({name[:LONGEST_NAME] for name in names} for names in (items.failed, items.succeeded))
    for failure in ItemFailure.objects.filter(task=items.task).exclude(item__in=failed):
        if failure.item in succeeded:
            failed_s = (now - failure.since).total_seconds()
            log.warning("%s: %s succeeds again after %.0f s", items.task.label, failure.item, failed_s)
        elif failure.at > now - EXPIRES and not is_complete:
            continue
        ItemFailure.objects.filter(pk=failure.pk, failures=failure.failures).delete()
