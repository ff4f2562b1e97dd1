"""One router's way to the process that reads its large bodies.

Theory of operation. Decoding a body holds Python's lock to its end, in whatever thread: 8 MiB of numbers take 0.3 s, in
which no other request would be answered. So bodies of more than ``LARGE_BYTES`` wait here, in order, for another
process, which starts with the first of them. It is killed if one takes more than ``READ_S``. Whoever's body it was
reading when it ended is refused, and is not read again; the others go to the process that follows.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE
from collections import deque
from typing import Final, Protocol, cast

from routing.core.reading import BodyReading
from routing.core.types import BodyError
from routing.proxy.http.errors import RefusalError
from routing.proxy.large_bodies.process import ANSWER, packed, unpacked
from routing.proxy.log import defect, event

MOST_WAITING: Final = 64  # bodies
START_S: Final = 10.0
READ_S: Final = 10.0  # one body
RETRY_AFTER_S: Final = 1
_BUFFER_BYTES: Final = 1 << 20  # of an answer, before the pipe is no longer read

_ended: Final = (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError)

logger = logging.getLogger(__name__)


class Waits(Protocol):
    """Whoever has a body read."""

    def body_read(self, reading: BodyReading) -> None:
        """It is read."""
        ...

    def body_refused(self, why: BodyError | RefusalError) -> None:
        """It cannot be placed, or could not be read."""
        ...


class Reading:
    """One body that is to be read."""

    __slots__ = ("body", "path", "who")

    def __init__(self, who: Waits, path: str, body: bytes) -> None:
        self.who: Waits | None = who
        self.path = path
        self.body = body

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.who = None
        self.body = b""


class LargeBodies:
    """The bodies that wait, and the process."""

    def __init__(self) -> None:
        self._waiting: deque[Reading] = deque()
        self._process: asyncio.subprocess.Process | None = None
        self._work: asyncio.Task[None] | None = None

    def read(self, who: Waits, path: str, body: bytes) -> Reading:
        """Have a body read; RefusalError where too many wait."""
        if len(self._waiting) >= MOST_WAITING:
            raise RefusalError(503, "too many large bodies wait to be read", retry_after_s=RETRY_AFTER_S)
        reading = Reading(who, path, body)
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

    async def _read(self, reading: Reading) -> None:
        try:
            answer = await self._asked(reading)
        except _ended as error:
            event(logger, "large_body_process_ended", level=logging.WARNING, reason=type(error).__name__)
            self._kill()
            self._refuse(reading, RefusalError(503, "the body could not be read", retry_after_s=RETRY_AFTER_S))
            return
        try:
            found = unpacked(*answer)
        except BodyError as error:
            self._refuse(reading, error)
            return
        except Exception as error:  # noqa: BLE001 - the next body is read all the same
            defect(logger, error, "large body")
            self._refuse(reading, RefusalError(500, "internal error"))
            return
        if reading.who is not None:
            reading.who.body_read(found)

    async def _asked(self, reading: Reading) -> tuple[bytes, bytes]:
        process = await self._running()
        requests, answers = cast("asyncio.StreamWriter", process.stdin), cast("asyncio.StreamReader", process.stdout)
        async with asyncio.timeout(READ_S):
            requests.writelines(packed(reading.path, reading.body))
            await requests.drain()
            rest_bytes, data_bytes = ANSWER.unpack(await answers.readexactly(ANSWER.size))
            return await answers.readexactly(rest_bytes), await answers.readexactly(data_bytes)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            async with asyncio.timeout(START_S):
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "routing.proxy.large_bodies.process",
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=_BUFFER_BYTES,
                )
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001 - kills it, and closes its pipes too

    def _refuse(self, reading: Reading, why: BodyError | RefusalError) -> None:
        if reading.who is not None:
            reading.who.body_refused(why)
