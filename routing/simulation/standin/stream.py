"""A stream of server-sent events, written straight from the engine's timer.

One HTTP chunk for each event, as vLLM sends them, and one write for all that a step brings to a stream. The bytes go
to the connection's transport directly, so a token costs no task switch; aiohttp has sent the head before and ends
the body after.
"""

from __future__ import annotations

import asyncio

from routing.simulation.standin.answers import DONE, StreamFormat
from routing.simulation.standin.errors import error_body
from routing.simulation.standin.faults import CrashAfterChunks
from routing.simulation.standin.generation import Choice, Generation


class EventStream:
    """Turns a generation's progress into chunks on a transport."""

    def __init__(
        self, generation: Generation, answer_id: str, transport: asyncio.Transport, crash: CrashAfterChunks | None
    ) -> None:
        self._generation = generation
        self._format = StreamFormat(generation, answer_id)
        self._transport = transport
        self._crash = crash
        self._sent = 0  # events
        self._has_roles = not generation.ask.is_chat

    def on_token(self, choice: Choice, before: int) -> None:
        """Send the events of a choice's new tokens; ``Generation.start`` calls it."""
        events: list[bytes] = []
        if not self._has_roles:
            self._has_roles = True
            events += (self._format.role(index) for index in range(len(self._generation.choices)))
        ends = choice.finish_reason is not None
        whole = choice.generated - 1 if ends and choice.generated > before else choice.generated
        events += (self._format.token(choice, number) for number in range(before, whole))
        if ends:
            events.append(self._format.last(choice, "".join(choice.pieces[whole : choice.generated])))
        self._send(events)

    def close(self) -> None:
        """Send what follows the last choice's end."""
        events = [self._format.usage()] if self._generation.ask.include_usage else []
        self._send([*events, DONE])

    @property
    def is_broken(self) -> bool:
        """Whether a fault has cut the stream short."""
        return self._crash is not None and self._sent >= self._crash.chunks

    def _send(self, events: list[bytes]) -> None:
        if self.is_broken or self._transport.is_closing():
            return
        if self._crash is not None:
            events = events[: self._crash.chunks - self._sent]
        self._sent += len(events)
        self._write(events)
        if self._crash is not None and self._sent >= self._crash.chunks:
            self._break(self._crash)

    def _write(self, events: list[bytes]) -> None:
        self._transport.write(b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events))

    def _break(self, crash: CrashAfterChunks) -> None:
        """Do what the fault says, and let the handler go."""
        if crash.how == "connection":
            self._transport.abort()
        else:
            failure = error_body(500, "InternalServerError", "EngineCore encountered an issue.")
            self._write([b"data: " + failure + b"\n\n", DONE])
        self._generation.end()
