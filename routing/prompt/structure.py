"""Prompt structure: which parts a prompt begins with and which of them may vary between requests, without any text.

Theory of operation. The prefix that a cache can share ends at the first byte in which two prompts differ, so one date
in the first line of a system prompt prevents reuse of everything after it. To find such places later without storing
text, the first ``DESCRIBED_BYTES`` of the canonical prompt are described in three ways, each with keyed hashes. If the
prompt is longer, the pieces in its last ``TAIL_BYTES`` are described too.

- segments: tools and messages, each with a hash of its bytes and a hash of its letter counts;
- pieces: parts of a segment that end at lines and sentences chosen by their content. After a difference of any length
  the pieces of two prompts are equal again, which shows how much is stable after it;
- volatile tokens: texts that look like a date, a time, an id or a number, by class.

The client's tool list is also described as it was sent, because the canonical prompt sorts its keys and an engine does
not. The result contains only lengths, offsets, counts, classes of ``VOLATILE`` and hashes keyed with the fleet's
secret.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from routing.prompt.canonical import CONTENT, DOCUMENTS, MESSAGE, PREVIOUS, UNKNOWN, CanonicalPrompt

DESCRIBED_BYTES = 32 << 10
TAIL_BYTES = 4 << 10
MAX_TAIL_PIECES = 24
MAX_SEGMENTS = 48
MAX_PIECES = 96
MAX_VOLATILE = 64
MAX_NUMBERS = 24  # of these, plain numbers: the most common and least useful class
MAX_MATCHES = 256  # volatile tokens examined in one segment

Digest = Callable[[bytes], str]  # keyed, 16 hexadecimal digits

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_MIN_PIECE, _MAX_PIECE, _LONG_LINE = 48, 1024, 256  # bytes
# Counting all letters would cost three times as much.
_COUNTED_LETTERS = tuple(bytes([letter]) for letter in b"etaoinshrdlu0123456789")
_MONTH = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_CLOCK = rb"\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?: ?[AaPp][Mm]\b)?(?:Z\b| ?[+-]\d\d:?\d\d)?"
# The first pattern that matches gives the class. Each repetition is bounded or of one kind of byte.
_PATTERNS = {
    "uuid": rb"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "date": (
        rb"\d{4}[-/]\d\d[-/]\d\d(?:[T ]" + _CLOCK + rb")?|\d{1,2}[./]\d{1,2}[./]\d{4}|" + _CLOCK + rb"|"
        rb"\d{1,2}(?:st|nd|rd|th)? " + _MONTH + rb",? \d{4}|" + _MONTH + rb" \d{1,2}(?:st|nd|rd|th)?,? \d{4}"
    ),
    "epoch": rb"1\d{9}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?(?![0-9A-Za-z])",
    "hex": rb"(?=[a-f]{0,64}\d)(?=\d{0,64}[a-f])[0-9a-f]{8,64}(?![0-9A-Za-z])"
    rb"|(?=[A-F]{0,64}\d)(?=\d{0,64}[A-F])[0-9A-F]{8,64}(?![0-9A-Za-z])",
    "id": rb"(?=[A-Za-z_-]{0,40}\d)(?=[0-9_-]{0,40}[A-Za-z])[A-Za-z0-9_-]{16,64}(?![0-9A-Za-z])",
    "number": rb"\d{1,32}(?:[.,]\d{1,32}){0,4}",
}
VOLATILE = tuple(_PATTERNS)
_match_volatile = re.compile(
    b"|".join(b"(?P<%b>%b)" % (name.encode(), pattern) for name, pattern in _PATTERNS.items())
).match
_find_digits = re.compile(rb"[0-9]").finditer
_match_month = re.compile(_MONTH).fullmatch
_WORD_BYTES = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-"
_encode_json = msgspec.json.Encoder().encode
_encode_sorted_json = msgspec.json.Encoder(order="deterministic").encode


class Segment(Struct, frozen=True, gc=False):
    """The tool list, or one message."""

    kind: str  # "tools", a role of ``_ROLES``, "prompt" for a completion's prompt, "other"
    at: int  # offset in the canonical prompt
    bytes: int
    hash: str
    letters: str  # hash of the counts of common letters and digits: equal for the same content in another order


class Volatile(Struct, frozen=True, gc=False):
    """A text of a class that rarely stays the same between requests."""

    kind: str  # of ``VOLATILE``
    at: int
    bytes: int
    hash: str


class ToolList(Struct, frozen=True, gc=False):
    """The tool list as it was sent."""

    count: int
    names: str  # of the sorted names
    definitions: str  # of the definitions, whatever their order and the order of their keys
    sent: str  # of the whole list as it was sent


class PromptStructure(Struct, frozen=True, gc=False):
    """Structure of the beginning of one request's prompt."""

    bytes: int  # of the whole canonical prompt
    described: int  # of these, the first bytes that are described
    messages: int
    session: str | None
    tools: ToolList | None
    segments: list[Segment]
    pieces: list[tuple[int, int, str]]  # (offset, bytes, hash), ascending
    volatile: list[Volatile]
    tail: list[tuple[int, int, str]]  # pieces of the end of a prompt that is not described as a whole


def describe_structure(prompt: CanonicalPrompt, tools: Any, session: str | None, digest: Digest) -> PromptStructure:
    """Describe a prompt; ``tools`` as the client sent them. Takes 1 ms for 32 KiB and more: for few requests only."""
    data = prompt.data[:DESCRIBED_BYTES]
    segments: list[Segment] = []
    pieces: list[tuple[int, int, str]] = []
    volatile: list[Volatile] = []
    numbers = 0
    for kind, start, end in _segment_spans(prompt, len(data)):
        content = data[start:end]
        segments.append(Segment(kind, start, end - start, digest(content), digest(_letter_counts(content))))
        for at, length in _cut_pieces(content, MAX_PIECES - len(pieces)):
            pieces.append((start + at, length, digest(content[at : at + length])))
        for name, at, length in _volatile_tokens(content):
            numbers += name == "number"
            if len(volatile) < MAX_VOLATILE and (name != "number" or numbers <= MAX_NUMBERS):
                volatile.append(Volatile(name, start + at, length, digest(content[at : at + length])))
        if len(segments) == MAX_SEGMENTS:
            break
    described = segments[-1].at + segments[-1].bytes if segments else 0
    messages = len(prompt.message_ends)
    hashed_session = digest(b"session " + session.encode("utf-8", "replace")) if session else None
    sent = _tool_list(tools, digest)
    tail = _tail_pieces(prompt, digest)
    return PromptStructure(
        len(prompt.data), described, messages, hashed_session, sent, segments, pieces, volatile, tail
    )


def _tail_pieces(prompt: CanonicalPrompt, digest: Digest) -> list[tuple[int, int, str]]:
    """Pieces of the messages at the end, after the described part."""
    data, ends = prompt.data, prompt.message_ends
    first = max(DESCRIBED_BYTES, len(data) - TAIL_BYTES)
    pieces: list[tuple[int, int, str]] = []
    number = bisect_right(ends, first)
    start = ends[number - 1] if number else prompt.tools_end
    while first < len(data) and number < len(ends) and len(pieces) < MAX_TAIL_PIECES:
        begin = max(_message_kind(data, start)[1], first)
        content = data[begin : ends[number]]
        for at, length in _cut_pieces(content, MAX_TAIL_PIECES - len(pieces)):
            pieces.append((begin + at, length, digest(content[at : at + length])))
        start, number = ends[number], number + 1
    return pieces


def _segment_spans(prompt: CanonicalPrompt, limit: int) -> Iterator[tuple[str, int, int]]:
    """(kind, start, end) of the segments that begin before ``limit``, where the last one is cut."""
    start = prompt.tools_end
    if start:
        yield "tools", 0, min(start, limit)
    for end in prompt.message_ends:
        if start >= limit:
            return
        if prompt.data.startswith(DOCUMENTS, start):
            message = prompt.data.index(MESSAGE, start)
            yield "other", start + 1, min(message, limit)
            start = message
        kind, content = _message_kind(prompt.data, start)
        yield kind, min(content, limit), min(end, limit)
        start = end


def _message_kind(data: bytes, start: int) -> tuple[str, int]:
    """The kind of a message, and the offset of its content."""
    if data[start : start + 2] == MESSAGE + UNKNOWN:
        return "other", start + 2
    if data.startswith(PREVIOUS, start):
        return "other", start + 1
    content = data.find(CONTENT, start)
    role = data[start + 1 : content].decode("utf-8", "replace")
    return (role if role in _ROLES else "other") if role else "prompt", content + 1


def _letter_counts(content: bytes) -> bytes:
    count = content.count
    return b",".join([b"%d" % count(letter) for letter in _COUNTED_LETTERS])


def _cut_pieces(content: bytes, max_pieces: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of at most ``max_pieces`` pieces; the last one takes the rest."""
    start = at = 0
    for line in content.splitlines(keepends=True):
        for part in (line,) if len(line) < _LONG_LINE else re.split(rb"(?<=[.!?}] )", line):
            at += len(part)
            length = at - start
            is_edge = length >= _MAX_PIECE or (length >= _MIN_PIECE and not xxh3_64_intdigest(part) & 3)
            if is_edge and max_pieces > 1:
                yield start, length
                start = at
                max_pieces -= 1
    if start < len(content) and max_pieces > 0:
        yield start, len(content) - start


def _volatile_tokens(content: bytes) -> Iterator[tuple[str, int, int]]:
    """(class, offset, length) of volatile tokens, ascending; found by their digits, which each of them has."""
    examined_end = matches = 0
    for digit in _find_digits(content):
        at = digit.start()
        if at < examined_end:
            continue
        match = _match_volatile(content, _token_start(content, at, examined_end)) or _match_volatile(content, at)
        if match is None:
            continue
        yield match.lastgroup or "", match.start(), match.end() - match.start()
        examined_end, matches = match.end(), matches + 1
        if matches == MAX_MATCHES:
            return


def _token_start(content: bytes, digit: int, examined_end: int) -> int:
    """Start of the word that contains a digit, or of a month's name before it."""
    before = content[max(examined_end, digit - 64) : digit]
    word = before.rstrip(_WORD_BYTES)
    if before.endswith(b" "):
        before = before[:-1]
        word = before.rstrip(_WORD_BYTES)
        return digit - 1 - len(before) + len(word) if _match_month(before[len(word) :]) else digit
    return digit - len(before) + len(word)


def _tool_list(tools: Any, digest: Digest) -> ToolList | None:
    """None without tools, or if they are nested too deeply to be encoded."""
    if type(tools) is not list or not tools:
        return None
    try:
        definitions = sorted(map(_encode_sorted_json, tools))
        sent = _encode_json(tools)
    except (RecursionError, msgspec.EncodeError, UnicodeEncodeError, TypeError):
        return None
    names = b"\n".join(sorted(_encode_sorted_json(_tool_name(tool)) for tool in tools))
    return ToolList(len(tools), digest(names), digest(b"\n".join(definitions)), digest(sent))


def _tool_name(tool: Any) -> Any:
    """The name of a tool, in the format of either API; None without one."""
    if type(tool) is not dict:
        return None
    function = tool.get("function")
    return function.get("name") if type(function) is dict else tool.get("name")
