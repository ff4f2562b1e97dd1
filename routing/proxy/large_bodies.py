"""One router's way to the process that reads its large bodies.

Theory of operation. Decoding a body holds Python's lock to its end, in whatever thread: 8 MiB of numbers take 0.3 s, in
which no other request would be answered. So bodies of more than ``LARGE_BYTES`` wait here, in order, for another
process, which starts with the first of them. It is killed if one takes more than ``READ_S``. Whoever's body it was
reading when it ended is refused, and is not read again; the others go to the process that follows.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections import deque
from typing import Final, Protocol

from routing.balancing.request import BodyReading
from routing.http.errors import RejectedRequestError
from routing.log import defect, event
from routing.proxy.large_body_process import ANSWER, packed, unpacked
from routing.types import BodyError

MAX_WAITING: Final = 64  # bodies
READ_S: Final = 10.0  # one body; for the first one the process starts as well
RETRY_AFTER_S: Final = 1
_BUFFER_BYTES: Final = 1 << 20  # of an answer, before the socket is no longer read

_ended: Final = (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError)

logger = logging.getLogger(__name__)


class BodyListener(Protocol):
    """Whoever has a body read."""

    def on_body_parsed(self, reading: BodyReading) -> None:
        """It is read."""
        ...

    def on_body_rejected(self, why: BodyError | RejectedRequestError) -> None:
        """It cannot be placed, or could not be read."""
        ...


class PendingBody:
    """One body that is to be read."""

    __slots__ = ("body", "path", "who")

    def __init__(self, who: BodyListener, path: str, body: bytes) -> None:
        self.who: BodyListener | None = who
        self.path = path
        self.body = body

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.who = None
        self.body = b""


class LargeBodies:
    """The bodies that wait, and the process."""

    def __init__(self) -> None:
        self._waiting: deque[PendingBody] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._work: asyncio.Task[None] | None = None

    def read(self, who: BodyListener, path: str, body: bytes) -> PendingBody:
        """Have a body read; RejectedRequestError where too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise RejectedRequestError(503, "too many large bodies wait to be read", retry_after_s=RETRY_AFTER_S)
        reading = PendingBody(who, path, body)
        self._waiting.append(reading)
        if self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._read_all())
        return reading

    def close(self) -> None:
        """Read no more."""
        self._waiting.clear()
        if self._work is not None:
            self._work.cancel()
        self._kill()

    async def _read_all(self) -> None:
        try:
            while self._waiting:
                reading = self._waiting.popleft()
                if reading.who is not None:
                    await self._read(reading)
        finally:
            self._work = None

    async def _read(self, reading: PendingBody) -> None:
        try:
            answer = await self._asked(reading)
        except _ended as error:
            event(logger, "large_body_process_ended", level=logging.WARNING, reason=type(error).__name__)
            self._kill()
            self._refuse(reading, RejectedRequestError(503, "the body could not be read", retry_after_s=RETRY_AFTER_S))
            return
        try:
            found = unpacked(*answer)
        except BodyError as error:
            self._refuse(reading, error)
            return
        except Exception as error:  # noqa: BLE001 - the next body is read all the same
            defect(logger, error, "large body")
            self._refuse(reading, RejectedRequestError(500, "internal error"))
            return
        if reading.who is not None:
            reading.who.on_body_parsed(found)

    async def _asked(self, reading: PendingBody) -> tuple[bytes, bytes]:
        answers, requests = await self._running()
        async with asyncio.timeout(READ_S):
            requests.writelines(packed(reading.path, reading.body))
            await requests.drain()
            rest_bytes, data_bytes = ANSWER.unpack(await answers.readexactly(ANSWER.size))
            return await answers.readexactly(rest_bytes), await answers.readexactly(data_bytes)

    async def _running(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._process is not None and self._process.poll() is not None:
            self._kill()
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._started(), limit=_BUFFER_BYTES)
        return self._streams

    def _started(self) -> socket.socket:
        """Start the process, in about 2 ms; our end of the way to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "routing.proxy.large_body_process"]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())  # noqa: S603 - our own
        return ours

    def _kill(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()  # some milliseconds
            self._process = None

    def _refuse(self, reading: PendingBody, why: BodyError | RejectedRequestError) -> None:
        if reading.who is not None:
            reading.who.on_body_rejected(why)
