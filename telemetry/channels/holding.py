"""Channels that stay until a transaction's end, so that what is written for them has somewhere to belong.

One lock order for everybody who writes about channels: the channel, then its messages, then their attempts, and the
logs last. Whoever deletes a channel locks its row for that and waits for those who hold it here.
"""

from __future__ import annotations

from collections.abc import Collection

from django.db import connection

from telemetry.models import Channel


def hold_channels(keys: Collection[int]) -> frozenset[int]:
    """Keep these channels from being deleted before this transaction ends; those that are still there. One query."""
    with connection.cursor() as cursor:
        table = connection.ops.quote_name(Channel._meta.db_table)  # noqa: SLF001 - Django's documented way
        cursor.execute(
            f"select id from {table} where id = any(%s) order by id for key share",  # noqa: S608 - a table of ours
            [sorted(keys)],
        )
        return frozenset(key for (key,) in cursor.fetchall())
