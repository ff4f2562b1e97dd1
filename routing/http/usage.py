"""What an answer says about itself: token usage, that its engine gave it up, an error in a stream that began well.

A whole answer is decoded; of one that came in pieces the end is searched. ``"usage"`` with its quotes cannot come from
a generated text, where JSON escapes every quote.

The end of an answer that came in pieces: where its usage stands, and an error inside a stream that began well.

The last few reads are kept by reference and looked at once, when the answer is complete. A short read is joined to the
one before it, so that what is kept is long enough however the end is cut.

Removes from a stream of server-sent events the usage chunk that its client did not ask for.

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

from routing.http.response_json import ParsedResponse, StreamChunk, Usage

WHOLE_BYTES: Final = 16 << 10  # of an answer that is decoded, which is faster than a search up to about here

_decode_usage: Final = msgspec.json.Decoder(Usage).decode
_decode_answer: Final = msgspec.json.Decoder(ParsedResponse).decode
_usage: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})').match
_stream_error: Final = re.compile(rb'(?:^|\n)data:\s*\{\s*"error"\s*:').search
# Of the responses API: an event of its output; those named here come before the first token, or without any.
_token_event: Final = re.compile(rb'"type"\s*:\s*"response\.(?!created"|queued"|in_progress"|failed")').search
_abort: Final = re.compile(rb'"finish_reason"\s*:\s*"abort"').search


def parse_response(answer: bytes) -> ParsedResponse | None:
    """What a whole JSON answer says; None where that cannot be read."""
    if len(answer) > WHOLE_BYTES:
        return None
    try:
        said: ParsedResponse = _decode_answer(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return said


def ends_aborted(said: ParsedResponse) -> bool:
    """Whether an answer ends because its engine stopped: vLLM says so with status 200."""
    for choice in said.choices:  # noqa: SIM110 - without a generator, which costs more than all of this
        if choice.finish_reason == "abort":
            return True
    return False


def has_token_event(events: bytes) -> bool:
    """Whether events of the responses API go beyond those that come before the first token."""
    return _token_event(events) is not None


def text_ends_aborted(text: bytes) -> bool:
    """The same of an answer whose text is only searched. No text of a choice can say so, for the quotes."""
    return b'"abort"' in text and _abort(text) is not None


def prompt_and_cached(usage: Usage) -> tuple[int | None, int | None]:
    """Tokens of the prompt, and of those the ones taken from the prefix cache."""
    prompt = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens  # its property, without a call
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = None if details is None else details.cached_tokens
    return prompt, None if cached is None or cached > (prompt or 0) else cached


def last_usage(text: bytes) -> Usage | None:
    """The last usage object in a text, or None where there is none that can be read."""
    end = len(text)
    while (at := text.rfind(b'"usage"', 0, end)) >= 0:
        if found := _usage(text, at):
            return _read_usage(found[1])
        end = at
    return None


def has_error(text: bytes) -> bool:
    """Whether a stream ended with an error object or aborted, as vLLM's does when its engine dies or stops."""
    return (b'"error"' in text and _stream_error(text) is not None) or text_ends_aborted(text)


def _read_usage(text: bytes) -> Usage | None:
    try:
        usage: Usage = _decode_usage(text)
    except msgspec.DecodeError:
        return None
    return usage


TAIL_BYTES: Final = 4096  # kept of each of the last four reads: usage and [DONE] may come one by one, and in two
SHORT_BYTES: Final = 128  # a read that is shorter is joined to the one before, until that is no longer short


class ResponseTail:
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
