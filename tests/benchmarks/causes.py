"""Whether the cause of a drop ranks first: ``python -m tests.benchmarks causes [--only TEXT] [--seeds COUNT]``.

Every incident of ``tests/telemetry/causes`` with several seeds, with the real placement, scraper, breakdown and
analysis and a separate PostgreSQL. ``--only`` selects incidents whose description contains a text, such as the cause,
or ";" for those with a second event. Each is analysed without and with the hit-rate breakdown. Goal: 9 of 10.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.benchmarks.telemetry.stand import standing

FIRST_SEED = 2001  # the cause analysis was tuned on other seeds
SEEDS = 3
GOAL = 0.9
TopCauses = dict[
    tuple[str, str], tuple[Counter[str], Counter[str]]
]  # first-ranked causes, without and with a breakdown


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks causes")
    parser.add_argument("--only", default="", help="play the scenarios whose description contains this text")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds with which each scenario is played")
    options = parser.parse_args(arguments)
    with standing():
        top_causes, explain_ms = _play_all(options.only, range(FIRST_SEED, FIRST_SEED + options.seeds))
    _print(top_causes, options.seeds, explain_ms)


def _print(top_causes: TopCauses, seeds: int, explain_ms: float) -> None:
    print(f"{'ranked first, of ' + str(seeds):<96} no breakdown  breakdown")
    for (kind, description), counts in top_causes.items():
        others = ", ".join(f"{other} ({count})" for other, count in sum(counts, Counter()).items() if other != kind)
        print(f"{f'{kind}: {description}':<96} {counts[0][kind]:>9} {counts[1][kind]:>7}   {others}")
    total = seeds * len(top_causes)
    for index, variant in enumerate(("without a breakdown", "with a breakdown")):
        right = sum(counts[index][kind] for (kind, _), counts in top_causes.items())
        print(f"{variant}: {right} of {total} ranked first ({right / max(total, 1):.0%}; goal {GOAL:.0%})")
    print(f"{explain_ms:.0f} ms to explain one drop")


def _play_all(only: str, seeds: range) -> tuple[TopCauses, float]:
    from django.conf import settings

    from tests.telemetry.causes.fleet import SCRAPE_S
    from tests.telemetry.causes.scenarios import SCENARIOS

    settings.SCRAPE_INTERVAL_S = SCRAPE_S
    top_causes: TopCauses = defaultdict(lambda: (Counter(), Counter()))
    explain_s, played = 0.0, 0
    for scenario in SCENARIOS:
        for seed in seeds if only in f"{scenario.kind}: {scenario.words}" else ():
            kinds, seconds = _top_causes(scenario, seed)
            for counter, kind in zip(top_causes[scenario.kind, scenario.words], kinds, strict=True):
                counter[kind] += 1
            explain_s, played = explain_s + seconds, played + 1
    return top_causes, explain_s / max(played, 1) * 1000


def _top_causes(scenario: object, seed: int) -> tuple[tuple[str, str], float]:
    """((cause ranked first without a breakdown, cause with a breakdown), seconds for the analysis with a breakdown)."""
    import time_machine
    from django.db import transaction

    from controlplane.services.fleet.pools import create_pool
    from telemetry.services.alerts.explanations import explain_drop
    from telemetry.services.lab.replays import replay_pool
    from tests.telemetry.causes.fleet import T0
    from tests.telemetry.causes.scenarios import LONG_S, Scenario, play

    assert isinstance(scenario, Scenario)
    with transaction.atomic(), time_machine.travel(T0, tick=False) as traveller:
        pool = create_pool("chat")
        when = play(scenario, seed, pool, traveller.move_to, LONG_S)
        without = explain_drop(pool, **when.as_spans())
        replay_pool(pool, when.end)
        started = time.perf_counter()
        causes = explain_drop(pool, **when.as_spans())
        seconds = time.perf_counter() - started
        transaction.set_rollback(True)
    first_kinds = [ranked[0].kind if ranked else "nothing" for ranked in (without, causes)]
    return (first_kinds[0], first_kinds[1]), seconds
