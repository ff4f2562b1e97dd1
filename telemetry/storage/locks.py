"""PostgreSQL advisory locks of telemetry, held by a connection: one worker at a time does each piece of work."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection

SCRAPE = 0x7770_7363_7270_0000  # plus the number of a shard
EVALUATE = 0x7770_616C_7274
GUARD = 0x7770_6775_6172
ROLLUP = 0x7770_726F_6C75
STORING = 0x7770_726F_6C6C  # shared by transactions that store readings
PARTITIONS = 0x7770_7061_7274
BREAKDOWN = 0x7770_0002_0000_0000  # plus a pool's id
COLLECT = 0x7770_0001_0000_0000  # plus a router's id
METRICS_SERVER = 0x7770_6D73_0000_0000  # plus a Prometheus server's id
WHAT_IF = 0x7770_7769_0000  # plus the number of a slot


@contextmanager
def advisory_lock(key: int) -> Iterator[bool]:
    """Hold the lock during the block; False if another connection holds it. Never waits."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_try_advisory_lock(%s)", [key])
        (acquired,) = cursor.fetchone()
    try:
        yield acquired
    finally:
        if acquired:
            with connection.cursor() as cursor:
                cursor.execute("select pg_advisory_unlock(%s)", [key])
