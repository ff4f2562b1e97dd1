"""Readings of a window as SQL, whatever they are read from: rows of one shape out of bins and of readings.

``at > start and at <= end`` and steps of time hold for bins as for readings, because both carry the end of what they
tell of.

Readings that come after their minute was rolled up: they mark it, and it is made anew.

Theory of operation. Who stores readings takes a lock that storers share, until the transaction ends, and then looks
how far minutes are closed. Who closes minutes takes the lock alone: it waits for all storers that did not see the
new mark, and those that come after it see it. So a reading is either there when its minute is rolled up, or its
minute is marked. Storers wait for the moment that closing takes, and never for the rolling. A mark is taken away
before its bin is made anew: that waits for those who rely on the mark, and who comes later sets another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import connection, transaction

from telemetry.metrics.windows import Window
from telemetry.models import RollupRepair, RollupState
from telemetry.storage.rollup_columns import (
    RESOLUTIONS_S,
    WHOLE,
    Column,
    Histogram,
    Part,
    Rollup,
    cover,
    fitting,
    histograms,
    up,
)


@dataclass(frozen=True, slots=True)
class Source:
    """A subselect, without an alias, and its parameters."""

    sql: str
    parameters: dict[str, Any] = field(default_factory=dict)


def rolled_through() -> dict[int, datetime | None]:
    """How far each resolution has been rolled up; None: not at all. One query."""
    known: dict[int, datetime | None] = dict(RollupState.objects.values_list("pk", "rolled_through"))
    return {resolution_s: known.get(resolution_s) for resolution_s in RESOLUTIONS_S}


def parts_of(window: Window, *, whole: bool = False) -> list[Part]:
    """What a window is read from, ascending. One query where rollups may serve, none otherwise."""
    resolutions = fitting(window, RESOLUTIONS_S, whole=whole)
    return cover(window.start, window.end, resolutions, rolled_through() if resolutions else {})


def sums_in(rollup: Rollup, window: Window, names: Sequence[str] | None = None, *, whole: bool = False) -> Source:
    """Rows of ``at``, the key and the columns of a rollup, or those of them that are named."""
    columns = [column for column in rollup.columns if names is None or column.name in names]
    key = ", ".join(rollup.key)
    found = ", ".join(column.name for column in columns)

    def select(part: Part) -> str:
        if part.resolution_s is None:
            return _of_readings(rollup, key, columns)
        return f"select at, {key}, {found} from {rollup.table(part.resolution_s)} where true"  # noqa: S608 - our own names

    return _together(parts_of(window, whole=whole), select)


def readings_of(rollup: Rollup, window: Window, names: Sequence[str]) -> Source:
    """The same from readings alone, which have further keys: of a router's, ``replica``."""
    columns = [column for column in rollup.columns if column.name in {"requests", *names}]
    part = Part(None, window.start, window.end)
    return _together([part], lambda _: _of_readings(rollup, ", ".join((*rollup.key, "replica")), columns))


def _of_readings(rollup: Rollup, key: str, columns: Sequence[Column]) -> str:
    found = ", ".join(f"{column.of_reading} as {column.name}" for column in columns)
    return f"select at, {key}, {found} from {rollup.readings} where true"  # noqa: S608 - our own names


def histograms_in(of: Histogram, window: Window, *, by_part: bool, whole: bool = False) -> Source:
    """Rows of at, pool, part, reuse, layout_id, positions, counts; without ``by_part`` some are of whole pools."""

    def select(part: Part) -> str:
        if part.resolution_s is None:
            return f"""
                select at, {of.pool} as pool, {of.part} as part, {of.reuse} as reuse,
                    {of.column}_layout_id as layout_id, {of.column}_at as positions, {of.column}_counts as counts
                from {of.readings} where {of.column}_layout_id is not null"""  # noqa: S608 - our own names
        kind = of.kind if by_part else of.kind + WHOLE
        return f"""
            select at, pool, part, reuse, layout_id, positions, counts from {histograms(part.resolution_s)}
            where kind = '{kind}'"""  # noqa: S608 - likewise

    return _together(parts_of(window, whole=whole), select)


def _together(parts: Sequence[Part], select: Callable[[Part], str]) -> Source:
    selects = [
        f"{select(part)} and at > %(part{number}_start)s and at <= %(part{number}_end)s"
        for number, part in enumerate(parts)
    ]
    times = {f"part{number}_start": part.start for number, part in enumerate(parts)}
    times |= {f"part{number}_end": part.end for number, part in enumerate(parts)}
    return Source("(" + " union all ".join(selects) + ")", times)


FINEST_S = RESOLUTIONS_S[0]
STORING = 0x7770_726F_6C6C  # any number that no other advisory lock of ours has


def mark_late(times: Iterable[datetime]) -> None:
    """Mark the minutes of these readings that are closed; in the transaction that stores them. Two queries."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock_shared(%s)", [STORING])
    closed = RollupState.objects.filter(pk=FINEST_S).values_list("closed_through", flat=True).first()
    late = {up(at, FINEST_S) for at in times if closed is not None and at <= closed}
    mark(FINEST_S, late)


def mark(resolution_s: int, bins: Iterable[datetime]) -> None:
    """Note that these bins are to be made anew. A mark that is there already is held until the transaction ends."""
    repairs = [RollupRepair(resolution_s=resolution_s, at=at) for at in sorted(bins)]
    if repairs:
        key = ["resolution_s", "at"]
        RollupRepair.objects.bulk_create(repairs, update_conflicts=True, unique_fields=key, update_fields=["at"])


@transaction.atomic
def close(through: datetime) -> None:
    """From now on whoever stores a reading of this time or before marks its minute."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", [STORING])
    RollupState.objects.update_or_create(pk=FINEST_S, defaults={"closed_through": through})
