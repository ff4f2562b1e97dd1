"""Goals that need long runs or large numbers: ``make bench-soak``, ``python -m tests.benchmarks soak [--only ROW
...]``.

Each row prints its results, and WRONG where a condition fails; the exit status is then 1. By default each takes about
a minute. The full sizes of the goals are options, and ``--full`` sets them all: 1,000 kills during a write, 500
process kills, 100,000 aborts, 20 kills of the broker and an hour without it, 50 restarts and kills of PostgreSQL,
1,000 killed deliveries, 50 million prefixes, 10 million rows under migrations, ten minutes of faults of KV event
streams, as long of shared state and of replicas killed while they stream, 5,000 streams, and longer times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import uvloop

from tests.benchmarks.soak import (
    aborts,
    broker,
    config_file,
    continued,
    database,
    event_faults,
    fairness,
    illnesses,
    kills,
    migrations,
    outbox,
    overload,
    prefixes,
    shared_state,
    streams,
)
from tests.benchmarks.soak.verdict import Verdict

Row = Callable[[Verdict, argparse.Namespace], Coroutine[Any, Any, None] | None]

ROWS: dict[str, Row] = {
    "config_file": lambda verdict, options: config_file.measure(verdict, options.file_kills, options.seed),
    "kills": lambda verdict, options: kills.measure(verdict, options.kills, options.seed),
    "failures": lambda verdict, options: illnesses.measure(verdict, options.seconds, options.seed),
    "continued": lambda verdict, options: continued.measure(verdict, options.continued_seconds),
    "aborts": lambda verdict, options: aborts.measure(verdict, options.aborts, options.seed),
    "overload": lambda verdict, options: overload.measure(verdict, options.overload_seconds),
    "fairness": lambda verdict, options: fairness.measure(verdict, options.fair_seconds),
    "broker_kills": lambda verdict, options: broker.measure_kills(verdict, options.broker_kills, options.seed),
    "broker_outage": lambda verdict, options: broker.measure_long(verdict, options.broker_seconds),
    "broker_flushes": lambda verdict, _: broker.measure_flushes(verdict),
    "database": lambda verdict, options: database.measure(verdict, options.restarts, options.seed),
    "deliveries": lambda verdict, options: outbox.measure(verdict, options.deliveries, options.seed),
    "prefixes": lambda verdict, options: prefixes.measure(verdict, options.prefixes),
    "migrations": lambda verdict, options: migrations.measure(verdict, options.rows),
    "events": lambda verdict, options: event_faults.measure(verdict, options.event_seconds, options.seed),
    "sharing": lambda verdict, options: shared_state.measure(verdict, options.sharing_seconds, options.seed),
    "streams": lambda verdict, options: streams.measure(verdict, options.streams, options.stream_seconds),
}
OPTIONS: tuple[tuple[str, type[int | float], float, float, str], ...] = (  # name, type, default, full, help
    ("--seconds", float, 180.0, 1800.0, "how long replicas fail in turn"),
    ("--file-kills", int, 200, 1000, "writers of the last known good file that are killed"),
    ("--kills", int, 50, 500, "replica processes that are killed while they hold requests"),
    ("--continued-seconds", float, 60.0, 600.0, "how long replicas are killed while they stream"),
    ("--aborts", int, 20_000, 100_000, "clients that disconnect"),
    ("--broker-kills", int, 3, 20, "kills of the broker, which is away for 8 to 60 s each time"),
    ("--broker-seconds", float, 60.0, 3600.0, "how long the broker is unavailable"),
    ("--restarts", int, 6, 50, "restarts and kills of PostgreSQL"),
    ("--deliveries", int, 200, 1000, "messages whose delivering process is killed"),
    ("--overload-seconds", float, 40.0, 240.0, "duration of the overload, the peak included"),
    ("--fair-seconds", float, 20.0, 60.0, "duration of each load with a hostile tenant and without it"),
    ("--prefixes", int, 8_000_000, 50_000_000, "distinct prefixes"),
    ("--rows", int, 200_000, 10_000_000, "rows of each table that is migrated while it is read and written"),
    ("--event-seconds", float, 60.0, 600.0, "how long KV event streams are killed, stalled and corrupted"),
    ("--sharing-seconds", float, 60.0, 600.0, "how long the shared state of routers is cut, disturbed and missed"),
    ("--streams", int, 2000, 5000, "streams at once"),
    ("--stream-seconds", float, 20.0, 60.0, "duration of the streams"),
)


def measure(options: argparse.Namespace) -> list[str]:
    """Run the chosen rows; the failed conditions."""
    failures: list[str] = []
    for name in options.only or ROWS:
        verdict, started = Verdict(name), time.monotonic()
        try:
            running = ROWS[name](verdict, options)
            if running is not None:
                uvloop.run(running)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - run the other rows all the same
            verdict.check("ended by", repr(error), passed=False)
        verdict.report("took", f"{time.monotonic() - started:.0f} s")
        failures += verdict.failures
    return failures


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parsed options, with ``--full`` applied to those not options."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks soak", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument(
        "--full",
        action="store_true",
        help="the full sizes of the goals: two and a half hours in all, one of them without the broker",
    )
    parser.add_argument("--seed", type=int, default=1)
    for name, kind, default, full, text in OPTIONS:
        parser.add_argument(name, type=kind, help=f"{text} (default: {default:,g}; full: {full:,g})")
    options = parser.parse_args(arguments)
    for name, _, default, full, _ in OPTIONS:
        field = name.removeprefix("--").replace("-", "_")
        if getattr(options, field) is None:
            setattr(options, field, full if options.full else default)
    return options


def main(arguments: Sequence[str] = ()) -> None:
    """Print the rows; exit status 1 if a condition fails."""
    failures = measure(parse_options(arguments))
    print("\n" + ("\n".join(failures) if failures else "all conditions hold"))
    if failures:
        raise SystemExit(1)
