"""Alerting as a classifier: ``python -m tests.benchmarks alerts [--seeds COUNT] [--only KIND] [--weeks COUNT]``.

Incidents of 13 kinds on three shapes of traffic, seeded, in a stand-in fleet of the router's own placement and
modelled engines (incidents.py, fleet.py). The real detector runs on their bins and the real cause analysis on the
data telemetry would hold (classifier.py). Quiet pool-weeks come from a cheaper generator (quiet.py). Detector and
cause analysis were tuned on seeds from ``TUNING_SEED`` on; the figures are those of seeds from ``FIRST_SEED`` on.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

TUNING_SEED, FIRST_SEED = 3001, 9001
SEEDS, WEEKS = 2, 30


def main(arguments: Sequence[str] = ()) -> None:
    """Print the table and whether the goals are met."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks alerts")
    parser.add_argument("--only", default="", help="play the kinds whose names contain this text")
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help="number of seeds with which each kind is played on each shape"
    )
    parser.add_argument("--weeks", type=int, default=WEEKS, help="quiet pool-weeks")
    parser.add_argument(
        "--first-seed",
        type=int,
        default=FIRST_SEED,
        help=f"first seed; the detector was tuned on seeds from {TUNING_SEED} on",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--verbose", action="store_true", help="print each incident")
    options = parser.parse_args(arguments)
    set_up()
    from tests.benchmarks.alerts.classifier import play_and_judge
    from tests.benchmarks.alerts.incidents import INCIDENTS, SHAPES
    from tests.benchmarks.alerts.quiet import alarms_in_week
    from tests.benchmarks.alerts.table import print_goals, print_table

    started = time.perf_counter()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    chosen = [
        (number, shape, seed)
        for number, incident in enumerate(INCIDENTS)
        for shape in range(len(SHAPES) if options.only in incident.kind else 0)
        for seed in seeds
    ]
    outcomes = []
    with ProcessPoolExecutor(options.jobs, initializer=set_up) as pool:
        played = pool.map(play_and_judge, *zip(*chosen, strict=True)) if chosen else ()
        weeks = pool.map(alarms_in_week, range(options.first_seed, options.first_seed + options.weeks))
        for (_, shape, seed), outcome in zip(chosen, played, strict=True):
            outcomes.append(outcome)
            if options.verbose:
                print(SHAPES[shape].name, seed, outcome, flush=True)
        alarms = list(weeks)
    print_table(outcomes)
    print_goals(outcomes, alarms)
    print(f"{time.perf_counter() - started:.0f} s")


def set_up() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings.test"
    import django

    django.setup()
