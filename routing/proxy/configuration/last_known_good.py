"""The last configuration that worked, on disk, so that a router starts without its control plane.

Theory of operation. A file is one line with the length and digest of what follows, then the snapshot as it came. It
is written beside its final name and flushed to the disk; then the current one is renamed to be the previous one, and it
to be the current one. So at every moment, and after a loss of power at any moment, at least one whole file is there. A
file that does not match its own digest is passed over, and the previous one read. Processes that share a folder, which
is a mistake, write one at a time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from routing.proxy.log import event

logger = logging.getLogger(__name__)

_MAGIC = b"warmpath-config-1"
CURRENT = "config"
PREVIOUS = "config.previous"
LOCK_S = 2.0  # that another process may take to write


class LastKnownGood:
    """Two generations of the configuration in one folder, readable by the router's account alone: it holds a secret."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current = folder / CURRENT
        self._previous = folder / PREVIOUS

    def save(self, document: bytes) -> None:
        """Make a document the current one, and the current one the previous. OSError where the disk refuses.

        Once it has its final name it stays: should the folder not be flushed then, a loss of power may bring back the
        one before, and nothing worse.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self._folder) as handle:
            fresh = self._folder / f"{CURRENT}.new"
            _write_through(fresh, b"%b %d %b\n%b" % (_MAGIC, len(document), _digest(document), document))
            if _read(self._current) is not None:  # a torn one must not push out the last good one
                self._current.replace(self._previous)
            fresh.replace(self._current)
            _flush(handle)

    def load(self) -> list[bytes]:
        """The documents that are whole, the current one first."""
        return [document for path in (self._current, self._previous) if (document := _read(path)) is not None]


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """The folder's handle, which nobody else has locked until the end of the block; OSError if somebody keeps it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + LOCK_S
        while not _lock(handle):
            if time.monotonic() > until:
                raise OSError(errno.EBUSY, "another router writes to the same folder")
            time.sleep(0.01)
        yield handle
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Whether nobody else has it now. A file system without locks has nobody to tell."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _flush(folder: int) -> None:
    """Make the renames survive a loss of power."""
    try:
        os.fsync(folder)
    except OSError as error:
        event(logger, "last_known_good_not_flushed", level=logging.WARNING, reason=error.strerror)


def _write_through(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> bytes | None:
    """A file's document, or None if the file is missing, torn or altered."""
    try:
        head, _, document = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if head != b"%b %d %b" % (_MAGIC, len(document), _digest(document)):
        event(logger, "last_known_good_torn", level=logging.WARNING, file=path.name)
        return None
    return document


def _digest(document: bytes) -> bytes:
    return hashlib.sha256(document).hexdigest().encode()
