"""Reads stored decisions as columns, the input of a replay.

Theory of operation. Tens of thousands of rows as tuples would cost more than their replay, so PostgreSQL aggregates
them into arrays: one for each column, and one with all rows' block arrays, one after the other. They arrive in
PostgreSQL's binary format: a header of 20 bytes (12 for an array without elements), then each element's length in 4
bytes and the element itself, all big-endian.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import log2
from typing import Any

import numpy as np
import psycopg
from django.db import connection
from numpy.typing import NDArray

from telemetry.lab.captured import CapturedTraffic
from telemetry.lab.chains import Coded, Floats, Integers, Requests, coded
from telemetry.lab.request_repeats import DigestedRequests
from telemetry.metrics.windows import Window

HEADER, EMPTY_HEADER, LENGTH = 20, 12, 4  # bytes
POSTGRES_EPOCH_S = 946_684_800  # unix
UNKNOWN = -1  # stands for NULL in columns that are never negative
_NUMBERS = {
    "at": ">i8",  # microseconds
    "cardinality(blocks)": ">i4",
    f"coalesce(cardinality(positions), {UNKNOWN})": ">i4",
    "block_count": ">i4",
    "sample_ratio": ">f8",
    "hash_tokens": ">i4",
    "prompt_tokens_estimate": ">i8",
    f"coalesce(prompt_tokens, {UNKNOWN})": ">i8",
    f"coalesce(cached_tokens, {UNKNOWN})": ">i8",
    f"coalesce(block_tokens, {UNKNOWN})": ">i4",
}
_CAPTURED_NUMBERS = {
    f"coalesce(ttft_s, {UNKNOWN})": ">f8",
    f"coalesce(prefill_s, ttft_s, {UNKNOWN})": ">f8",
    f"coalesce(latency_s, {UNKNOWN})": ">f8",
    f"coalesce(generated_tokens, {UNKNOWN})": ">i8",
    "coalesce(prefix, 0)": ">i8",
    "coalesce(session, 0)": ">i8",
    "router_id": ">i8",
    "revision": ">i4",
}
_DIGESTED_NUMBERS = {
    "request_digest": ">i8",
    "at": ">i8",
    f"coalesce(latency_s, {UNKNOWN})": ">f8",
    f"coalesce(prompt_tokens, {UNKNOWN})": ">i8",
    f"coalesce(cached_tokens, {UNKNOWN})": ">i8",
    f"coalesce(generated_tokens, {UNKNOWN})": ">i8",
}
DIGEST_LEVELS = 63  # mask of the bits of a digest that have its highest level
MAX_DIGESTS = 100_000  # rows of one analysis
_SELECT = """
    select array_agg("group"), array_agg(case when rank is null then replica else replica || '#' || rank end),
        string_agg(array_send(blocks), ''), string_agg(array_send(positions), ''), {columns}
    from (
        select * from (
            select * from telemetry_decision where at >= %s and at < %s and pool = %s and status < 400
            order by at {order}, router_id {order}, boot {order}, seq {order} limit %s
        ) as chosen order by at, router_id, boot, seq
    ) as decisions
"""


def _columns(numbers: Mapping[str, str]) -> str:
    return ", ".join(f"array_send(array_agg({column}))" for column in numbers)


def requests_between(pool: str, start: datetime, end: datetime, *, at_most: int) -> Requests:
    """Requests with a successful response, by the time they were placed; the first ``at_most``. One query."""
    requests: Requests = _rows("asc", (start, end, pool, at_most), {})[0]
    return requests


def first_at(pool: str, start: datetime, end: datetime) -> datetime | None:
    """When the first request was placed; None if there is none. One query."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select min(at) from telemetry_decision where at >= %s and at < %s and pool = %s", [start, end, pool]
        )
        at: datetime | None = cursor.fetchone()[0]
    return at


def counts(pool: str, start: datetime, end: datetime, width: timedelta) -> dict[datetime, int]:
    """The number of successful requests by start of the bin. One query."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            select date_bin(make_interval(secs => %s), at, 'epoch'), count(*) from telemetry_decision
            where at >= %s and at < %s and pool = %s and status < 400 group by 1
            """,
            [width.total_seconds(), start, end, pool],
        )
        return dict(cursor.fetchall())


def captured_between(pool: str, start: datetime, end: datetime, *, at_most: int) -> CapturedTraffic:
    """The last ``at_most`` successful requests of a pool with what a replay of other policies needs. One query."""
    requests, ttft_s, prefill_s, latency_s, generated, prefixes, sessions, routers, revisions = _rows(
        "desc", (start, end, pool, at_most), _CAPTURED_NUMBERS
    )
    return CapturedTraffic(
        requests,
        _known(ttft_s),
        _known(prefill_s),
        _known(latency_s),
        _known(generated),
        prefixes.astype(np.int64).view(np.uint64),
        sessions.astype(np.int64).view(np.uint64),
        coded(map(str, routers.tolist())),
        revisions.astype(np.int64),
    )


@dataclass(frozen=True, slots=True)
class DigestCoverage:
    """Which requests of a window have digests, if an exact cache could answer them."""

    requests: dict[str, int]  # by task group, from routers that compute digests
    level: int  # part of the prompts that is read: 2 ** -level, small enough for all routers and ``MAX_DIGESTS``
    start: datetime  # of the first request
    end: datetime  # of the last one


def digest_coverage(pool: str, start: datetime, end: datetime) -> DigestCoverage | None:
    """The coverage of a window; None if no router computed digests. One query."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            select "group", request_digest & %s, count(*), min(digest_ratio), min(at), max(at) from telemetry_decision
            where at >= %s and at < %s and pool = %s and status < 400 and digest_ratio is not null group by 1, 2
            """,
            [DIGEST_LEVELS, start, end, pool],
        )
        rows = cursor.fetchall()
    if not rows:
        return None
    requests: dict[str, int] = {}
    for group, _, count, *_ in rows:
        requests[group] = requests.get(group, 0) + count
    level = round(-log2(min(row[3] for row in rows)))
    while level < DIGEST_LEVELS and sum(row[2] for row in rows if row[1] is not None and row[1] >= level) > MAX_DIGESTS:
        level += 1
    return DigestCoverage(requests, level, min(row[4] for row in rows), max(row[5] for row in rows))


def digested_between(pool: str, start: datetime, end: datetime, level: int) -> DigestedRequests:
    """Successful requests with a digest at this level, in order of time. One query."""
    (groups,), numbers = _read(
        f"""
        select array_agg("group"), {_columns(_DIGESTED_NUMBERS)} from (
            select * from telemetry_decision
            where at >= %s and at < %s and pool = %s and status < 400 and request_digest & {DIGEST_LEVELS} >= %s
            order by at
        ) as decisions
        """,  # noqa: S608 - columns and a number of this module
        (start, end, pool, level),
        _DIGESTED_NUMBERS,
    )
    digests, at, latency_s, prompt, cached, generated = numbers
    return DigestedRequests(
        coded(groups or ()),
        digests.astype(np.int64).view(np.uint64),
        at / 1e6 + POSTGRES_EPOCH_S,
        _known(latency_s),
        _known(prompt),
        _known(cached),
        _known(generated),
        2.0**-level,
    )


@dataclass(frozen=True, slots=True)
class PlacedRequests:
    """Requests that a policy placed, as columns in order of their bins. NaN: unknown."""

    bins: Integers  # number of the bin, from 0
    revisions: Integers
    in_scope: NDArray[np.bool_]  # of the routers and task groups that were named
    prefixes: NDArray[np.uint64]  # tier-1; 0: none
    outcomes: Coded  # "": unknown
    prompt_tokens: Floats
    cached_tokens: Floats
    ttft_s: Floats  # of successful streamed responses
    plain_latency_s: Floats  # of successful responses that were not streamed


_PLACED_NUMBERS = {
    "bin": ">i4",
    "revision": ">i4",
    "in_scope::integer": ">i4",
    "coalesce(prefix, 0)": ">i8",
    f"coalesce(prompt_tokens, {UNKNOWN})": ">i8",
    f"coalesce(cached_tokens, {UNKNOWN})": ">i8",
    f"coalesce(ttft_s, {UNKNOWN})": ">f8",
    f"coalesce(latency_s, {UNKNOWN})": ">f8",
    "coalesce(streamed, false)::integer": ">i4",
    "coalesce(status, 0)::integer": ">i4",
}


def placed_between(
    policy: str,
    revisions: Sequence[int],
    window: Window,
    *,
    routers: Sequence[int] | None,
    groups: Sequence[str] | None,
    at_most: int,
) -> PlacedRequests:
    """The requests that these revisions placed, of each step of a window the first ``at_most``. One query."""
    (outcomes,), numbers = _read(
        f"""
        select array_agg(outcome), {_columns(_PLACED_NUMBERS)}
        from generate_series(0, %(bins)s - 1) as bin cross join lateral (
            select *, (%(routers)s::bigint[] is null or router_id = any(%(routers)s))
                and (%(groups)s::text[] is null or "group" = any(%(groups)s)) as in_scope
            from telemetry_decision
            where at >= %(start)s + bin * make_interval(secs => %(step)s)
                and at < least(%(start)s + (bin + 1) * make_interval(secs => %(step)s), %(end)s)
                and policy = %(policy)s and revision = any(%(revisions)s)
            order by at limit %(at_most)s
        ) as decisions
        """,  # noqa: S608 - columns of this module
        {
            "bins": len(window.starts()),
            "start": window.start,
            "end": window.end,
            "step": window.step_s,
            "policy": policy,
            "revisions": list(revisions),
            "routers": None if routers is None else list(routers),
            "groups": None if groups is None else list(groups),
            "at_most": at_most,
        },
        _PLACED_NUMBERS,
    )
    bins, placed_by, in_scope, prefixes, prompt, cached, ttft_s, latency_s, streamed, status = numbers
    coded_outcomes = coded(outcomes or ())
    is_ok = np.isin(coded_outcomes.codes, [code for code, name in enumerate(coded_outcomes.names) if name == "ok"])
    is_successful = (status > 0) & (status < 400)
    return PlacedRequests(
        bins.astype(np.int64),
        placed_by.astype(np.int64),
        in_scope.astype(np.bool_),
        prefixes.astype(np.int64).view(np.uint64),
        coded_outcomes,
        _known(prompt),
        _known(cached),
        np.where(is_successful, _known(ttft_s), np.nan),
        np.where(is_ok & (streamed == 0), _known(latency_s), np.nan),
    )


def _known(column: NDArray[Any]) -> Floats:
    """The column with NaN for NULL."""
    return np.where(column == UNKNOWN, np.nan, column.astype(np.float64))


def _rows(order: str, values: Sequence[datetime | str | int], further: Mapping[str, str]) -> list[Any]:
    """Requests, and further columns of numbers."""
    names = {**_NUMBERS, **further}
    sql = _SELECT.format(order=order, columns=_columns(names))
    (groups, replicas, blocks, positions), numbers = _read(sql, values, names)
    at, lengths, position_counts, block_counts, *others = numbers[: len(_NUMBERS)]
    ratios, hash_tokens, estimates, *nullable = (column.astype(np.float64) for column in others)
    requests = Requests(
        at / 1e6 + POSTGRES_EPOCH_S,
        coded(groups or ()),
        coded(replicas or ()),
        _joined(blocks, lengths, ">u8").astype(np.uint64),
        _positions(positions, lengths, position_counts),
        np.cumsum(lengths, dtype=np.int64),
        block_counts.astype(np.float64),
        ratios,
        hash_tokens,
        estimates,
        *(np.where(column == UNKNOWN, np.nan, column) for column in nullable),
    )
    return [requests, *numbers[len(_NUMBERS) :]]


def _read(sql: Any, values: Any, names: Mapping[str, str]) -> tuple[list[Any], list[NDArray[Any]]]:
    """(the first columns of the one row that a query returns, the last ones as arrays of numbers)."""
    connection.ensure_connection()
    with psycopg.Cursor(connection.connection) as cursor:  # Django's own cursor reads the text format
        cursor.execute(sql, values, binary=True)
        row = list(cursor.fetchall()[0])
    sent = zip(row[-len(names) :], names.values(), strict=True)
    return row[: -len(names)], [_numbers(column, kind) for column, kind in sent]


def _numbers(sent: bytes | None, kind: str) -> NDArray[Any]:
    """The elements of an array in the binary format; none is NULL."""
    element = np.dtype([("length", ">i4"), ("value", kind)])
    values: NDArray[Any] = np.frombuffer((sent or b"")[HEADER:], element)["value"]
    return values


def _joined(sent: bytes | None, lengths: NDArray[Any], kind: str) -> NDArray[Any]:
    """The elements of arrays with these lengths, concatenated in the binary format."""
    width = np.dtype(kind).itemsize
    word_bytes = min(width, LENGTH)  # every offset is a multiple
    each = LENGTH + width
    ends = np.cumsum(np.where(lengths > 0, HEADER + each * lengths, EMPTY_HEADER))
    offsets = np.repeat(ends - each * np.cumsum(lengths), lengths)  # of headers, before each element
    first = offsets + each * np.arange(len(offsets)) + LENGTH
    words = np.frombuffer(sent or b"", f">u{word_bytes}")
    elements: NDArray[Any] = words[first[:, None] // word_bytes + np.arange(width // word_bytes)].reshape(-1).view(kind)
    return elements


def _positions(sent: bytes | None, lengths: NDArray[Any], counts: NDArray[Any]) -> Integers:
    """The positions of all blocks. A prompt without positions (UNKNOWN) has all its blocks, from 0 on."""
    ends = np.cumsum(lengths, dtype=np.int64)
    positions: Integers = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    positions[np.repeat(counts != UNKNOWN, lengths)] = _joined(sent, counts[counts != UNKNOWN], ">u2")
    return positions
