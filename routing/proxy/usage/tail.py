"""The end of an answer that came in pieces: where its usage stands, and an error inside a stream that began well.

The last few reads are kept by reference and looked at once, when the answer is complete. A short read is joined to the
one before it, so that what is kept is long enough however the end is cut.
"""

from __future__ import annotations

from typing import Final

from routing.proxy.usage.answer_json import Usage
from routing.proxy.usage.answer_reading import has_error, last_usage

TAIL_BYTES: Final = 4096  # kept of each of the last four reads: usage and [DONE] may come one by one, and in two
SHORT_BYTES: Final = 128  # a read that is shorter is joined to the one before, until that is no longer short


class Tail:
    """The end of an answer's body. It is added to for each read of a stream, so its reads lie in its own slots."""

    __slots__ = ("_fourth", "_last", "_second", "_third")

    def __init__(self) -> None:
        self._last = self._second = self._third = self._fourth = b""

    def add(self, data: bytes) -> None:
        """Keep the end of a read, and let the oldest go."""
        if len(data) < SHORT_BYTES and len(self._last) < SHORT_BYTES:
            self._last += data
            return
        self._fourth = self._third
        self._third = self._second
        self._second = self._last
        self._last = data if len(data) <= TAIL_BYTES else data[-TAIL_BYTES:]

    @property
    def text(self) -> bytes:
        """All that is kept."""
        return b"".join((self._fourth, self._third, self._second, self._last))

    def usage(self) -> Usage | None:
        """The last usage object, or None where there is none that can be read."""
        return last_usage(self.text)

    def has_error(self) -> bool:
        """Whether a stream ended with an error object or aborted, as vLLM's does when its engine dies or stops."""
        return has_error(self.text)

    def ends_event(self) -> bool:
        """Whether the last bytes end an event, so that another one may follow."""
        text = self.text
        return not text or text.endswith((b"\n\n", b"\r\n\r\n"))
