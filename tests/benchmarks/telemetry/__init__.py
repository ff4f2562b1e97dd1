"""What telemetry costs: ``python -m tests.benchmarks telemetry [--scrape] [--charts] [--decisions]``.

``--scrape``: a real worker, held to one core, scrapes 1,000 stand-in replicas every 10 s; ``--charts``: what a page
asks of 200 replicas; ``--decisions``: what a replay reads. Everything runs against a PostgreSQL of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.telemetry import charts, decisions, scrape

PARTS = {"scrape": scrape.main, "charts": charts.main, "decisions": decisions.main}


def main(options: Sequence[str] = ()) -> None:
    """Print the tables of the parts that are named (``--scrape``), or of all."""
    chosen = [name for name in PARTS if f"--{name}" in options] or list(PARTS)
    for name in chosen:
        PARTS[name]()
