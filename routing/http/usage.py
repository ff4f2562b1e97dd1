"""Reads token usage, aborted generations and stream errors from responses, and removes unrequested usage events.

A short JSON response is decoded as a whole; otherwise only the end of the body is searched. ``"usage"`` with its quotes
cannot be part of generated text, because JSON escapes the quotes there.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from routing.http.response_json import ParsedResponse, StreamChunk, Usage

MAX_DECODED_BYTES: Final = 16 << 10  # up to about here, decoding a response is faster than searching it

_decode_usage: Final = msgspec.json.Decoder(Usage).decode
_decode_response: Final = msgspec.json.Decoder(ParsedResponse).decode
_usage: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})').match
_stream_error: Final = re.compile(rb'(?:^|\n)data:\s*\{\s*(?:"type"\s*:\s*"error"\s*,\s*)?"error"\s*:').search
# Of the responses API: an output event. The events named here come before the first token, or without any.
# Of the messages API: an event of a content block. ``message_start`` comes before the first token.
_token_event: Final = re.compile(
    rb'"type"\s*:\s*"(?:response\.(?!created"|queued"|in_progress"|failed")|content_block_)'
).search
# vLLM's messages API has no name for an aborted generation: its stop reason is null.
_abort: Final = re.compile(
    rb'"finish_reason"\s*:\s*"abort"|"message_delta"\s*,\s*"delta"\s*:\s*\{\s*"stop_reason"\s*:\s*null'
).search


def parse_response(body: bytes) -> ParsedResponse | None:
    """Decode a whole JSON response; None if it is too long or not valid."""
    if len(body) > MAX_DECODED_BYTES:
        return None
    try:
        response: ParsedResponse = _decode_response(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return response


def is_aborted(response: ParsedResponse) -> bool:
    """Whether the response ended because its engine stopped, which vLLM reports with status 200."""
    for choice in response.choices:  # a generator would cost more than everything else here
        if choice.finish_reason == "abort":
            return True
    return response.type == "message" and response.stop_reason is None


def has_abort(body: bytes) -> bool:
    """As ``is_aborted``, without decoding. Generated text cannot match, because JSON escapes its quotes."""
    return (b'"abort"' in body or b'"message_delta"' in body) and _abort(body) is not None


def begins_with_error(events: bytes) -> bool:
    """Whether events include an error, as an engine sends it in a stream with status 200."""
    return b'"error"' in events and _stream_error(events) is not None


def has_token_event(events: bytes) -> bool:
    """Whether events of the responses API or the messages API include one that follows the first token."""
    return _token_event(events) is not None


def generated_tokens(usage: Usage) -> int | None:
    return usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens


def lacks_details(usage: Usage) -> bool:
    """Whether tokens were generated, but the number of cached tokens is not reported."""
    return _cached_tokens(usage) is None and bool(generated_tokens(usage))


def prompt_and_cached(usage: Usage) -> tuple[int | None, int | None]:
    """Tokens of the prompt, and how many of them came from the prefix cache; None: not reported."""
    prompt, cached = usage.prompt_tokens, _cached_tokens(usage)
    if prompt is None and usage.input_tokens is not None:
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return prompt, None if cached is None or cached > (prompt or 0) else cached


def _cached_tokens(usage: Usage) -> int | None:
    details = usage.prompt_tokens_details or usage.input_tokens_details
    return usage.cache_read_input_tokens if details is None else details.cached_tokens


TAIL_BYTES: Final = 4096  # kept of each of the last four reads: usage and [DONE] may arrive separately, each in two
SHORT_BYTES: Final = 128  # a shorter read is joined to the one before, until that is no longer short


class ResponseTail:
    """The last four reads of a response's body, searched once when the response is complete.

    Reads are stored in attributes, because ``add`` runs for each read of a stream.
    """

    __slots__ = ("_fourth", "_last", "_second", "_third")

    def __init__(self) -> None:
        self._last = self._second = self._third = self._fourth = b""

    def add(self, data: bytes) -> None:
        if len(data) < SHORT_BYTES and len(self._last) < SHORT_BYTES:
            self._last += data
            return
        self._fourth = self._third
        self._third = self._second
        self._second = self._last
        self._last = data if len(data) <= TAIL_BYTES else data[-TAIL_BYTES:]

    @property
    def text(self) -> bytes:
        return b"".join((self._fourth, self._third, self._second, self._last))

    def usage(self) -> Usage | None:
        """The last usage object; None if there is none, or if it is not valid."""
        text = self.text
        end = len(text)
        while (start := text.rfind(b'"usage"', 0, end)) >= 0:
            if match := _usage(text, start):
                try:
                    usage: Usage = _decode_usage(match[1])
                except (msgspec.DecodeError, UnicodeDecodeError):
                    return None
                return usage
            end = start
        return None

    def has_error(self) -> bool:
        """Whether a stream ended with an error object or aborted, as vLLM's does when its engine dies or stops."""
        text = self.text
        return (b'"error"' in text and _stream_error(text) is not None) or has_abort(text)

    def ends_event(self) -> bool:
        """Whether the last bytes end an event, so that another event may follow."""
        text = self.text
        return not text or text.endswith(_EVENT_ENDS)


MAX_EVENT_BYTES: Final = 16 << 10  # of an incomplete event that is held back; vLLM's usage chunk has about 400 bytes

_USAGE: Final = b'"usage"'
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_event_ends: Final = re.compile(rb"\n\r?\n|\r\r").finditer
_event_end: Final = re.compile(rb"\n\r?\n|\r\r").search
_no_choices: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]').search
_OVERLAP: Final = 2  # bytes of an event's end that may have come with the read before

_decode_chunk: Final = msgspec.json.Decoder(StreamChunk).decode


class UsageFilter:
    """Removes from one event stream the usage chunk that its client did not request.

    Theory of operation. The usage chunk is an event with empty ``choices`` and a ``usage`` object. A read that begins
    and ends between two events and does not contain ``"usage"`` passes unchanged: one search and no copy. Otherwise
    complete events are checked, and the beginning of an incomplete event is held back until its end arrives. An event
    of more than ``MAX_EVENT_BYTES`` cannot be the usage chunk and passes as it arrives. All bytes of other events pass
    unchanged. A line ends with LF or CRLF, or with CR if the event ends with two of them.
    """

    __slots__ = ("_held", "_passed_end", "is_inside_event")

    def __init__(self) -> None:
        self.is_inside_event = False  # the bytes passed so far end inside an event
        self._held = b""  # beginning of an event
        self._passed_end = b""  # last bytes of a long event that passes as it arrives

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that may pass after ``data`` arrived: ``data`` itself if nothing changes."""
        if not self._held and not self.is_inside_event and data.endswith(_EVENT_ENDS) and _USAGE not in data:
            return data
        passed = b""
        if self.is_inside_event:
            end = self._end_of_long_event(data)
            if end < 0:
                return data
            passed, data = data[:end], data[end:]
        return passed + self._filter_events(self._held + data)

    def flush(self) -> bytes:
        """Return the incomplete event that is held back when the stream ends."""
        incomplete_event, self._held = self._held, b""
        return incomplete_event

    def _end_of_long_event(self, data: bytes) -> int:
        """Offset of the end of the long event; below 0 if it is not in ``data``."""
        overlap = self._passed_end
        match = _event_end(overlap + data)
        if match is None:
            self._passed_end = (overlap + data)[-_OVERLAP:]
            return -1
        self.is_inside_event = False
        self._passed_end = b""
        return match.end() - len(overlap)

    def _filter_events(self, data: bytes) -> bytes:
        """The complete events at the beginning of ``data`` without the usage chunk; holds back what follows them."""
        start = passed_until = 0
        passed: list[bytes] = []
        for match in _event_ends(data):
            end = match.end()
            if _is_usage_chunk(data[start:end]):
                passed.append(data[passed_until:start])
                passed_until = end
            start = end
        if len(data) - start > MAX_EVENT_BYTES:
            self.is_inside_event = True
            self._passed_end = data[-_OVERLAP:]
            start = len(data)
        self._held = data[start:]
        passed.append(data[passed_until:start])
        return b"".join(passed)


def _is_usage_chunk(event: bytes) -> bool:
    if _USAGE not in event or _no_choices(event) is None:
        return False
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    try:
        chunk = _decode_chunk(b"\n".join(lines))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return chunk.choices == [] and type(chunk.usage) is dict
