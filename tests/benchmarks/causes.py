"""Whether the cause of a drop ranks first: ``python -m tests.benchmarks causes [--only TEXT] [--seeds COUNT]``.

Every incident of ``tests/telemetry/causes`` with several seeds, with the real placement, scraper, ladder and analysis
and a separate PostgreSQL. ``--only`` selects incidents whose description contains a text, such as the cause, or ";"
for those with a second event. Each is analysed without and with the hit-rate ladder. Goal: 9 of 10.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

FIRST_SEED = 2001  # judges were made with others
SEEDS = 3
GOAL = 0.9
Firsts = dict[tuple[str, str], tuple[Counter[str], Counter[str]]]  # what was named first, without a ladder and with one


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks causes")
    parser.add_argument("--only", default="", help="play the scenarios whose words hold this")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how often each is played, each time otherwise")
    given = parser.parse_args(arguments)
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings.test"
    from controlplane.stack.servers import EmbeddedPostgres
    from tests.conftest import running

    with tempfile.TemporaryDirectory(prefix="wpb-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        server = EmbeddedPostgres(folder / "postgres", folder / "pg")
        server.prepare()
        with running(server.child("fsync=off")):
            firsts, explained_ms = _played(server.socket_dir, given.only, range(FIRST_SEED, FIRST_SEED + given.seeds))
    _print(firsts, given.seeds, explained_ms)


def _print(firsts: Firsts, seeds: int, explained_ms: float) -> None:
    print(f"{'named first, of ' + str(seeds):<96} no ladder  ladder")
    for (kind, words), sides in firsts.items():
        others = ", ".join(f"{other} ({count})" for other, count in sum(sides, Counter()).items() if other != kind)
        print(f"{f'{kind}: {words}':<96} {sides[0][kind]:>9} {sides[1][kind]:>7}   {others}")
    total = seeds * len(firsts)
    for place, what in enumerate(("without a ladder", "with one")):
        right = sum(sides[place][kind] for (kind, _), sides in firsts.items())
        print(f"{what}: {right} of {total} named first ({right / max(total, 1):.0%}; goal {GOAL:.0%})")
    print(f"{explained_ms:.0f} ms to explain one")


def _played(socket_dir: Path, only: str, seeds: range) -> tuple[Firsts, float]:
    import django
    from django.conf import settings

    settings.DATABASES["default"]["HOST"] = str(socket_dir)
    settings.LOGGING = {}
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    from tests.telemetry.causes.fleet import SCRAPE_S
    from tests.telemetry.causes.scenarios import SCENARIOS

    settings.SCRAPE_INTERVAL_S = SCRAPE_S
    firsts: Firsts = defaultdict(lambda: (Counter(), Counter()))
    took_s, played = 0.0, 0
    for scenario in SCENARIOS:
        for seed in seeds if only in f"{scenario.kind}: {scenario.words}" else ():
            kinds, seconds = _first(scenario, seed)
            for side, kind in zip(firsts[scenario.kind, scenario.words], kinds, strict=True):
                side[kind] += 1
            took_s, played = took_s + seconds, played + 1
    return firsts, took_s / max(played, 1) * 1000


def _first(scenario: object, seed: int) -> tuple[tuple[str, str], float]:
    """(cause ranked first without a ladder, with one, seconds for the latter)."""
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
        begun = time.perf_counter()
        causes = explain_drop(pool, **when.as_spans())
        seconds = time.perf_counter() - begun
        transaction.set_rollback(True)
    found = [named[0].kind if named else "nothing" for named in (without, causes)]
    return (found[0], found[1]), seconds
