"""The cyclic garbage collector, kept off a request's way."""

from __future__ import annotations

import gc


def spare_the_collector() -> None:
    """Let requests be freed by their reference counts: they form no cycles worth looking for every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
