"""The exception boundary of periodic tasks: one item's exception stops no other item and stays visible."""

import logging
from datetime import timedelta

import psycopg
import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import IntegrityError, OperationalError, transaction
from django.utils import timezone

from controlplane.isolation import EXPIRES, failing_items, isolated_items
from controlplane.models import ItemFailure, PeriodicTask, Pool, Project
from controlplane.services.fleet.pools import create_pool

pytestmark = pytest.mark.django_db
TASK = PeriodicTask.BREAKDOWNS


def run(*failing, names=("a", "b", "c"), error=KeyError, **options):
    """Run all items once; the names of the items that succeeded."""
    done = []
    with isolated_items(TASK, **options) as item:
        for name in names:
            with item(name):
                if name in failing:
                    raise error(name)
                done.append(name)
    return done


def test_an_item_that_fails_stops_no_other_and_is_stored():
    assert run("b") == ["a", "c"]
    failure = ItemFailure.objects.get()
    assert (failure.task, failure.item, failure.error, failure.failures) == ("breakdowns", "b", "KeyError", 1)
    assert failing_items(timezone.now())[TASK] == 1


def test_a_repeated_failure_is_logged_once_and_its_recovery_once(caplog):
    with caplog.at_level(logging.WARNING, logger="controlplane.isolation"):
        for _ in range(3):
            run("b")
        run("b", error=ValueError)
        run()
        run()
    logged = [(record.levelname, record.exc_info is not None) for record in caplog.records]
    assert logged == [("ERROR", True), ("ERROR", True), ("WARNING", False)]
    assert ItemFailure.objects.count() == 0


def test_a_failure_of_an_item_that_is_no_longer_run_expires():
    run("b")
    run(names=("a", "c"))
    assert failing_items(timezone.now())[TASK] == 1
    assert failing_items(timezone.now() + EXPIRES)[TASK] == 0
    ItemFailure.objects.update(at=timezone.now() - EXPIRES - timedelta(seconds=1))
    run(names=("a", "c"))
    assert ItemFailure.objects.count() == 0


def test_a_complete_run_deletes_failures_of_removed_items():
    run("b")
    run(names=("a",), is_complete=True)
    assert ItemFailure.objects.count() == 0


def test_an_item_that_fails_in_one_of_its_steps_has_failed():
    with isolated_items(TASK) as item:
        with item("a"):
            raise KeyError
        with item("a"):
            pass
    assert ItemFailure.objects.count() == 1


def test_items_run_together_recover_together():
    run("b")
    with isolated_items(TASK) as item, item.all_of(["a", "b"]):
        pass
    assert ItemFailure.objects.count() == 0
    with isolated_items(TASK) as item, item.all_of(["a", "b"]):
        raise KeyError
    assert ItemFailure.objects.count() == 0  # the caller runs each item separately next


def unavailable() -> OperationalError:
    error = OperationalError("the server closed the connection")
    error.__cause__ = psycopg.OperationalError("the server closed the connection")
    return error


def disk_full() -> OperationalError:
    error = OperationalError("no space left")
    error.__cause__ = psycopg.errors.DiskFull("no space left")
    return error


@pytest.mark.parametrize("error", [unavailable, disk_full, SoftTimeLimitExceeded, KeyboardInterrupt])
def test_errors_that_concern_every_item_pass_through(error):
    with pytest.raises(type(error())), isolated_items(TASK) as item, item("a"):
        raise error()
    assert ItemFailure.objects.count() == 0


def test_an_item_with_a_savepoint_leaves_the_transaction_around_it_usable():
    project = create_pool("chat").project
    with transaction.atomic(), isolated_items(TASK) as item:
        for name in ("chat", "next"):
            with item(name), transaction.atomic():
                Pool.objects.create(name=name, project=project)
    assert ItemFailure.objects.get().error == IntegrityError.__name__
    assert set(Pool.objects.values_list("name", flat=True)) == {"chat", "next"}
    assert Project.objects.count() == 1


def test_a_long_name_is_truncated():
    name = "x" * 300
    run(name, names=(name,))
    run(names=(name,))
    assert ItemFailure.objects.count() == 0
