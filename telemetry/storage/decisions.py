"""Reading stored decisions, as a replay needs them."""

from __future__ import annotations

from datetime import datetime, timedelta

import psycopg
from django.db import connection

from telemetry.lab.chains import HASHES, Request

_MASK = HASHES - 1
_SELECT = """
    select extract(epoch from at)::float8, "group", replica, rank, blocks, positions, block_count, sample_ratio,
        hash_tokens, prompt_tokens_estimate, prompt_tokens, cached_tokens, block_tokens
    from telemetry_decision
    where at >= %s and at < %s and pool = %s and status < 400
"""


def requests_between(pool: str, start: datetime, end: datetime, *, at_most: int) -> list[Request]:
    """Requests that a replica answered, by the time they were placed; the first ``at_most`` of them. One query."""
    return _read(f"{_SELECT} order by at limit %s", start, end, pool, at_most)


def latest_requests(pool: str, start: datetime, end: datetime, *, at_most: int) -> list[Request]:
    """The same, the last ``at_most`` of them."""
    return _read(f"{_SELECT} order by at desc limit %s", start, end, pool, at_most)[::-1]


def first_at(pool: str, start: datetime, end: datetime) -> datetime | None:
    """When the first of them was placed."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select min(at) from telemetry_decision where at >= %s and at < %s and pool = %s", [start, end, pool]
        )
        found: datetime | None = cursor.fetchone()[0]
    return found


def counts(pool: str, start: datetime, end: datetime, width: timedelta) -> dict[datetime, int]:
    """How many such requests there are, by bin of this width."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            select date_bin(make_interval(secs => %s), at, 'epoch'), count(*) from telemetry_decision
            where at >= %s and at < %s and pool = %s and status < 400 group by 1
            """,
            [width.total_seconds(), start, end, pool],
        )
        return dict(cursor.fetchall())


def _read(statement: str, *values: datetime | str | int) -> list[Request]:
    connection.ensure_connection()
    with psycopg.Cursor(connection.connection) as cursor:  # Django's own reads arrays of integers as text
        cursor.execute(statement, values, binary=True)
        return [_request(row) for row in cursor.fetchall()]


def _request(row: tuple[object, ...]) -> Request:
    at_s, group, replica, rank, blocks, *rest = row
    return Request(at_s, group, target(replica, rank), [block & _MASK for block in blocks], *rest)  # type: ignore[arg-type, attr-defined] # columns, as the statement names them


def target(replica: object, rank: object) -> str:
    """A cache's name: the replica, with its rank where it has several."""
    return f"{replica}" if rank is None else f"{replica}#{rank}"
