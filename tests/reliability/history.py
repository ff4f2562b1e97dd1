"""Runs inside the stand's environment and writes readings as a scraper would."""

import sys
from datetime import timedelta

from django.db import close_old_connections
from django.utils import timezone

from controlplane.models import Pool, Replica, ReplicaState
from controlplane.services.fleet.replicas import add_replica, set_replica_state
from telemetry.models import Reading
from tests.telemetry.readings import engine_reading

STEP = timedelta(seconds=2)
FUTURE = timedelta(seconds=120)  # so that the newest bins are always full
PAST = timedelta(seconds=120)


def serve() -> None:
    """Execute each line of standard input and acknowledge it."""
    for line in sys.stdin:
        close_old_connections()
        write(float(line))
        print("written", flush=True)  # noqa: T201 - whoever wrote the line waits for it


def write(ratio: float) -> None:
    """Write readings with hit rate ``ratio`` from now on, and 0.8 for earlier times without readings."""
    now = timezone.now()
    replica = Replica.objects.filter(name="measured").first() or _replica()
    readings = Reading.objects.filter(replica=replica)
    readings.filter(at__gt=now).delete()
    last = readings.order_by("-at").values_list("at", flat=True).first()
    start = max(last + STEP if last else now - PAST, now - PAST)
    for number in range(int((now + FUTURE - start) / STEP)):
        at = start + number * STEP
        hits = int(10_000 * (ratio if at > now else 0.8))
        engine_reading(replica, at, interval_s=STEP.total_seconds(), queries=10_000, hits=hits, finished=20)


def _replica() -> Replica:
    """A replica that is not scraped."""
    replica = add_replica(Pool.objects.get(name="default"), name="measured", url="http://10.0.0.1:8000")
    return set_replica_state(replica, ReplicaState.DISABLED)
