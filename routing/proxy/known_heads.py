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
    """What was found out about a head, and its bytes on both sides of the digits."""

    __slots__ = ("_before", "_behind", "head", "is_current")

    def __init__(self, before: bytes, behind: bytes, head: H) -> None:
        self._before = before
        self._behind = behind  # to the end of the head
        self.head = head
        self.is_current = True  # what is allowed has not changed since

    def body(self, data: bytes) -> bytes | None:
        """The body of one whole message with this head; None for anything else."""
        room = len(data) - len(self._before) - len(self._behind)  # of the digits and what they count
        length = room - len(b"%d" % room)
        digits = b"%d" % length
        if len(digits) + length < room:  # with the digits of the room there was one too many
            length += 1
            digits = b"%d" % length
        begins = self._before + digits + self._behind
        end = len(begins)
        return data[end:] if data[:end] == begins and len(data) - end == length else None


class KnownHeads(Generic[H]):
    """Heads by their bytes, at most ``MAX_HEADS`` of at most ``MAX_HEAD_BYTES`` each."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, KnownHead[H]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, data: bytes, latest: KnownHead[H] | None = None) -> tuple[KnownHead[H], bytes] | None:
        """The head and the body of a whole message whose head is known; None for anything else.

        ``latest``: what the last message on the same connection had, which most have again.
        """
        if latest is not None and latest.is_current and (body := latest.body(data)) is not None:
            return latest, body
        end = data.find(b"\r\n\r\n")
        at = data.find(b"ength: ", 0, end) + 7
        if end < 0 or at < 7:
            return None
        stop = data.find(b"\r\n", at)
        known = self._known.get(data[:at] + data[stop:end])
        if known is None or data[at:stop] != b"%d" % (len(data) - end - 4):
            return None
        return known, data[end + 4 :]

    def learn(self, data: bytes, head: H, length: int) -> None:
        """Remember the head of ``data``, which the parser took for one whole message with ``length`` bytes of body."""
        end = data.find(b"\r\n\r\n")
        at = data.find(b"ength: ", 0, end) + 7
        if not 7 <= at <= end <= MAX_HEAD_BYTES or data[at - len(LENGTH) : at].lower() != LENGTH:
            return
        stop = data.find(b"\r\n", at)
        if not data[at:stop].isdigit() or len(data) - end - 4 != length:
            return
        if len(self._known) >= MAX_HEADS:
            self.forget()
        self._known[data[:at] + data[stop:end]] = KnownHead(data[:at], data[stop : end + 4], head)

    def forget(self) -> None:
        """Forget all, because what is allowed has changed."""
        for known in self._known.values():
            known.is_current = False
        self._known.clear()
