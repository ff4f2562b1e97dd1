"""Whether the cause of a drop is named first: ``python -m tests.benchmarks causes``.

Every drama of ``tests/telemetry/causes`` over several seeds, with the real placement, scraper, ladder and judges
and a PostgreSQL of its own. Goal: 9 of 10.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

SEEDS = range(1, 4)
GOAL = 0.9


def main() -> None:
    """Print the table."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings.test"
    from controlplane.stack.postgres import EmbeddedPostgres
    from tests.conftest import running

    with tempfile.TemporaryDirectory(prefix="wpb-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        server = EmbeddedPostgres(folder / "postgres", folder / "pg")
        server.prepare()
        with running(server.child("fsync=off")):
            named, explained_ms = _played(server.socket_dir)
    print(f"{'what happened':<62} named first, of {len(SEEDS)}")
    for drama, firsts in named.items():
        others = ", ".join(f"{kind} ({count})" for kind, count in firsts.items() if kind != drama[0])
        print(f"{f'{drama[0]}: {drama[1]}':<62} {firsts[drama[0]]:>3}   {others}")
    right = sum(firsts[drama[0]] for drama, firsts in named.items())
    total = sum(map(sum, (firsts.values() for firsts in named.values())))
    print(
        f"\n{right} of {total} named first ({right / total:.0%}; goal {GOAL:.0%}), {explained_ms:.0f} ms to explain one"
    )


def _played(socket_dir: Path) -> tuple[dict[tuple[str, str], Counter[str]], float]:
    import django
    from django.conf import settings

    settings.DATABASES["default"]["HOST"] = str(socket_dir)
    settings.LOGGING = {}
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    from tests.telemetry.causes.dramas import DRAMAS
    from tests.telemetry.causes.fleet import SCRAPE_S

    settings.SCRAPE_INTERVAL_S = SCRAPE_S
    named: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    took_s = 0.0
    for drama in DRAMAS:
        for seed in SEEDS:
            kind, seconds = _first(drama, seed)
            named[drama.kind, drama.variation][kind] += 1
            took_s += seconds
    return named, took_s / len(DRAMAS) / len(SEEDS) * 1000


def _first(drama: object, seed: int) -> tuple[str, float]:
    """The kind named first, and how long that took."""
    import time_machine
    from django.db import transaction

    from controlplane.services.fleet.pools import create_pool
    from telemetry.services.alerts.causes import explain_drop
    from telemetry.services.lab.replays import replay_pool
    from tests.telemetry.causes.dramas import LONG_S, Drama, play
    from tests.telemetry.causes.fleet import T0

    assert isinstance(drama, Drama)
    with transaction.atomic(), time_machine.travel(T0, tick=False) as traveller:
        pool = create_pool("chat")
        when = play(drama, seed, pool, traveller.move_to, LONG_S)
        replay_pool(pool, when.end)
        begun = time.perf_counter()
        causes = explain_drop(pool, **when.as_spans())
        seconds = time.perf_counter() - begun
        transaction.set_rollback(True)
    return causes[0].kind if causes else "nothing", seconds
