"""Rows and bytes in PostgreSQL: of each replica, of each task group at a replica, and of each request.

Readings of replicas are scrapes of stand-ins that serve a capture of vLLM, repeated over two hours; those of a router
are generated, with four task groups, each at one replica. The worker's code rolls all of them up. Decisions are sampled
as by default at 200 requests/s. Bytes include indexes and TOAST.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from tests.benchmarks.telemetry.stand import Stand, stand_in_replicas

POOLS, REPLICAS, GROUPS = 8, 4, 4  # of replicas and of task groups: in each pool
HOURS = 2
CYCLES, EVERY_S = 24, 5  # of real scrapes: two minutes, which then repeat
DECISIONS, DECISIONS_PER_S, BLOCKS_PER_S = 6000, 200, 2000
CHANGES = 40
RESOLUTIONS = {"1m": 60, "5m": 300, "1h": 3600, "6h": 21_600}
ENGINES, ROUTERS = "kind like 'engine%'", "kind not like 'engine%'"
CANDIDATES = [
    {"replica": f"gpu-{n}", "running": 4 + n, "waiting_tokens": 1040 * n, "hit_tokens": 800, "cost": 1240.5 + n}
    for n in range(8)
]
REPEAT = """
insert into telemetry_reading ({columns}) select {values} from telemetry_reading,
    generate_series(1, %(times)s) number where at > %(start)s and at <= %(end)s
"""


class Stored(NamedTuple):
    """What one table stores of one object."""

    name: str
    rows_a_day: float
    row_bytes: float
    days: float  # that they are kept by default

    @property
    def day_bytes(self) -> float:
        return self.rows_a_day * self.row_bytes


def main(_stand: Stand) -> None:
    with stand_in_replicas() as port:
        fill(port, hours=HOURS)
        lines = [
            *table("a replica with one engine", readings("telemetry_reading", ENGINES, POOLS * REPLICAS, HOURS)),
            *table("a task group at one replica", readings("telemetry_routerreading", ROUTERS, POOLS * GROUPS, HOURS)),
            *table("a request a second", decisions(DECISIONS)),
            *changes(CHANGES),
        ]
    print("\n".join(lines))


def table(title: str, tables: Sequence[Stored]) -> list[str]:
    return [
        f"{title + ':':34}{'rows a day':>12}{'bytes a row':>13}{'MB a day':>10}{'days':>6}{'MB kept':>9}",
        *(_line(row.name, row.rows_a_day, row.row_bytes, row.day_bytes, row.days) for row in tables),
        f"  {'all':32}{'':>25}{_mega(sum(row.day_bytes for row in tables)):>10}{'':>6}"
        f"{_mega(sum(row.day_bytes * row.days for row in tables)):>9}\n",
    ]


def _line(name: str, rows: float, row_bytes: float, day_bytes: float, days: float) -> str:
    return f"  {name:32}{rows:12,.0f}{row_bytes:13,.0f}{_mega(day_bytes):>10}{days:6.0f}{_mega(day_bytes * days):>9}"


def _mega(count: float) -> str:
    return f"{count / 1e6:,.2f}"


# --- readings and their rollups --------------------------------------------------------------------------------


def fill(port: int, *, hours: int) -> None:
    """Readings of the first hours of the newest complete bin of 6 hours, rolled up to all resolutions."""
    from telemetry.storage.rollup import roll_up
    from tests.fleet_history import warm_fleet

    now = datetime.now(UTC)
    bin_s = max(RESOLUTIONS.values())
    end = datetime.fromtimestamp(now.timestamp() // bin_s * bin_s - bin_s, UTC) + timedelta(hours=hours)
    for number in range(POOLS):
        warm_fleet(end, seconds=hours * 3600, replicas=REPLICAS, number=number)
    _replace_readings(port, end, hours)
    roll_up(now, readings_retention_s=86_400, budget_s=120)


def _replace_readings(port: int, end: datetime, hours: int) -> None:
    """Scrape the stand-ins for two minutes from the start of the window, and repeat what that stored."""
    from django.db import connection

    from controlplane.models import Replica, Router
    from telemetry.models import Reading, ScrapeState
    from telemetry.scraping.cycle import Shard, scrape_shard

    start = end - timedelta(hours=hours)
    Reading.objects.all().delete()
    ScrapeState.objects.all().delete()
    Router.objects.update(lost_at=end)  # it does not run
    for number, replica in enumerate(Replica.objects.all(), start=1):
        Replica.objects.filter(pk=replica.pk).update(url=f"http://127.0.1.{number}:{port}")
    for cycle in range(CYCLES + 1):
        scrape_shard(Shard(0, 1), (start + timedelta(seconds=EVERY_S * cycle)).timestamp())
    if Reading.objects.filter(state="ok").count() != CYCLES * POOLS * REPLICAS:
        raise AssertionError("a scrape failed")
    Reading.objects.filter(state="first").delete()  # it belongs to the time before
    names = [field.column for field in Reading._meta.fields if field.column not in {None, "at"}]
    statement = REPEAT.format(
        columns=", ".join(["at", *names]),
        values=", ".join([f"at + number * interval '{CYCLES * EVERY_S} s'", *names]),
    )
    window = {"start": start, "end": start + timedelta(seconds=CYCLES * EVERY_S)}
    with connection.cursor() as cursor:
        cursor.execute(statement, window | {"times": hours * 3600 // (CYCLES * EVERY_S) - 1})


def readings(parent: str, kinds: str, objects: int, hours: int) -> list[Stored]:
    """The tables of readings and of each resolution, for each of some objects."""
    from django.conf import settings

    found = [_stored(parent, "true", objects * hours / 24, settings.READINGS_RETENTION_DAYS)]
    for suffix, resolution_s in RESOLUTIONS.items():
        days, part_of_day = settings.ROLLUP_RETENTION_DAYS[resolution_s], max(hours, resolution_s / 3600) / 24
        found.append(_stored(f"{parent}_{suffix}", "true", objects * part_of_day, days))
        found.append(_stored(f"telemetry_histogram_{suffix}", kinds, objects * part_of_day, days))
    return found


def _stored(parent: str, condition: str, object_days: float, days: float) -> Stored:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(f"select count(*), count(*) filter (where {condition}) from {parent}")
        every, rows = cursor.fetchone()
    if not rows:
        raise AssertionError(f"nothing is stored in {parent}")
    return Stored(parent.removeprefix("telemetry_"), rows / object_days, bytes_of(parent) / every, days)


def bytes_of(parent: str) -> int:
    """Bytes of a partitioned table with indexes and TOAST, less those of its empty partitions."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(f"create temporary table pristine (like {parent} including all)")
        cursor.execute(
            "select sum(pg_total_relation_size(inhrelid) - pg_total_relation_size('pristine'))"
            " from pg_inherits where inhparent = %s::regclass",
            [parent],
        )
        (size,) = cursor.fetchone()
        cursor.execute("drop table pristine")
    return int(size)


# --- decisions -------------------------------------------------------------------------------------------------


def decisions(count: int) -> list[Stored]:
    """What a day with one request a second stores: rows, and for a part of them what explains them."""
    from django.conf import settings

    from telemetry.scraping.decision_records import CANDIDATES_PER_S
    from tests.telemetry.lint.prompts import alternating, message, prose, rules, structure_document

    plain = _added_bytes(count, {})
    explained = _added_bytes(count, {"candidates": CANDIDATES})
    turns = alternating(*(prose(seed, 12) for seed in range(6)))
    document = structure_document({"model": "m", "messages": [message("system", rules()), *turns]})
    described = _added_bytes(count // 4, {"candidates": CANDIDATES, "prompt_structure": document})
    days, seconds = settings.DECISIONS_RETENTION_H / 24, 86_400
    rows = [
        ("decision", 1.0, plain),
        (
            f"candidates (at most {CANDIDATES_PER_S:.0f}/s)",
            min(1.0, CANDIDATES_PER_S / DECISIONS_PER_S),
            explained - plain,
        ),
        (f"structures (at most {GROUPS}/s)", GROUPS / DECISIONS_PER_S, described - explained),
    ]
    return [Stored(name, seconds * share, size, days) for name, share, size in rows]


def _added_bytes(count: int, more: dict[str, object]) -> float:
    """Bytes of each of some decisions, which are stored on a day of their own."""
    from telemetry.models import Decision
    from telemetry.scraping.decision_records import sample_ratio
    from telemetry.storage.partitions import ensure_days
    from tests.telemetry.lab.traces import sampled, traffic
    from tests.telemetry.stored_decisions import a_router, decision

    before = bytes_of("telemetry_decision")
    start = datetime(2031, 3, 4, 12, tzinfo=UTC) + timedelta(
        days=Decision.objects.values("at__date").distinct().count()
    )
    ensure_days([start.date()])
    requests, router = traffic(count, sessions=300, placed="random"), a_router("router-d")
    ratio = sample_ratio(sum(one.block_count for one in requests) / (count / DECISIONS_PER_S), BLOCKS_PER_S)
    Decision.objects.bulk_create(
        [
            decision(
                router,
                start + timedelta(seconds=seq / DECISIONS_PER_S),
                seq,
                blocks=[block >> 1 for block in one.blocks],
                positions=one.positions,
                block_count=one.block_count,
                sample_ratio=ratio,
                **more,
            )
            for seq, one in enumerate(sampled(requests, ratio))
        ]
    )
    return (bytes_of("telemetry_decision") - before) / count


# --- changes of the configuration ------------------------------------------------------------------------------


def changes(count: int) -> list[str]:
    """Bytes that a change of the fleet, here of a replica's state, adds for ever, and of which the snapshot is most."""
    from django.db.models import Avg
    from django.db.models.functions import Length

    from controlplane.models import AuditEntry, ConfigSnapshot, Event, Replica, ReplicaState
    from controlplane.services.fleet.replicas import set_replica_state

    kept = {model._meta.db_table: model for model in (ConfigSnapshot, Event, AuditEntry)}
    before = {table: (table_bytes(table), model.objects.count()) for table, model in kept.items()}
    replica = Replica.objects.get(name="gpu-1")
    for number in range(count):
        set_replica_state(replica, ReplicaState.ACTIVE if number % 2 else ReplicaState.DRAINING)
        replica.refresh_from_db()
    lines = [f"{f'a change, {Replica.objects.count()} replicas:':34}{'rows':>12}{'bytes':>13}"]
    for table, model in kept.items():
        size, rows = before[table]
        lines.append(
            f"  {table:32}{(model.objects.count() - rows) / count:12.1f}{(table_bytes(table) - size) / count:13,.0f}"
        )
    sent = ConfigSnapshot.objects.aggregate(mean=Avg(Length("encrypted")))["mean"]
    return [*lines, f"  the configuration, encrypted{sent / Replica.objects.count():>31,.0f} bytes a replica"]


def table_bytes(name: str) -> int:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("select pg_total_relation_size(%s::regclass)", [name])
        return int(cursor.fetchone()[0])
