"""Signals of a router, from its first moment to its last.

Theory of operation. A signal that nobody handles ends a process where it stands. So those that a router heeds wait in
the kernel from the first line of ``serve`` until there is an event loop to handle them, and are ignored once it has
ended: none is lost while a router starts, and none kills one that is ending in good order. The handlers are ours and
not the loop's, because a loop that closes gives its signals back to whoever ends processes.

Memory of a process that serves: freed without looking for cycles, and given back to the system.

Theory of operation. Requests form no cycles worth looking for every 700 objects, so the cyclic collector is kept off
their way. The tables of large dictionaries move now and then, some megabytes at a time. By default glibc takes such
blocks from the heap once the first one was freed, and small objects settle in the holes that they leave: with ever new
prompts a router grew by a third within some millions of them, and nothing had leaked. With a threshold of its own
glibc maps each such block by itself, for ever.
"""

from __future__ import annotations

import ctypes
import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


_STOP = (signal.SIGTERM, signal.SIGINT)
_HEEDED = (*_STOP, signal.SIGHUP)


def block_signals() -> None:
    """Let signals wait until somebody heeds them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)


@contextmanager
def signal_handlers(
    loop: asyncio.AbstractEventLoop, *, stop: Callable[[], None], reload: Callable[[], None]
) -> Iterator[None]:
    """Handle signals on the loop until the end of the block, those first that have waited.

    Where they had to wait they are ignored afterwards, for the process ends then; else they are what they were.
    """
    before = {number: _handle(number, loop, stop if number in _STOP else reload) for number in _HEEDED}
    held = signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEEDED)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if number in held else handler)


def _handle(number: signal.Signals, loop: asyncio.AbstractEventLoop, handler: Callable[[], None]) -> Any:
    """What was done with it before."""
    return signal.signal(number, lambda *_: loop.call_soon_threadsafe(handler))


LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h


def tune_garbage_collector() -> None:
    """Let requests be freed by their reference counts."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def return_large_blocks() -> None:
    """Give large blocks back when they are freed, from now on, where the C library can be told."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
