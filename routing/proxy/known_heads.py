"""Message heads that were read before, so that the same head need not be read again.

Theory of operation. A client repeats itself: request after request has the same head, but for the digits of its
Content-Length; so has answer after answer of a replica. What parsing and checking such a head gave is kept under its
exact bytes, digits cut out. Whatever was found out about one head holds for every head that is equal in all other
bytes, because the digits decide nothing but the length. A message is recognised only if one read brought exactly all
of it: head, and as many bytes of body as the digits say. Anything else goes the parser's way, from the first byte on.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

LENGTH: Final = b"\r\ncontent-length: "
MAX_HEADS: Final = 1024  # kept; one more, and all are forgotten
MAX_HEAD_BYTES: Final = 4096  # of a head that is kept

H = TypeVar("H")


class KnownHead(Generic[H]):
    """What was found out about a head, and how it is laid out."""

    __slots__ = ("at", "head", "size")

    def __init__(self, head: H, at: int, size: int) -> None:
        self.head = head
        self.at = at  # where the digits begin
        self.size = size  # bytes of the whole head without them


class KnownHeads(Generic[H]):
    """Heads by their bytes, at most ``MAX_HEADS`` of at most ``MAX_HEAD_BYTES`` each."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, KnownHead[H]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, data: bytes, latest: KnownHead[H] | None = None) -> tuple[KnownHead[H], bytes] | None:
        """The head and the body of a whole message whose head is known; None for anything else.

        ``latest``: what the last message on the same connection had.
        """
        alike = None if latest is None else self._alike(data, latest)
        return self._searched(data) if alike is None else alike

    def _alike(self, data: bytes, latest: KnownHead[H]) -> tuple[KnownHead[H], bytes] | None:
        """The same, if the head is laid out as the one before."""
        room = len(data) - latest.size  # of the digits and what they count
        length = room - len(b"%d" % room)
        digits = b"%d" % length
        if len(digits) + length < room:  # the room has one digit more
            length += 1
            digits = b"%d" % length
        at, stop, end = latest.at, latest.at + len(digits), latest.size + len(digits)
        if length < 0 or end + length != len(data) or data[at:stop] != digits:
            return None
        known = self._known.get(data[:at] + data[stop:end])
        return None if known is None or known.at != at else (known, data[end:])

    def _searched(self, data: bytes) -> tuple[KnownHead[H], bytes] | None:
        end = data.find(b"\r\n\r\n") + 4
        at = data.find(b"ength: ", 0, end) + 7
        if end < 4 or at < 7:
            return None
        stop = data.find(b"\r\n", at)
        known = self._known.get(data[:at] + data[stop:end])
        if known is None or data[at:stop] != b"%d" % (len(data) - end):
            return None
        return known, data[end:]

    def learn(self, data: bytes, head: H, length: int) -> None:
        """Remember the head of ``data``, which the parser took for one whole message with ``length`` bytes of body."""
        end = data.find(b"\r\n\r\n") + 4
        at = data.find(b"ength: ", 0, end) + 7
        if not 7 <= at < end <= MAX_HEAD_BYTES or data[at - len(LENGTH) : at].lower() != LENGTH:
            return
        stop = data.find(b"\r\n", at)
        if not data[at:stop].isdigit() or len(data) - end != length:
            return
        if len(self._known) >= MAX_HEADS:
            self._known.clear()
        self._known[data[:at] + data[stop:end]] = KnownHead(head, at, end - stop + at)

    def forget(self) -> None:
        """Forget all, because what is allowed has changed."""
        self._known.clear()
