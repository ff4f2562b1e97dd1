"""What telemetry costs: ``python -m tests.benchmarks telemetry [--scrape] [--charts] [--decisions] [--pages]
[--storage] [--outbox]``.

``--scrape``: a real worker on one core scrapes 1,000 stand-in replicas every 10 s; ``--charts``: a page's queries for
200 replicas; ``--decisions``: a replay's queries; ``--pages``: pages and ``/metrics`` by size of the fleet;
``--storage``: rows and bytes in PostgreSQL; ``--outbox``: draining 20,000 due messages. Uses a separate PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

PARTS = ("scrape", "charts", "decisions", "pages", "storage", "outbox")


def main(options: Sequence[str] = ()) -> None:
    """Print the chosen tables, or all."""
    for name in [part for part in PARTS if f"--{part}" in options] or PARTS:
        import_module(f"{__name__}.{name}").main()  # stand-in replicas are a module of this package too, without Django
