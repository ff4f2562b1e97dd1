"""Memory of a process that serves: freed without looking for cycles, and given back to the system.

Theory of operation. Requests form no cycles worth looking for every 700 objects, so the cyclic collector is kept off
their way. The tables of large dictionaries move now and then, some megabytes at a time. By default glibc takes such
blocks from the heap once the first one was freed, and small objects settle in the holes that they leave: with ever new
prompts a router grew by a third within some millions of them, and nothing had leaked. With a threshold of its own
glibc maps each such block by itself, for ever.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h


def spare_the_collector() -> None:
    """Let requests be freed by their reference counts."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def give_back_large_blocks() -> None:
    """Give large blocks back when they are freed, from now on, where the C library can be told."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
