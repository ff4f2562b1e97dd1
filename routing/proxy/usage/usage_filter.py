"""Removes from a stream of server-sent events the usage chunk that its client did not ask for.

Theory of operation. The chunk is an event of its own: ``choices`` is empty and ``usage`` an object. A read that begins
and ends between two events and does not name usage is passed on as it is: one search, and no copy. Of any other read
the complete events are looked at, and the beginning of an incomplete one is held until its end is here. An event of
more than ``HELD_BYTES`` cannot be the one that is looked for: it is passed on as it comes. Every byte of other events
passes unchanged. A line ends with LF or CRLF, or with CR where an event ends with two of them.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from routing.proxy.usage.answer_json import StreamChunk

HELD_BYTES: Final = 16 << 10  # of an incomplete event; vLLM's usage chunk has about 400 bytes

_USAGE: Final = b'"usage"'  # with its quotes it cannot come from a generated text, where JSON escapes every quote
_event_ends: Final = re.compile(rb"\n\r?\n|\r\r").finditer
_event_end: Final = re.compile(rb"\n\r?\n|\r\r").search
_no_choices: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]').search
_OVERLAP: Final = 2  # bytes of an event's end that may have come with the read before


_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_decode: Final = msgspec.json.Decoder(StreamChunk).decode


class UsageFilter:
    """The filter of one stream."""

    __slots__ = ("_held", "_passed_end", "is_inside_event")

    def __init__(self) -> None:
        self.is_inside_event = False  # what was passed on ends inside an event
        self._held = b""  # the beginning of an event
        self._passed_end = b""  # of an event that is passed on as it comes, the last bytes

    def feed(self, data: bytes) -> bytes:
        """What can be passed on now that ``data`` has come: ``data`` itself wherever nothing changes."""
        if not self._held and not self.is_inside_event and data.endswith(_ENDS) and _USAGE not in data:
            return data
        passed = b""
        if self.is_inside_event:
            end = self._end_of_long_event(data)
            if end < 0:
                return data
            passed, data = data[:end], data[end:]
        return passed + self._complete_events(self._held + data)

    def rest(self) -> bytes:
        """What is held when the stream ends: an event without an end, passed on as it is."""
        held, self._held = self._held, b""
        return held

    def _end_of_long_event(self, data: bytes) -> int:
        """Where the event ends that is passed on as it comes; below 0 where it does not end in ``data``."""
        before = self._passed_end
        found = _event_end(before + data)
        if found is None:
            self._passed_end = (before + data)[-_OVERLAP:]
            return -1
        self.is_inside_event = False
        self._passed_end = b""
        return found.end() - len(before)

    def _complete_events(self, data: bytes) -> bytes:
        """The complete events of ``data``, which begins with one, without the usage chunk; holds what follows them."""
        start = kept_from = 0
        kept: list[bytes] = []
        for found in _event_ends(data):
            end = found.end()
            if _is_usage_chunk(data[start:end]):
                kept.append(data[kept_from:start])
                kept_from = end
            start = end
        if len(data) - start > HELD_BYTES:
            self.is_inside_event = True
            self._passed_end = data[-_OVERLAP:]
            start = len(data)
        self._held = data[start:]
        kept.append(data[kept_from:start])
        return b"".join(kept)


def _is_usage_chunk(event: bytes) -> bool:
    if _USAGE not in event or _no_choices(event) is None:
        return False
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    try:
        chunk = _decode(b"\n".join(lines))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return chunk.choices == [] and type(chunk.usage) is dict
