"""Reads and writes ZMTP 3, the protocol of ZeroMQ, as far as a subscriber and a replay need it. No I/O.

Theory of operation. ZeroMQ's library receives on a thread of its own, which wakes for each message. An engine
publishes one at almost every step, so that thread alone took a fifth of the CPU of a request. This client reads a
socket when it wants to: what an engine has sent in the meantime waits in the kernel's buffer, and one system call takes
all of it.

Both peers send a greeting, the command READY with their socket type, and then messages of one or more frames. A frame
is a byte of flags, its length in 1 or 8 bytes, and its content. Only the mechanism NULL is spoken, without encryption
and authentication. See rfc.zeromq.org/spec/23.

Bounds. A frame over ``max_frame_bytes`` is skipped and counts as empty, and a message has at most ``MAX_FRAMES``. A
frame over ``MAX_SKIPPED_BYTES`` is a ProtocolError: one wrong bit in a length must not hide everything that follows.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

MAX_FRAMES: Final = 16
MAX_COMMAND_BYTES: Final = 4096
MAX_SKIPPED_BYTES: Final = 16 << 20
GREETING_BYTES: Final = 64
_SIGNATURE_BYTES: Final = 10
_CONTEXT_BYTES: Final = 16  # of a PING, at most; its PONG repeats them
_MAJOR: Final = 3
_MECHANISM: Final = b"NULL".ljust(20, b"\0")
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + bytes((_MAJOR, 0)) + _MECHANISM + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_length: Final = Struct(">Q")


class ProtocolError(ValueError):
    """The peer does not speak ZMTP 3 without authentication."""


def frame(content: bytes, flags: int = 0) -> bytes:
    """One frame."""
    if len(content) > 255:
        return bytes((flags | _LONG,)) + _length.pack(len(content)) + content
    return bytes((flags, len(content))) + content


def message(frames: list[bytes]) -> bytes:
    """A message of these frames."""
    return b"".join([frame(content, _MORE) for content in frames[:-1]]) + frame(frames[-1])


def greeting_and_ready(socket_type: bytes) -> bytes:
    """The first bytes of a client: ZMTP greeting and READY command. Messages have to wait for the peer's READY."""
    ready = b"\x05READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    return _GREETING + frame(ready, _COMMAND)


PING: Final = frame(b"\x04PING\0\0", _COMMAND)


class Receiver:
    """The bytes of one connection as messages."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.is_ready = False  # whether the peer has sent its greeting and READY
        self.replies: list[bytes] = []  # to send
        self._max_frame_bytes = max_frame_bytes
        self._data = b""
        self._at = 0
        self._has_greeting = False
        self._to_skip = 0  # bytes of a frame that is too long
        self._frames: list[bytes] = []

    @property
    def is_in_message(self) -> bool:
        """Whether the beginning of a message has been received, and not its end."""
        return self._to_skip > 0 or self._at < len(self._data) or len(self._frames) > 0

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        if self._to_skip:
            skipped = min(self._to_skip, len(data))
            self._to_skip -= skipped
            data = data[skipped:]
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def next_message(self) -> list[bytes] | None:
        """The next whole message; None if more bytes are needed. ProtocolError."""
        if not self._has_greeting and not self._take_greeting():
            return None
        while (found := self._next_frame()) is not None:
            flags, content = found
            if flags & _COMMAND:
                self._on_command(content)
            elif self._add(content, is_last=not flags & _MORE):
                frames, self._frames = self._frames, []
                return frames
        return None

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Flags and content of the next whole frame; None if more bytes are needed."""
        data, at = self._data, self._at
        if self._to_skip or len(data) - at < 2:
            return None
        flags, size, start = data[at], data[at + 1], at + 2
        if flags > _MORE | _LONG | _COMMAND:
            raise ProtocolError(f"a frame with flags {flags}")
        if flags & _LONG:
            start = at + 9
            if len(data) < start:
                return None
            size = int.from_bytes(data[at + 1 : start], "big")
        if flags & _COMMAND and size > MAX_COMMAND_BYTES:
            raise ProtocolError(f"a command of {size} bytes")
        if size > MAX_SKIPPED_BYTES:
            raise ProtocolError(f"a frame of {size:,} bytes")
        end = start + size
        if size > self._max_frame_bytes:
            self._to_skip, self._at = max(0, end - len(data)), min(end, len(data))
            return flags, b""
        if len(data) < end:
            return None
        self._at = end
        return flags, data[start:end]

    def _add(self, content: bytes, *, is_last: bool) -> bool:
        """Add a frame to the message; whether the message is whole."""
        if not self.is_ready or len(self._frames) >= MAX_FRAMES:
            raise ProtocolError("a message before READY" if not self.is_ready else "a message with too many frames")
        self._frames.append(content)
        return is_last

    def _take_greeting(self) -> bool:
        greeting = self._data[:GREETING_BYTES]
        if greeting[:1] not in {b"", b"\xff"} or (
            len(greeting) > _SIGNATURE_BYTES and greeting[_SIGNATURE_BYTES] < _MAJOR
        ):
            raise ProtocolError("not a peer of ZMTP 3")
        if len(greeting) < GREETING_BYTES:
            return False
        if greeting[12:32] != _MECHANISM:
            raise ProtocolError("the peer demands authentication")
        self._has_greeting, self._at = True, GREETING_BYTES
        return True

    def _on_command(self, content: bytes) -> None:
        name = content[1 : 1 + content[0]] if content else b""
        if name == b"READY":
            self.is_ready = True
        elif name == b"PING":
            self.replies.append(frame(b"\x04PONG" + content[7 : 7 + _CONTEXT_BYTES], _COMMAND))
        elif name == b"ERROR":
            raise ProtocolError("the peer has rejected the connection")
