"""Detects that scheduled work (scraping, alert rules, pushes to routers) has stopped.

Theory of operation. Beat sends ``reconcile_routers`` every few seconds and a worker runs it, so one row that each run
updates shows that beat, the broker and a worker work. Web processes, which keep running without a worker, read it.
"""

from __future__ import annotations

from datetime import datetime

from django.conf import settings

from controlplane.models import WorkerLiveness

LATE_AFTER_S = 30.0  # and at least three intervals; a worker restarts in about 5 s


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
