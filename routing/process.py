"""Signals, memory, open files and supervisor of a serving process.

Theory of operation, signals. A signal without a handler ends a process at once. The signals of a router are therefore
blocked from the first line of ``serve`` until there is an event loop to handle them, and ignored once the loop has
ended: none is lost while a router starts, and none kills a router that is shutting down. The handlers are not the
loop's own, because a loop that closes restores the default handlers, which end the process.

Theory of operation, memory. Requests leave no reference cycles worth a collection every 700 objects, so the cyclic
collector runs rarely. Tables of large dictionaries are reallocated now and then, some megabytes at a time. By default
glibc allocates such blocks from the heap once the first one was freed, and small objects fill the holes that they
leave: a router that got millions of new prompts grew by a third without a leak. With a fixed
threshold glibc always maps each such block separately.

Theory of operation, open files. Each client may need a connection to a replica as well. So clients get half of the
descriptors that remain after a reserve for the admin port, health checks, files, and for connections that are accepted
to be refused. The kernel's queue of connections is accepted at once, so it is part of the reserve and has a length by
the limit.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
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


RESERVED_FILES = 64  # admin port, health checks, KV events, listeners, logs and state
REFUSED_AT_ONCE = 32  # connections that are being refused
FEW_FILES = 4096  # a lower limit is mentioned where readiness is read
MAX_BACKLOG = 2048


def raise_file_limit() -> None:
    """Raise the limit of open files as far as the process may; its children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int | None:
    """How many files this process may have open; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def backlog() -> int:
    """How many connections the kernel may queue until they are accepted, all at once."""
    limit = file_limit()
    return MAX_BACKLOG if limit is None else max(16, min(MAX_BACKLOG, limit // 8))


def max_clients() -> int | None:
    """How many client connections leave enough descriptors for everything else; None: as many as like."""
    limit = file_limit()
    return None if limit is None else max(1, (limit - RESERVED_FILES - REFUSED_AT_ONCE - backlog()) // 2)


def few_files() -> str | None:
    """A sentence about a low limit of open files; None if it is high enough."""
    limit = file_limit()
    if limit is None or limit >= FEW_FILES:
        return None
    return f"open files are limited to {limit}, so at most {max_clients()} clients may be connected; raise `ulimit -n`"


def read_regular_file(path: Path) -> bytes:
    """The content of a file; OSError if it is none, such as a pipe, which would block."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def check_regular_file(path: Path) -> None:
    """OSError if a path is something else than a file, such as a pipe, which would block."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def create_regular_file(path: Path) -> int:
    """The descriptor of an empty file that only this account may read; a pipe of that name is removed."""
    if path.is_fifo():
        path.unlink()
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def notify_supervisor(state: str) -> None:
    """Send a state such as ``READY=1`` to systemd (``Type=notify``). Without ``NOTIFY_SOCKET``, nothing is sent."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
            notifications.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
