"""Which headers of a message are of one connection alone, and go no further.

Message heads that were read before, so that the same head need not be read again.

Theory of operation. A client repeats itself: request after request has the same head, but for the digits of its
Content-Length and the values of a few headers that name one request (``traceparent``, ``X-Request-Id``); so has answer
after answer of a replica. What parsing and checking such a head gave is kept under its bytes with those values cut out.
A head that is equal in all other bytes is read the same way, if three things hold:

- No byte of a value ends its line or could be dropped: printable ASCII, no space at either end, 512 bytes at most.
- What was cut out when a head was learned is what the parser took for these headers' values, one for one. So a value
  that is folded, empty, of other bytes or behind other white space stays in the key, or the head is not learned.
- The values decide nothing but the length, and what goes on in their place. A header of which this is not true must not
  be among the names.

A message is recognised only if one read brought exactly all of it: head, and as many bytes of body as the digits say.
Anything else goes the parser's way, from the first byte on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

Header = tuple[bytes, bytes]

HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)


def without_named(lines: list[bytes], connection: list[bytes]) -> list[bytes]:
    """Drop the header lines that a Connection header names: they were meant for this hop alone."""
    named = {token.strip().lower() for value in connection for token in value.split(b",")} - {b"close", b"keep-alive"}
    if not named:
        return lines
    return [line for line in lines if line.partition(b":")[0].lower() not in named]


def template_of(lines: bytes, cut: Sequence[Header]) -> bytes:
    """Header lines as a format of all values of ``cut``, in order.

    A value whose header is not among the lines is taken by the format, and left out of what it gives.
    """
    pieces: list[bytes] = []
    at = 0
    for name, value in cut:
        line = b"%b: %b\r\n" % (name, value)
        start = lines.find(line, at)
        while start > 0 and lines[start - 1] != 0x0A:
            start = lines.find(line, start + 1)
        if start < 0:
            pieces.append(b"%.0b")
            continue
        pieces.append(lines[at:start].replace(b"%", b"%%") + name + b": %b\r\n")
        at = start + len(line)
    pieces.append(lines[at:].replace(b"%", b"%%"))
    return b"".join(pieces)


MAX_HEADS: Final = 1024  # kept; one more, and all are forgotten
MAX_HEAD_BYTES: Final = 4096  # of a head that is kept or recognised, values included
MAX_VALUE_BYTES: Final = 512  # of a value that is cut out
MAX_VALUES: Final = 16  # that are cut out of one head

_PRINTABLE: Final = bytes(range(0x20, 0x7F))
_LENGTH: Final = b"content-length"
_GAP: Final = b"\0"  # stands for a value in a key; no head that the parser takes has one
_TRACE: Final = (
    *("traceparent", "tracestate", "baggage", "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-parentspanid"),
    *("x-amzn-trace-id", "x-cloud-trace-context", "x-datadog-trace-id", "x-datadog-parent-id", "x-datadog-tags"),
    *("uber-trace-id", "sentry-trace", "elastic-apm-traceparent", "newrelic"),
)
REQUEST_NAMES: Final = (*_TRACE, "x-request-id", "x-client-request-id", "x-correlation-id", "idempotency-key")
ANSWER_NAMES: Final = (*_TRACE, "date", "x-request-id", "x-correlation-id", "x-envoy-upstream-service-time")

H = TypeVar("H")


class CachedHead(Generic[H]):
    """What was found out about a head, and how it is laid out."""

    __slots__ = ("head", "key", "last", "lengths_place", "lines", "pieces")

    def __init__(self, head: H, key: bytes, lengths_place: int) -> None:
        self.head = head
        self.key = key  # the head, with a gap for each value
        *self.pieces, self.last = key.split(_GAP)  # before each value, and behind the last one
        self.lengths_place = lengths_place  # among the values
        self.lines = self.key.count(b"\r\n")


Found = tuple[CachedHead[H], bytes, list[bytes]]  # the head, the body, and the values that stand in this one


class HeaderCache(Generic[H]):
    """Heads by their bytes, at most ``MAX_HEADS`` of at most ``MAX_HEAD_BYTES`` each."""

    __slots__ = ("_known", "_max_bytes", "_split")

    def __init__(self, names: Sequence[str]) -> None:
        """``names``: the headers, in small letters, whose values may differ."""
        self._known: dict[bytes, CachedHead[H]] = {}
        self._max_bytes = MAX_HEAD_BYTES
        self._split = _pattern(names).split

    def __len__(self) -> int:
        return len(self._known)

    def find(self, data: bytes, latest: CachedHead[H] | None = None) -> Found[H] | None:
        """The head, the body and the values of a whole message whose head is known; None for anything else.

        ``latest``: what the last message on the same connection had.
        """
        alike = None if latest is None else self._alike(data, latest)
        return self._searched(data) if alike is None else alike

    def _alike(self, data: bytes, latest: CachedHead[H]) -> Found[H] | None:
        """The same, if the head is laid out as the one before."""
        values: list[bytes] = []
        at = 0
        for piece in latest.pieces:
            if not data.startswith(piece, at):
                return None
            start = at + len(piece)
            at = data.find(b"\r", start, start + MAX_VALUE_BYTES + 1)
            if at <= start or data[start] == 0x20 or data[at - 1] == 0x20:
                return None
            values.append(data[start:at])
        end = at + len(latest.last)
        if not data.startswith(latest.last, at) or end + latest.lines > self._max_bytes:
            return None
        is_sound = values[latest.lengths_place] == b"%d" % (len(data) - end)
        if not is_sound or (len(values) > 1 and b"".join(values).translate(None, _PRINTABLE)):
            return None
        return (latest, data[end:], values) if self._known.get(latest.key) is latest else None

    def _searched(self, data: bytes) -> Found[H] | None:
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
        if end < 4:
            return None
        parts = self._split(data[:end])
        values: list[bytes] = parts[2::3]
        parts[2::3] = [_GAP] * len(values)
        known = self._known.get(b"".join(parts))
        if known is None or end + known.lines > self._max_bytes:
            return None
        if len(values) != len(known.pieces) or values[known.lengths_place] != b"%d" % (len(data) - end):
            return None
        return known, data[end:], values

    def learn(self, data: bytes, head: H, length: int, headers: Sequence[Header]) -> list[Header] | None:
        """Remember the head of ``data``, which the parser took for one whole message with ``length`` bytes of body.

        ``headers``: all that the parser read. Returns those whose values were cut out, in order; None: it is not kept.
        """
        end = data.find(b"\r\n\r\n") + 4
        if not 4 <= end <= MAX_HEAD_BYTES or len(data) - end != length:
            return None
        parts = self._split(data[:end])
        cut = _headers(parts)
        lengths = [place for place, (name, _) in enumerate(cut) if name.lower() == _LENGTH]
        if len(lengths) != 1 or len(cut) > MAX_VALUES or cut != self._varying(headers):
            return None
        if len(self._known) >= MAX_HEADS:
            self._known.clear()
        parts[2::3] = [_GAP] * len(cut)
        known = CachedHead(head, b"".join(parts), lengths[0])
        if len(known.pieces) != len(cut):
            return None
        self._known[known.key] = known
        return cut

    def _varying(self, headers: Sequence[Header]) -> list[Header]:
        """The headers whose values may differ, as the parser read them."""
        return _headers(self._split(b"".join([b"\r\n%b: %b" % header for header in headers]) + b"\r\n"))

    def forget(self, max_bytes: int = MAX_HEAD_BYTES) -> None:
        """Forget all, because what is allowed has changed; recognise heads of up to ``max_bytes`` from now on."""
        self._known.clear()
        self._max_bytes = min(max_bytes, MAX_HEAD_BYTES)


def _headers(parts: list[bytes]) -> list[Header]:
    return [(name.strip(b"\r\n :"), value) for name, value in zip(parts[1::3], parts[2::3], strict=True)]


def _pattern(names: Sequence[str]) -> re.Pattern[bytes]:
    """Two groups of a line: what is before a value, and the value. Content-Length has a value if that is digits."""
    named = rf"{_any_case('content-length')}: ?(?=[0-9]+\r)|(?:{_by_first_word(names)}): ?"
    return re.compile(rf"(\r\n(?:{named}))([!-~](?:[ -~]{{0,510}}[!-~])?)(?=\r\n)".encode())


def _by_first_word(names: Sequence[str]) -> str:
    """Any of the names, as a pattern that tries each first word once: half the time of trying every name."""
    rests: dict[str, list[str]] = {}
    for name in names:
        first, dash, rest = name.partition("-")
        rests.setdefault(first, []).append(_any_case(dash + rest))
    return "|".join(f"{_any_case(first)}(?:{'|'.join(ways)})" for first, ways in rests.items())


def _any_case(name: str) -> str:
    """A pattern for a name in any letter case: faster than a search that ignores the case of all."""
    return "".join(f"[{letter}{letter.upper()}]" if letter.isalpha() else letter for letter in name)
