"""Run in the stand's own environment: readings as a scraper would have left them."""

import sys
from datetime import timedelta

from django.db import close_old_connections
from django.utils import timezone

from controlplane.models import Pool, Replica, ReplicaState
from controlplane.services.fleet.replicas import add_replica, set_replica_state
from telemetry.models import Reading
from tests.telemetry.readings import engine_reading

NEWEST_S = 60  # seconds ahead, so that the last window is full whenever somebody looks
PAST_S = 120


def serve() -> None:
    """Write what each line of the standard input names, and say so."""
    for line in sys.stdin:
        close_old_connections()
        write(float(line))
        print("written", flush=True)  # noqa: T201 - whoever wrote the line waits for it


def write(ratio: float) -> None:
    """A hit rate of 0.8 two minutes long, then ``ratio`` from now on. What was written before is gone."""
    now = timezone.now()
    replica = Replica.objects.filter(name="measured").first() or _replica()
    Reading.objects.filter(replica=replica).delete()
    for second in range(-PAST_S, NEWEST_S, 2):
        rate = 0.8 if second < -12 else ratio
        engine_reading(
            replica,
            now + timedelta(seconds=second),
            interval_s=2.0,
            queries=10_000,
            hits=int(10_000 * rate),
            finished=20,
        )


def _replica() -> Replica:
    """One that nobody scrapes."""
    replica = add_replica(Pool.objects.get(name="default"), name="measured", url="http://10.0.0.1:8000")
    return set_replica_state(replica, ReplicaState.DISABLED)
