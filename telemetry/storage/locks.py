"""One worker at a time, by an advisory lock of PostgreSQL that goes with the connection that holds it."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection

SCRAPE = 0x7770_7363_7270_0000  # and the number of a shard; any numbers that no other advisory lock of ours has
EVALUATE = 0x7770_616C_7274
GUARD = 0x7770_6775_6172
ROLLUP = 0x7770_726F_6C75
LADDER = 0x7770_0002_0000_0000  # and a pool's
COLLECT = 0x7770_0001_0000_0000  # and a router's id added: one lock each
_METRICS_SERVERS = 0x7770_6D73_0000_0000  # and the server's number


def metrics_server_lock(server_id: int) -> int:
    """The lock of whoever reads from one metrics server."""
    return _METRICS_SERVERS + server_id


@contextmanager
def advisory_lock(key: int) -> Iterator[bool]:
    """Whether we hold the lock during the block; False at once when somebody else does. Never waits."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_try_advisory_lock(%s)", [key])
        (held,) = cursor.fetchone()
    try:
        yield held
    finally:
        if held:
            with connection.cursor() as cursor:
                cursor.execute("select pg_advisory_unlock(%s)", [key])
