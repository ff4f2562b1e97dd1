"""Reads large request bodies in another process: ``python -m routing.proxy.large_bodies``, started by its router.

Theory of operation. Decoding a body holds Python's global lock to its end, in whatever thread: 8 MiB of numbers take
0.3 s, in which no other request would be served. So large bodies (``is_large``) wait here for another process, which
starts with the first of them. It is killed if one body takes more than ``READ_S``. The body that it was reading when it
ended is rejected and not read again; the others go to the next process.

The order is fair queueing by bytes. A body is due when the process has read as many bytes as were read before it came,
plus its own; bodies of one API key come after each other in this count. So one small body does not wait for all large
ones before it, nor one key for what another one sends, and each has its turn. A body that waits longer than ``WAIT_S``
is rejected.

The process reads requests from its standard input and writes results to its standard output, one after the other, until
its input ends. A request is the index of the path and the body, a result is a pickled part and the canonical prompt;
lengths come first. Only the router has the other end of these sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from time import monotonic
from typing import BinaryIO, Final

from routing.balancing.request import BodyReading, read_body, reduce_body
from routing.http.response import RejectedRequestError
from routing.log import defect, event
from routing.paths import BODIES
from routing.prompt.canonical import CanonicalPrompt
from routing.prompt.parsing import Layout, layout_of
from routing.types import BodyError

MAX_WAITING: Final = 64  # bodies
MAX_WAITING_OF_ONE: Final = 32  # of one API key
WAIT_S: Final = 30.0
READ_S: Final = 10.0  # for one body; the first one waits for the process to start, too
RETRY_AFTER_S: Final = 1
NICENESS: Final = 5  # of the process: the event loop goes first if there are few cores
_BUFFER_BYTES: Final = 1 << 20  # of a result, before the socket is no longer read

_REQUEST: Final = struct.Struct("!BQ")  # index of the path, bytes of the body
_RESULT: Final = struct.Struct("!QQ")  # bytes of the pickled part, bytes of the canonical prompt
_PATHS: Final = tuple(BODIES)
_ended: Final = (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError)

logger = logging.getLogger(__name__)


class PendingBody:
    """A body that is to be read. One of the two callbacks gets the result, unless the body is cancelled."""

    def __init__(
        self,
        path: str,
        body: bytes,
        on_read: Callable[[BodyReading], None],
        on_rejected: Callable[[BodyError | RejectedRequestError], None],
        owner: str | None,
    ) -> None:
        self.path = path
        self.owner = owner
        self.due = 0  # bytes that the process reads before
        self.queued_at = monotonic()
        self.body = body
        self.on_read = on_read
        self.on_rejected = on_rejected
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.body = b""


class LargeBodies:
    """The queue of large bodies, and the process that reads them."""

    def __init__(self) -> None:
        self._waiting: list[PendingBody] = []  # in the order in which they came
        self._read_bytes = 0  # by the process, all in all
        self._due: dict[str, int] = {}  # of the latest body of each key
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._task: asyncio.Task[None] | None = None

    def read(
        self,
        path: str,
        body: bytes,
        on_read: Callable[[BodyReading], None],
        on_rejected: Callable[[BodyError | RejectedRequestError], None],
        *,
        owner: str | None = None,
    ) -> PendingBody:
        """Queue a body; RejectedRequestError if too many wait. ``owner``: the name of its API key."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.is_cancelled]
        of_owner = owner is not None and sum(waiting.owner == owner for waiting in self._waiting)
        if len(self._waiting) >= MAX_WAITING or of_owner >= MAX_WAITING_OF_ONE:
            raise RejectedRequestError(503, "too many large bodies wait to be read", retry_after_s=RETRY_AFTER_S)
        pending = PendingBody(path, body, on_read, on_rejected, owner)
        pending.due = self._read_bytes + len(body)
        if owner is not None:
            self._due = {key: due for key, due in self._due.items() if due > self._read_bytes}
            pending.due = self._due[owner] = max(pending.due, self._due.get(owner, 0) + len(body))
        self._waiting.append(pending)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._read_all())
        return pending

    def close(self) -> None:
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        self._kill()

    async def _read_all(self) -> None:
        try:
            while self._waiting:
                pending = min(self._waiting, key=lambda waiting: waiting.due)
                self._waiting.remove(pending)
                if not pending.is_cancelled:
                    self._read_bytes += len(pending.body)
                    await self._read(pending)
                self._reject_late()
        finally:
            self._task = None

    def _reject_late(self) -> None:
        """Reject what has waited too long; a body that is being read takes ``READ_S`` at most."""
        since = monotonic() - WAIT_S
        late = [pending for pending in self._waiting if pending.queued_at < since and not pending.is_cancelled]
        self._waiting = [pending for pending in self._waiting if pending.queued_at >= since]
        for pending in late:
            message = f"the body has waited {WAIT_S:g} s to be read"
            pending.on_rejected(RejectedRequestError(503, message, retry_after_s=RETRY_AFTER_S))

    async def _read(self, pending: PendingBody) -> None:
        result: BodyReading | BodyError | RejectedRequestError
        try:
            result = unpack_result(*await self._exchange(pending))
        except _ended as error:
            event(logger, "large_body_process_ended", level=logging.WARNING, reason=type(error).__name__)
            self._kill()
            result = RejectedRequestError(503, "the body could not be read", retry_after_s=RETRY_AFTER_S)
        except BodyError as error:
            result = error
        except Exception as error:  # noqa: BLE001 - the next body is read in any case
            defect(logger, error, "large body")
            result = RejectedRequestError(500, "internal error")
        if pending.is_cancelled:
            return
        if isinstance(result, BodyReading):
            pending.on_read(result)
        else:
            pending.on_rejected(result)

    async def _exchange(self, pending: PendingBody) -> tuple[bytes, bytes]:
        """Send a body to the process, and receive its result."""
        if self._process is not None and self._process.poll() is not None:
            self._kill()
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._start_process(), limit=_BUFFER_BYTES)
        results, requests = self._streams
        async with asyncio.timeout(READ_S):
            requests.writelines((_REQUEST.pack(_PATHS.index(pending.path), len(pending.body)), pending.body))
            await requests.drain()
            pickled_bytes, prompt_bytes = _RESULT.unpack(await results.readexactly(_RESULT.size))
            return await results.readexactly(pickled_bytes), await results.readexactly(prompt_bytes)

    def _start_process(self) -> socket.socket:
        """Start the process, in about 2 ms; returns the router's end of the socket pair."""
        own_end, other_end = socket.socketpair()
        with other_end:
            command = [sys.executable, "-m", "routing.proxy.large_bodies"]
            self._process = subprocess.Popen(command, stdin=other_end.fileno(), stdout=other_end.fileno())  # noqa: S603 - fixed command
        return own_end

    def _kill(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()  # some milliseconds
            self._process = None


# --- in the other process ---


def read_in_process(path: str, body: bytes) -> tuple[bytes, bytes]:
    """Read a body: the pickled part of the result, and the canonical prompt."""
    try:
        reading = read_body(path, body)
        layout = layout_of(body)
    except BodyError as error:
        return pickle.dumps((error.param, error.reason)), b""
    prompt = reading.prompt
    parts = prompt.tools_end, prompt.system_end, prompt.message_ends, prompt.ids, prompt.salt, prompt.rendering
    flags = reading.session_key, reading.is_plain, reading.omits_usage, reading.previous_id
    return pickle.dumps(
        (parts, (prompt.is_text, prompt.reads_cache), reduce_body(reading.body), flags, layout.spans, layout.end)
    ), prompt.data


def unpack_result(pickled: bytes, prompt_data: bytes) -> BodyReading:
    """The result of ``read_in_process``; raises its BodyError."""
    result = pickle.loads(pickled)  # noqa: S301 - from the router's own process
    if len(result) == 2:
        raise BodyError(*result)
    parts, (is_text, reads_cache), body, (session_key, is_plain, omits_usage, previous_id), *layout = result
    prompt = CanonicalPrompt(prompt_data, *parts, is_text=is_text)
    prompt.reads_cache = reads_cache
    reading = BodyReading(
        body, prompt, session_key, is_plain=is_plain, omits_usage=omits_usage, previous_id=previous_id
    )
    reading.layout = Layout(*layout)
    return reading


def serve(requests: BinaryIO, results: BinaryIO) -> None:
    while head := requests.read(_REQUEST.size):
        path_index, size = _REQUEST.unpack(head)
        pickled, prompt_data = read_in_process(_PATHS[path_index], requests.read(size))
        results.write(_RESULT.pack(len(pickled), len(prompt_data)))
        results.write(pickled)
        results.write(prompt_data)
        results.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the router
    os.nice(NICENESS)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
