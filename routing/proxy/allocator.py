"""Large blocks of memory go back to the system when they are freed, so that the heap keeps no holes where they were.

Theory of operation. The tables of large dictionaries move now and then, some megabytes at a time. By default glibc
takes such blocks from the heap once the first one was freed, and small objects settle in the holes that they leave:
with ever new prompts a router grew by a third within some millions of them, and nothing had leaked. With a threshold of
its own glibc maps each such block by itself, for ever.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h


def give_back_large_blocks() -> None:
    """Do so from now on, where the C library can be told."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
