"""What telemetry costs: ``python -m tests.benchmarks telemetry [--scrape] [--charts] [--decisions]``.

``--scrape``: a real worker on one core scrapes 1,000 stand-in replicas every 10 s; ``--charts``: a page's queries for
200 replicas; ``--decisions``: a replay's queries. Uses a separate PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.telemetry import charts, decisions, scrape

PARTS = {"scrape": scrape.main, "charts": charts.main, "decisions": decisions.main}


def main(options: Sequence[str] = ()) -> None:
    """Print the chosen tables, or all."""
    chosen = [name for name in PARTS if f"--{name}" in options] or list(PARTS)
    for name in chosen:
        PARTS[name]()
