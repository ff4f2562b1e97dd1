"""Signals, memory and supervisor of a serving process.

Theory of operation, signals. A signal without a handler ends a process at once. The signals of a router are therefore
blocked from the first line of ``serve`` until there is an event loop to handle them, and ignored once the loop has
ended: none is lost while a router starts, and none kills a router that is shutting down. The handlers are not the
loop's own, because a loop that closes restores the default handlers, which end the process.

Theory of operation, memory. Requests leave no reference cycles worth a collection every 700 objects, so the cyclic
collector runs rarely. Tables of large dictionaries are reallocated now and then, some megabytes at a time. By default
glibc allocates such blocks from the heap once the first one was freed, and small objects fill the holes that they
leave: a router that got millions of new prompts grew by a third without a leak. With a fixed
threshold glibc always maps each such block separately.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HANDLED_SIGNALS = (*_STOP_SIGNALS, signal.SIGHUP)
LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h


def block_signals() -> None:
    """Keep signals pending until ``signal_handlers``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)


@contextmanager
def signal_handlers(
    loop: asyncio.AbstractEventLoop, *, stop: Callable[[], None], reload: Callable[[], None]
) -> Iterator[None]:
    """Handle signals on the loop until the end of the block, pending ones first.

    Signals that were blocked before are ignored afterwards, because the process ends then; others get their previous
    handlers.
    """
    previous = {
        number: _set_handler(number, loop, stop if number in _STOP_SIGNALS else reload) for number in _HANDLED_SIGNALS
    }
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if number in blocked else handler)


def _set_handler(number: signal.Signals, loop: asyncio.AbstractEventLoop, handler: Callable[[], None]) -> Any:
    """Set a handler; returns the previous one."""
    return signal.signal(number, lambda *_: loop.call_soon_threadsafe(handler))


def tune_garbage_collector() -> None:
    """Let requests be freed by their reference counts."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def return_large_blocks() -> None:
    """Return large blocks to the operating system when they are freed, if the C library supports it."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def notify_supervisor(state: str) -> None:
    """Send a state such as ``READY=1`` to systemd (``Type=notify``). Without ``NOTIFY_SOCKET``, nothing is sent."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
            notifications.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
