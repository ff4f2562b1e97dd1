"""Goals that need long runs or large numbers: ``make bench-soak``, ``python -m tests.benchmarks soak [--only ROW
...]``.

Each row prints its findings and WRONG where a condition fails; then the exit status is 1. By default each takes about
a minute. The goals' own sizes are options, and ``--full`` sets them all: 1,000 kills during a write (R2), 500 process
kills (R6), 100,000 aborts (R9), 20 kills of the broker and an hour without it (R12, R13), 50 restarts and kills of
PostgreSQL (R15), 1,000 killed deliveries (R16), 50 million prefixes (R21), 10 million rows under migrations (R22),
5,000 streams, and longer times.
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
    database,
    illnesses,
    kills,
    migrations,
    outbox,
    overload,
    prefixes,
    streams,
)
from tests.benchmarks.soak.verdict import Verdict

Row = Callable[[Verdict, argparse.Namespace], Coroutine[Any, Any, None] | None]

ROWS: dict[str, Row] = {
    "R2": lambda verdict, given: config_file.measure(verdict, given.file_kills, given.seed),
    "R6": lambda verdict, given: kills.measure(verdict, given.kills, given.seed),
    "R8": lambda verdict, given: illnesses.measure(verdict, given.seconds, given.seed),
    "R9": lambda verdict, given: aborts.measure(verdict, given.aborts, given.seed),
    "R10": lambda verdict, given: overload.measure(verdict, given.overload_seconds),
    "R12": lambda verdict, given: broker.measure_kills(verdict, given.broker_kills, given.seed),
    "R13": lambda verdict, given: broker.measure_long(verdict, given.broker_seconds),
    "R14": lambda verdict, _: broker.measure_flushes(verdict),
    "R15": lambda verdict, given: database.measure(verdict, given.restarts, given.seed),
    "R16": lambda verdict, given: outbox.measure(verdict, given.deliveries, given.seed),
    "R21": lambda verdict, given: prefixes.measure(verdict, given.prefixes),
    "R22": lambda verdict, given: migrations.measure(verdict, given.rows),
    "streams": lambda verdict, given: streams.measure(verdict, given.streams, given.stream_seconds),
}
OPTIONS: tuple[tuple[str, type[int | float], float, float, str], ...] = (  # name, type, default, full, help
    ("--seconds", float, 180.0, 1800.0, "how long replicas fall ill (R8)"),
    ("--file-kills", int, 200, 1000, "writers of the last known good file that are killed (R2)"),
    ("--kills", int, 50, 500, "processes that are killed with requests in their hands (R6)"),
    ("--aborts", int, 20_000, 100_000, "clients that go away (R9)"),
    ("--broker-kills", int, 3, 20, "kills of the broker, which is away for 8 to 60 s each time (R12)"),
    ("--broker-seconds", float, 60.0, 3600.0, "how long the broker is unavailable (R13)"),
    ("--restarts", int, 6, 50, "restarts and kills of PostgreSQL (R15)"),
    ("--deliveries", int, 200, 1000, "messages whose delivering process is killed (R16)"),
    ("--overload-seconds", float, 40.0, 240.0, "how long there is too much to do, the peak included (R10)"),
    ("--prefixes", int, 8_000_000, 50_000_000, "prefixes that nobody has seen before (R21)"),
    ("--rows", int, 200_000, 10_000_000, "of each table that is migrated while it is read and written (R22)"),
    ("--streams", int, 2000, 5000, "streams at once"),
    ("--stream-seconds", float, 20.0, 60.0, "how long they go on"),
)


def measure(given: argparse.Namespace) -> list[str]:
    """Run the chosen rows; what failed."""
    wrong: list[str] = []
    for name in given.only or ROWS:
        verdict, begun = Verdict(name), time.monotonic()
        try:
            running = ROWS[name](verdict, given)
            if running is not None:
                uvloop.run(running)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - the other rows still have something to say
            verdict.holds("ended by", repr(error), well=False)
        verdict.say("took", f"{time.monotonic() - begun:.0f} s")
        wrong += verdict.wrong
    return wrong


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parsed options, with ``--full`` applied to those not given."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks soak", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument(
        "--full", action="store_true", help="the goals' own figures, two and a half hours in all, an hour of it R13"
    )
    parser.add_argument("--seed", type=int, default=1)
    for name, kind, default, full, text in OPTIONS:
        parser.add_argument(name, type=kind, help=f"{text} (default: {default:,g}; full: {full:,g})")
    given = parser.parse_args(arguments)
    for name, _, default, full, _ in OPTIONS:
        field = name.removeprefix("--").replace("-", "_")
        if getattr(given, field) is None:
            setattr(given, field, full if given.full else default)
    return given


def main(arguments: Sequence[str] = ()) -> None:
    """Print the rows; exit status 1 if a condition fails."""
    wrong = measure(parsed(arguments))
    print("\n" + ("\n".join(wrong) if wrong else "all is as it must be"))
    if wrong:
        raise SystemExit(1)
