"""Reads token usage, first tokens, aborted generations and errors from responses, and removes unrequested usage events.

A short JSON response is decoded as a whole; otherwise only the end of the body is searched. ``"usage"`` with its quotes
cannot be part of generated text, because JSON escapes the quotes there.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from routing.http.response_json import ParsedResponse, StreamChunk, StreamEvent, Usage

MAX_DECODED_BYTES: Final = 16 << 10  # up to about here, decoding a response is faster than searching it

_decode_usage: Final = msgspec.json.Decoder(Usage).decode
_decode_response: Final = msgspec.json.Decoder(ParsedResponse).decode
_usage: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})').match
_stream_error: Final = re.compile(rb'(?:^|\n)data:\s*\{\s*(?:"type"\s*:\s*"error"\s*,\s*)?"error"\s*:').search
# The last event of a stream.
_stream_end: Final = re.compile(
    rb'(?:^|[\r\n])data: ?\[DONE\]|"type"\s*:\s*"(?:message_stop|response\.(?:completed|incomplete|failed))"'
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


def generated_tokens(usage: Usage) -> int | None:
    """Tokens that were generated; None: not reported."""
    return usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens


def has_details(usage: Usage) -> bool:
    """Whether ``prompt_tokens_details`` report the cached tokens, as chats and completions do if they are enabled."""
    return usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None


def cached_of(usage: Usage) -> int | None:
    """Cached tokens as reported, which may be more than the prompt has; None: not reported."""
    details = usage.prompt_tokens_details or usage.input_tokens_details
    return usage.cache_read_input_tokens if details is None else details.cached_tokens


def prompt_and_cached(usage: Usage) -> tuple[int | None, int | None]:
    """Tokens of the prompt, and how many of them came from the prefix cache; None: not reported."""
    prompt, cached = usage.prompt_tokens, cached_of(usage)
    if prompt is None and usage.input_tokens is not None:
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return prompt, None if cached is None or cached > (prompt or 0) else cached


MAX_PRELUDE_BYTES: Final = 1 << 20  # held back before the first token; the responses API repeats instructions and tools

# Events of the responses API and the messages API that come before the first token. What adds an item, a part or a
# block also names its type: that of a tool call is its first token.
_PRELUDES: Final = frozenset(
    {"response.created", "response.queued", "response.in_progress", "response.output_item.added"}
    | {"response.content_part.added", "response.reasoning_part.added", "response.reasoning_summary_part.added"}
    | {"message_start", "content_block_start", "ping"}
)
_EMPTY_PARTS: Final = frozenset({"message", "reasoning", "output_text", "reasoning_text", "text", "thinking"})
_NO_DATA: Final = (b":", b"event:", b"id:", b"retry:")
_COLON: Final = ord(":")
_decode_event: Final = msgspec.json.Decoder(StreamEvent).decode


class Prelude:
    """The beginning of a stream, up to its first token: a delta with content, reasoning or a tool call.

    Comments, blank lines, roles, and the events with which a stream is created come before it. Everything that is not
    known to come before it counts as the first token: the end of the stream, errors, and events of other APIs.
    """

    def __init__(self) -> None:
        self.data = bytearray()  # all bytes so far
        self._line_start = 0  # of the incomplete line at the end

    def add(self, data: bytes | bytearray) -> bool:
        """Add bytes of the stream; True if they bring the first token, or more than ``MAX_PRELUDE_BYTES`` are held."""
        held, at = self.data, len(self.data)
        held += data
        while (end := held.find(b"\n", at)) >= 0 or (end := held.find(b"\r", at)) >= 0:
            if not _precedes_token(bytes(held[self._line_start : end])):
                return True
            self._line_start = at = end + 1
        return len(held) > MAX_PRELUDE_BYTES


def has_token(events: bytes | bytearray) -> bool:
    """Whether the beginning of a stream includes its first token."""
    return Prelude().add(events)


def is_comment(data: bytes, start: int = 0) -> bool:
    """Whether bytes of a stream are comments only, which engines send to keep idle connections open."""
    return data[start] == _COLON and b"\ndata:" not in data and b"\rdata:" not in data


def _precedes_token(line: bytes) -> bool:
    """Whether a line of a stream comes before the first token."""
    if not line.startswith(b"data:"):
        return not line.rstrip() or line.startswith(_NO_DATA)
    try:
        event: StreamEvent = _decode_event(line[5:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return not line[5:].strip()
    if event.choices is None or event.error is not None:
        part = event.content_block or event.item or event.part
        return event.type in _PRELUDES and (part is None or part.type in _EMPTY_PARTS)
    for choice in event.choices:
        if choice.finish_reason is not None or choice.text or choice.token_ids:
            return False
        for name, value in (choice.delta or {}).items():
            if value and name != "role":
                return False
    return event.usage is None or bool(event.choices)


TAIL_BYTES: Final = 4096  # kept of each of the last four reads: usage and [DONE] may arrive separately, each in two
SHORT_BYTES: Final = 128  # a shorter read is joined to the one before, until that is no longer short


class ResponseTail:
    """The last four reads of a response's body, searched once when the response is complete.

    Reads are stored in attributes, because ``add`` runs for each read of a stream.
    """

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
        """The end of the body."""
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

    def has_ended(self) -> bool:
        """Whether the last event of a stream has arrived."""
        return _stream_end(self.text) is not None

    def ends_event(self) -> bool:
        """Whether the last bytes end an event, so that another event may follow."""
        text = self.text
        return not text or text.endswith(_EVENT_ENDS)


MAX_EVENT_BYTES: Final = 16 << 10  # of an incomplete event that is held back; vLLM's usage chunk has about 400 bytes

USAGE: Final = b'"usage"'
FINISHED: Final = b'"finish_reason":"'  # as vLLM writes it
_FINGERPRINT: Final = b'"system_fingerprint":'
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
event_ends: Final = re.compile(rb"\n\r?\n|\r\r").finditer
_event_end: Final = re.compile(rb"\n\r?\n|\r\r").search
_no_choices: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]').search
_OVERLAP: Final = 2  # bytes of an event's end that may have come with the read before

_decode_chunk: Final = msgspec.json.Decoder(StreamChunk).decode


class Fingerprint:
    """The ``system_fingerprint`` of an engine, from its last usage chunk; None: not known."""

    def __init__(self) -> None:
        self.value: object = None


class UsageFilter:
    """Removes from one event stream the usage chunk that its client did not request.

    Theory of operation. The usage chunk is an event with empty ``choices`` and a ``usage`` object. A read that begins
    and ends between two events and contains neither ``"usage"`` nor a finish reason passes unchanged: two searches and
    no copy. Otherwise complete events are checked, and the beginning of an incomplete event is held back until its end
    arrives. An event of more than ``MAX_EVENT_BYTES`` cannot be the usage chunk and passes as it arrives. All bytes of
    other events pass unchanged, but for the fingerprint: vLLM sends ``system_fingerprint`` with its last chunk. That is
    the usage chunk, or, in a stream without one, the chunk with the finish reason. So an event with a finish reason is
    held back until the next event, which is the usage chunk, and gets its fingerprint. The earlier choices of a stream
    with several get the one of the engine's stream before. A line ends with LF or CRLF, or with CR if the event ends
    with two of them.
    """

    def __init__(self, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self.is_inside_event = False  # the bytes passed so far end inside an event
        self._held = b""  # beginning of an event, or an event with a finish reason
        self._passed_end = b""  # last bytes of a long event that passes as it arrives

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that may pass after ``data`` arrived: ``data`` itself if nothing changes."""
        if (
            not self._held
            and not self.is_inside_event
            and data.endswith(_EVENT_ENDS)
            and data.rfind(USAGE) < 0  # twice as fast as ``in``
            and data.rfind(FINISHED) < 0
        ):
            return data
        passed = b""
        if self.is_inside_event:
            end = self._end_of_long_event(data)
            if end < 0:
                return data
            passed, data = data[:end], data[end:]
        return passed + self._filter_events(self._held + data)

    @property
    def is_idle(self) -> bool:
        """Whether the next event passes unchanged unless it has usage or a finish reason."""
        return not self._held and not self.is_inside_event

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
        start = passed_until = finished = 0  # beginnings of the current event, of what may pass, of the event before
        passed: list[bytes] = []
        for match in event_ends(data):
            end = match.end()
            chunk = _usage_chunk(data[start:end])
            if chunk is not None:
                self._fingerprint.value = chunk.system_fingerprint
            if FINISHED in data[finished:start]:
                passed.append(data[passed_until:finished])
                passed.append(_with_fingerprint(data[finished:start], self._fingerprint.value))
                passed_until = start
            finished, start = start, end
            if chunk is not None:
                passed.append(data[passed_until:finished])
                passed_until = finished = end
        if len(data) - start > MAX_EVENT_BYTES:
            self.is_inside_event = True
            self._passed_end = data[-_OVERLAP:]
            start = len(data)
        elif passed_until <= finished < start <= finished + MAX_EVENT_BYTES and FINISHED in data[finished:start]:
            start = finished
        self._held = data[start:]
        passed.append(data[passed_until:start])
        return b"".join(passed)


def _usage_chunk(event: bytes) -> StreamChunk | None:
    """The usage chunk; None for any other event."""
    if USAGE not in event or _no_choices(event) is None:
        return None
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    try:
        chunk: StreamChunk = _decode_chunk(b"\n".join(lines))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return chunk if chunk.choices == [] and type(chunk.usage) is dict else None


def _with_fingerprint(event: bytes, fingerprint: object) -> bytes:
    """An event with a finish reason, with the fingerprint at its end unless it has one or none is known."""
    if not isinstance(fingerprint, str) or _FINGERPRINT in event:
        return event
    end = event.rindex(b"}")
    return b"".join((event[:end], b",", _FINGERPRINT, msgspec.json.encode(fingerprint), event[end:]))
