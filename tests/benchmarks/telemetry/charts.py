"""A page's queries for 200 replicas over an hour and 30 days, and the cost of rolling up their readings."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from tests.benchmarks.telemetry.stand import server_s, standing

if TYPE_CHECKING:
    from telemetry.metrics.windows import Window

REPLICAS = 200
EVERY_S = 5
DAYS = 30
ROUNDS = 15
GOALS_MS = {"1 h": 50, "30 d": 150}


class Cost(NamedTuple):
    best_ms: float
    cpu_ms: float  # of this process and of the database


READINGS = """
insert into telemetry_reading (at, replica_id, model, engine, state, interval_s, queries, hits, external_hits,
    prompt_tokens, finished, first_tokens, running, waiting, kv_usage_ratio, not_reported, ttft_layout_id, ttft_at,
    ttft_counts, ttft_sum_s, itl_layout_id, itl_at, itl_counts, itl_sum_s)
select at, replica, 'tiny', '0', 'ok', %(every)s, 5000 + replica, 3000, 0, 5000, 4, 4, 3, 0, 0.5, '{}',
    %(layout)s, '{3,4,5,6,7,8,9,10}', array[1,2,3,4,5,6,7,replica], 9.5, %(layout)s, '{1,2,3,4}', '{9,8,7,6}', 0.5
from generate_series(%(start)s::timestamptz, %(end)s, make_interval(secs => %(every)s)) at,
    unnest(%(replicas)s::bigint[]) replica
"""
HOURS = """
insert into telemetry_reading_1h (at, replica_id, model, engine, scrapes, stale_scrapes, covered_s, queries, hits,
    external_hits, not_reported, running_sum, running_n, waiting_sum, waiting_n, kv_usage_ratio_sum, kv_usage_ratio_n,
    prompt_tokens, finished, first_tokens)
select at, replica, 'tiny', '0', 720, 0, 3600, 720 * (5000 + replica), 720 * 3000, 0, false, 2160, 720, 0, 720, 360,
    720, 720 * 5000, 720 * 4, 720 * 4
from generate_series(%(start)s::timestamptz, %(end)s, interval '1 hour') at, unnest(%(replicas)s::bigint[]) replica;
insert into telemetry_histogram_1h (at, kind, pool, part, reuse, layout_id, positions, counts, sum_s)
select at, kind, 'default', part, '', %(layout)s, '{3,4,5,6,7,8,9,10}', '{1,2,3,4,5,6,7,8}', 9.5
from generate_series(%(start)s::timestamptz, %(end)s, interval '1 hour') at,
    (select 'engine_ttft', replica::text from unnest(%(replicas)s::bigint[]) replica
     union all select 'engine_ttft_pool', '') kinds(kind, part)
"""


def main() -> None:
    with standing():
        now = datetime.now().astimezone()
        rollup_line = _fill(now)
        print("\n".join([rollup_line, *table(_charts(now))]))


def table(measured: dict[str, dict[str, Cost]]) -> list[str]:
    names = list(measured[next(iter(measured))])
    head = "  ".join(f"{key} (goal {goal} ms)".rjust(18) for key, goal in GOALS_MS.items())
    title = f"{REPLICAS} replicas, a service call with its queries: minimum of {ROUNDS} (mean CPU of both sides)"
    return [
        title,
        f"{'':26}{head}",
        *(f"  {name:24}" + "  ".join(_cell(measured[key][name]) for key in GOALS_MS) for name in names),
    ]


def _cell(cost: Cost) -> str:
    return f"{cost.best_ms:8.1f} ({cost.cpu_ms:5.1f}) ms"


def _charts(now: datetime) -> dict[str, dict[str, Cost]]:
    from telemetry.metrics.windows import Window, choose_step
    from telemetry.services.figures import series

    calls: dict[str, Callable[[Window], object]] = {
        "hit_rate_by_replica": lambda window: series.hit_rate_by_replica(None, window),
        "hit_rate_by_pool": lambda window: series.hit_rate_by_pool(None, window),
        "hit_rate_by_group": lambda window: series.hit_rate_by_group(None, window),
        "ttft_quantiles": lambda window: series.ttft_quantiles(None, window),
        "utilization_by_replica": lambda window: series.utilization_by_replica(None, window),
    }
    windows = {}
    for key, seconds in {"1 h": 3600, "30 d": DAYS * 86_400}.items():  # the windows of pages: telemetry.web.ranges
        windows[key] = Window.last(seconds, until=now, step_s=choose_step(seconds, points=100))
    return {key: {name: _measure(call, window) for name, call in calls.items()} for key, window in windows.items()}


def _measure(call: Callable[[Window], object], window: Window) -> Cost:
    """CPU time; wall time would include other processes."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("set max_parallel_workers_per_gather = 0")  # the CPU of parallel workers would not be counted
    call(window)
    elapsed_s, cpu_s = [], time.process_time() + server_s()
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call(window)
        elapsed_s.append(time.perf_counter() - started)
    return Cost(1000 * min(elapsed_s), 1000 * (time.process_time() + server_s() - cpu_s) / ROUNDS)


def _fill(now: datetime) -> str:
    """Two hours of readings, and hourly rollups of the 30 days before by SQL."""
    from django.db import connection

    from controlplane.models import Pool, Replica
    from controlplane.services.fleet.pools import create_pool
    from telemetry.models import RollupState
    from telemetry.storage.partitions import ensure_days, ensure_rollups
    from telemetry.storage.rollup import roll_up
    from telemetry.storage.store import layout_ids

    create_pool("default")
    pool = Pool.objects.get()
    rows = [Replica(pool=pool, name=f"r{n:03}", url=f"http://127.0.0.1:{n + 1}") for n in range(REPLICAS)]
    replicas = [replica.pk for replica in Replica.objects.bulk_create(rows)]
    edges = tuple(0.01 * 1.5**n for n in range(22))
    start = (now - timedelta(hours=2)).replace(minute=0, second=0, microsecond=0)
    values = {"layout": layout_ids([edges])[edges], "replicas": replicas, "every": EVERY_S}
    ensure_days({start.date(), now.date()})
    month_ago = start - timedelta(days=DAYS + 1)
    ensure_rollups(3600, month_ago, now)
    with connection.cursor() as cursor:
        cursor.execute(READINGS, values | {"start": start + timedelta(seconds=EVERY_S), "end": now})
        started_s = time.perf_counter()
        roll_up(now, readings_retention_s=86_400, budget_s=120)
        took_s = time.perf_counter() - started_s
        for statement in HOURS.split(";"):
            cursor.execute(statement, values | {"start": month_ago, "end": start})
        roll_up(now, readings_retention_s=86_400, budget_s=120)
        cursor.execute("select count(*) from telemetry_reading")
        (count,) = cursor.fetchone()
        cursor.execute("analyze")
    reached = RollupState.objects.get(pk=60).rolled_through
    hours = (now - start).total_seconds() / 3600
    return (
        f"rolled up {count} readings ({REPLICAS} replicas, {hours:.1f} h) to 1 m, 5 m, 1 h and 6 h in {took_s:.1f} s: "
        f"{1e6 * took_s / count:.1f} us per reading; "
        f"the last {(now - reached).total_seconds():.0f} s are not rolled up yet\n"
    )
