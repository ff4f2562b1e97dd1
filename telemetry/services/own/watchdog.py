"""Reports from a web process that alert rules are no longer evaluated: the worker that would report it is gone.

Theory of operation. Every web process looks every ``CHECK_EVERY_S`` whether rules were evaluated lately: one query. If
not, it takes the lock of evaluators, evaluates only the rules of kind ``evaluator_lag``, and delivers what is due. It
does not write down that it evaluated, so everything else still shows how late the worker is. When a worker is back,
that worker resolves the alert.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime, timedelta

from django.conf import settings
from django.db import DatabaseError, connection
from django.db.models import Max, QuerySet
from django.utils import timezone

from telemetry.alerts.pipeline import evaluate
from telemetry.alerts.telling import tell_due
from telemetry.models import AlertRule, RuleKind
from telemetry.services.notifications.outbox import deliver_due
from telemetry.storage.locks import EVALUATE, only_one

CHECK_EVERY_S = 10.0
LATE_AFTER_S = 30.0  # without an evaluation, and at least three intervals: a worker that restarts takes about 5 s

log = logging.getLogger(__name__)


def start() -> threading.Thread:
    """Check from now on, in a thread that ends with the process."""
    thread = threading.Thread(target=_run, name="watchdog", daemon=True)
    thread.start()
    return thread


def check(now: datetime) -> bool:
    """Evaluate ``evaluator_lag`` rules and deliver what is due, if no worker evaluates; whether that was done."""
    if not _is_evaluation_late(now):
        return False
    with only_one(EVALUATE) as ours:
        if ours:
            tell_due(now, evaluate(_rules().filter(kind=RuleKind.EVALUATOR_LAG), now, note_time=False))
    deliver_due()
    return ours


def _rules() -> QuerySet[AlertRule]:
    return AlertRule.objects.filter(enabled=True).select_related("pool", "group")


def _is_evaluation_late(now: datetime) -> bool:
    evaluated_at = _rules().aggregate(at=Max("evaluated_at"))["at"]
    allowed = timedelta(seconds=max(LATE_AFTER_S, 3 * settings.SCRAPE_INTERVAL_S))
    return evaluated_at is not None and now - evaluated_at > allowed


def _run() -> None:
    was_failing = False
    while True:
        time.sleep(CHECK_EVERY_S)  # the thread's clock, not a wait for something
        try:
            check(timezone.now())
            was_failing = False
        except DatabaseError:
            pass  # /readyz and every page report it
        except Exception:
            if not was_failing:
                log.exception("the watchdog cannot check the worker")
            was_failing = True
        finally:
            connection.close()
