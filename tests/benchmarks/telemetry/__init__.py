"""What telemetry costs: ``python -m tests.benchmarks telemetry [--scrape] [--decisions] [--pages] [--storage]``.

``--scrape``: a real worker on one core scrapes 1,000 stand-in replicas every 10 s; ``--decisions``: a
replay's queries; ``--pages``: pages and ``/metrics`` by size of the fleet; ``--storage``: rows and bytes in PostgreSQL.
Uses a separate PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from tests.benchmarks.telemetry.stand import standing

PARTS = ("scrape", "decisions", "pages", "storage")


def main(options: Sequence[str] = ()) -> None:
    """Print the chosen tables, or all."""
    with standing(broker=True) as stand:
        for name in [part for part in PARTS if f"--{part}" in options] or PARTS:
            stand.empty()
            import_module(f"{__name__}.{name}").main(stand)
