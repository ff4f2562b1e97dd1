"""Parses request bodies as far as placement needs, rejects expensive ones, and sets members of a body.

msgspec decodes straight into the structs of ``bodies.py`` and skips all other fields, so parsing costs little more than
one pass over the bytes. Validating a body is left to the engine: a field of an unexpected type is kept as it is and
becomes part of the canonical prompt. ``BodyError`` is raised only for bodies that cannot be placed: not JSON, not an
object, nested too deeply, or with a model that is not a string.

Theory of operation of ``is_shallow``. The depth of JSON is computed from its bytes in linear time. A body with no more
opening brackets than allowed levels cannot be deeper, and most bodies have few brackets. Otherwise all other bytes are
removed, and then pairs with nothing between them, one level in each round, as long as a round removes at least a
quarter: all rounds together then cost at most four times the first. If brackets are left, texts may contain some, so
texts are removed and the rounds repeated. Brackets that are left after a round that removed too little, such as those
of many deep and narrow values, are counted one by one. Brackets in texts that pair with brackets around them can hide
levels; then the decoder's own limit applies, which is just below Python's recursion limit.

Setting members. A member is set without encoding the rest of the body again. An engine should receive the bytes that
its client sent. If a body does not have the member, the member is appended. If it does, the body is joined from the raw
text of its members. Of several members with the same name, in whatever spelling, only the last is kept, which engines
take too (RFC 8259 leaves the choice open).

Looking for a member takes as long as decoding, which is too long for the event loop if the body is large. The process
that parses large bodies therefore returns the positions of the members that may be replaced (``Layout``), so that
setting them costs one copy.

``with_usage_requested`` asks an engine for the token usage of a stream whose client did not ask. A client asks with
``stream_options.include_usage``; a missing value, null and false mean that it does not. Its other options are kept.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from itertools import accumulate
from typing import Final

import msgspec

from routing.paths import BODIES, ChatBody, CompletionBody, Message, ParsedBody, ResponsesBody
from routing.types import BodyError

MAX_DEPTH: Final = 64  # nested lists and objects
LARGE_BYTES: Final = 256 << 10  # a body above this size is large, however few values it has
COUNTED_BYTES: Final = 10 << 10  # up to this size, a body is never large
MAX_INLINE_CONTAINERS: Final = 2048  # lists and objects of a body that is not large; up to 3 us each
MAX_INLINE_QUOTES: Final = 8192  # the same; up to 1 us for a text
MAX_UNCOUNTED: Final = 4096  # quotes, or opening brackets; a body with fewer of both needs no counting
MAX_TEXTS: Final = 1 << 19  # keys and other texts in one body
MAX_CONTAINERS: Final = 1 << 18  # lists and objects in one body
MAX_ROUND_RATIO: Final = 0.75  # of the length: rounds stop after one that leaves more

_ALL_BUT_OPENING: Final = bytes(set(range(256)) - set(b"[{"))
_ALL_BUT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_ALL_BUT_BRACKETS_AND_QUOTES: Final = bytes(set(range(256)) - set(b'[]{}"'))
_BRACES_TO_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_DEPTH_STEPS: Final = bytes.maketrans(b"[]", b"\x01\xff")  # as signed bytes: one level down, one level up


def is_large(body: bytes) -> bool:
    """Whether reading a body takes too long for the event loop. 0.7 us a KiB between 10 and 256 KiB, else nothing."""
    if not COUNTED_BYTES < len(body) <= LARGE_BYTES:
        return len(body) > LARGE_BYTES
    if body.count(b'"') > MAX_INLINE_QUOTES:
        return True
    if body.count(b"[") + body.count(b"{") <= MAX_INLINE_CONTAINERS:
        return False
    return _brackets_outside_texts(body).count(b"[") > MAX_INLINE_CONTAINERS


def is_shallow(body: bytes, levels: int = MAX_DEPTH) -> bool:
    """Whether a JSON text has at most ``levels`` nested levels. 0.5 us, or 0.4 us a KiB with many brackets."""
    if _occurs_at_most(body, levels, b"{", b"["):
        return True
    rounds, rest = _remove_pairs(body.translate(_BRACES_TO_BRACKETS, _ALL_BUT_BRACKETS), levels)
    if not rest:
        return True
    rounds, rest = _remove_pairs(_brackets_outside_texts(body), levels)
    return not rest or (rounds > 0 and _depth(rest) <= rounds)


def has_few_values(body: bytes) -> bool:
    """Whether a body has at most ``MAX_TEXTS`` and ``MAX_CONTAINERS``; small bodies are not counted.

    A body that is not JSON may pass, but parsing it is bounded too. 0.1 ms a MiB of text, 5 ms a MiB of many values.
    """
    if len(body) <= LARGE_BYTES or (
        _occurs_at_most(body, MAX_UNCOUNTED, b'"') and _occurs_at_most(body, MAX_UNCOUNTED, b"{", b"[")
    ):
        return True
    # A backslash before the quote that ends a text hides that quote from this count, but never one that begins a text.
    quotes = body.count(b'"')
    if quotes > 2 * MAX_TEXTS and quotes - body.count(b'\\"') > 2 * MAX_TEXTS:
        return False
    if len(body.translate(None, _ALL_BUT_OPENING)) <= MAX_CONTAINERS:
        return True
    return _brackets_outside_texts(body).count(b"[") <= MAX_CONTAINERS


def _occurs_at_most(body: bytes, limit: int, *delimiters: bytes) -> bool:
    """Whether these delimiters occur at most ``limit`` times; faster than counting where they are rare."""
    for delimiter in delimiters:
        at = body.find(delimiter)
        while at >= 0:
            limit -= 1
            if limit < 0:
                return False
            at = body.find(delimiter, at + 1)
    return True


def _remove_pairs(brackets: bytes, rounds: int) -> tuple[int, bytes]:
    """Remove empty pairs in at most ``rounds`` rounds, while that is fast; returns (rounds left, brackets left)."""
    rest = brackets
    if rest.count(b"[") != rest.count(b"]"):  # some are in texts
        return rounds, rest
    while rest and rounds > 0:
        before = len(rest)
        rest = rest.replace(b"[]", b"")
        rounds -= 1
        if len(rest) > MAX_ROUND_RATIO * before:
            break
    return rounds, rest


def _brackets_outside_texts(body: bytes) -> bytes:
    """The brackets that are not part of a text.

    Without escapes every quote begins or ends a text. Pairs of quotes with no bracket between them are removed first,
    which does not change the role of the others and leaves no text in most bodies.
    """
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    quoted = unescaped.translate(_BRACES_TO_BRACKETS, _ALL_BUT_BRACKETS_AND_QUOTES).replace(b'""', b"")
    return b"".join(quoted.split(b'"')[::2])


def _depth(brackets: bytes) -> int:
    """Nested levels of balanced brackets. 40 ns each."""
    return max(accumulate(array("b", brackets.translate(_DEPTH_STEPS))), default=0)


_decoders: Final = {path: msgspec.json.Decoder(body).decode for path, body in BODIES.items()}


def parse_body(path: str, body: bytes) -> ParsedBody:
    """Parse the body of a POST to ``path``; BodyError names the field. About 0.4 us a KiB."""
    if not has_few_values(body):
        raise BodyError(None, f"more than {MAX_TEXTS:,} texts and keys, or {MAX_CONTAINERS:,} lists and objects")
    parsed = _decode_body(path, body)
    if not is_shallow(body):
        raise BodyError(None, f"the JSON is nested in more than {MAX_DEPTH} levels")
    return parsed


def _decode_body(path: str, body: bytes) -> ParsedBody:
    decode = _decoders.get(path)
    if decode is None:
        raise BodyError(None, f"{path[:256]!r} is not an endpoint with a prompt")
    try:
        return decode(body)
    except msgspec.ValidationError:
        return _parse_untyped(BODIES[path], body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json_error(error) from None


# Claude Code names its session in the user id: ``user_HASH_account_UUID_session_UUID``, or a JSON object in a text.
_session_of_user: Final = re.compile(r'(?:_session_|"session_id" ?: ?")([A-Za-z0-9-]{8,64})(?:"|$)').search


def session_key(body: ParsedBody) -> str | None:
    """The first key that the body has.

    The order is ``prompt_cache_key``, ``session_id``, the id of ``conversation``, ``user``, ``metadata.session_id`` and
    the session in ``metadata.user_id``.
    """
    if type(body.prompt_cache_key) is str and body.prompt_cache_key:
        return body.prompt_cache_key
    if type(body.session_id) is str and body.session_id:
        return body.session_id
    if type(body) is ResponsesBody and (conversation := _conversation_id(body.conversation)):
        return conversation
    if type(body.user) is str and body.user:
        return body.user
    return _session_in_metadata(body.metadata) if type(body.metadata) is dict else None


def session_key_in(body: ParsedBody, field: str) -> str | None:
    """The session key in one of the schema's ``SESSION_FIELDS``."""
    if field == "conversation":
        return _conversation_id(body.conversation) if isinstance(body, ResponsesBody) else None
    owner, _, member = field.partition(".")
    value: object = getattr(body, owner)
    if member:
        metadata = value if isinstance(value, dict) else {}
        return _session_in_metadata({member: metadata.get(member)})
    return value if isinstance(value, str) and value else None


def _conversation_id(conversation: object) -> str | None:
    value = conversation.get("id") if isinstance(conversation, dict) else conversation
    return value if isinstance(value, str) and value else None


def _session_in_metadata(metadata: dict[str, object]) -> str | None:
    session_id, user_id = metadata.get("session_id"), metadata.get("user_id")
    if isinstance(session_id, str) and session_id:
        return session_id
    match = _session_of_user(user_id) if isinstance(user_id, str) else None
    return None if match is None else match[1]


def _parse_untyped(body_type: type[ParsedBody], body: bytes) -> ParsedBody:
    """Parse a body whose fields have other types than the API defines, keeping each value as it is."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json_error(error) from None
    if type(fields) is not dict:
        raise BodyError(None, "the body must be a JSON object")
    if not isinstance(fields.get("model"), str | None):
        raise BodyError("model", "expected a string")
    values = {name: fields[name] for name in body_type.__struct_fields__ if name in fields}
    if type(messages := values.get("messages")) is list:
        values["messages"] = [msgspec.convert(item, Message) if type(item) is dict else item for item in messages]
    return body_type(**values)


def not_json_error(error: Exception) -> BodyError:
    """Why a body is not JSON, without quoting its content."""
    if isinstance(error, RecursionError):
        return BodyError(None, "the JSON is nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return BodyError(None, "the JSON is not valid UTF-8")
    return BodyError(None, f"the body is not valid JSON: {error}")


Value = str | int | msgspec.Raw
REPLACEABLE: Final = frozenset(
    {
        *("cache_salt", "kv_transfer_params", "max_completion_tokens", "max_output_tokens", "max_tokens", "min_tokens"),
        *("model", "request_id", "stream", "stream_options"),
    }
)
# Members that are only read, to find out whether another replica may prefill the prompt (``proxy/prefill_leg.py``).
LOCATED: Final = frozenset({"best_of", "echo", "n", "prompt", "prompt_logprobs", "use_beam_search"})
_BLANKS: Final = b" \t\n\r"
_OPENING_BRACE: Final = ord("{")
_member_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode_json: Final = msgspec.json.Encoder().encode
_match_name: Final = re.compile(rb'[{,][ \t\n\r]*"(?:[^"\\]|\\.)*"[ \t\n\r]*:[ \t\n\r]*', re.DOTALL).match
_match_blanks: Final = re.compile(rb"[ \t\n\r]*").match


class Layout:
    """Byte offsets of the ``REPLACEABLE`` and ``LOCATED`` members in a JSON object."""

    def __init__(self, spans: dict[str, tuple[int, int]], end: int) -> None:
        self.spans = spans  # start and end of each value
        self.end = end  # where a member is appended: after the last one, or after the opening brace


def with_member(body: bytes, name: str, value: Value) -> bytes:
    """``body``, a JSON object, with the member ``name``, of letters and underscores, set to ``value``.

    Raises BodyError if the name of a member is not valid UTF-8, because parsing the body skipped it.
    """
    if may_have_member(body, name):
        members = _members_of(body)
        if name in members:
            return _encode_json(members | {name: msgspec.Raw(_encode_json(value))})
    end = body.rindex(b"}")
    start: bytes | memoryview = memoryview(body)[:end]  # a body may be large: it is copied once
    if body[end - 1] in _BLANKS:
        start = body[:end].rstrip(_BLANKS)
    comma = b"" if start[-1] == _OPENING_BRACE else b","  # a brace is there only in an empty object
    return b"".join((start, comma, _encode_json(name), b":", _encode_json(value), b"}"))


def without_member(body: bytes, name: str) -> bytes:
    """``body``, a JSON object, without the member ``name``; unchanged without one, or if its members cannot be read."""
    if not may_have_member(body, name):
        return body
    try:
        members = _members_of(body)
    except BodyError:
        return body
    return body if members.pop(name, None) is None else _encode_json(members)


def layout_of(body: bytes) -> Layout:
    """The layout of a JSON object; BodyError if two members have the same name, or as for ``with_member``.

    The decoder returns members in the order of the text. If a name occurs twice, the decoder returns fewer members than
    the text has, and either a value or the end of the object is not where it is expected.
    """
    spans, at = dict[str, tuple[int, int]](), _after_blanks(body, 0)
    end = at + 1
    for name, value in _members_of(body).items():
        match, data = _match_name(body, at), bytes(value)
        if match is None or not body.startswith(data, match.end()):
            break
        end = match.end() + len(data)
        if name in REPLACEABLE or name in LOCATED:
            spans[name] = (match.end(), end)
        at = _after_blanks(body, end)
    rest = body[_after_blanks(body, end) :]
    if rest[:1] != b"}" or rest[1:].strip(_BLANKS):
        raise BodyError(None, "two members of the object have the same name")
    return Layout(spans, end)


def with_members(body: bytes, values: Mapping[str, Value], layout: Layout) -> tuple[bytes, Layout]:
    """``body``, a JSON object of this layout, with these ``REPLACEABLE`` members set, and its new layout."""
    missing = {name: _encode_json(value) for name, value in values.items()}
    view, at, size = memoryview(body), 0, 0
    pieces: list[bytes | memoryview] = []
    spans: dict[str, tuple[int, int]] = {}
    for name, (start, end) in layout.spans.items():
        value = missing.pop(name, view[start:end])
        size += start - at
        pieces += (view[at:start], value)
        spans[name] = (size, size + len(value))
        size += len(value)
        at = end
    pieces.append(view[at : layout.end])
    size += layout.end - at
    comma = b"" if body[layout.end - 1] == _OPENING_BRACE else b","  # a brace is there only in an empty object
    for name, data in missing.items():
        key = b"%b%b:" % (comma, _encode_json(name))
        pieces += (key, data)
        spans[name] = (size + len(key), size + len(key) + len(data))
        size += len(key) + len(data)
        comma = b","
    pieces.append(view[layout.end :])
    return b"".join(pieces), Layout(spans, size)


def raw_member(body: bytes, name: str) -> msgspec.Raw | None:
    """The raw member ``name`` of a JSON object, the last of several; None without one. Raises as ``with_member``."""
    return _members_of(body).get(name) if may_have_member(body, name) else None


def may_have_member(body: bytes, name: str) -> bool:
    """False if a JSON object cannot have the member ``name``, however it is spelled."""
    return name.encode() in body or (b"\\" in body and b"\\u00" in body)  # the only escape of a letter


def _after_blanks(body: bytes, at: int) -> int:
    match = _match_blanks(body, at)
    return match.end() if match else at


def _members_of(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _member_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json_error(error) from None


_STREAM_OPTIONS: Final = "stream_options"
_MAX_OPTIONS_BYTES: Final = 4096
_INCLUDE_USAGE: Final = msgspec.Raw(b'{"include_usage":true}')


def omits_usage(body: ParsedBody) -> bool:
    """Whether a body asks for a stream without usage, and the router may request the usage for itself.

    It may not with ``continuous_usage_stats``: every chunk would then have usage that the client does not expect.
    """
    if body.stream is not True or not isinstance(body, ChatBody | CompletionBody):
        return False
    options = body.stream_options
    if options is None:
        return True
    if type(options) is not dict or options.get("continuous_usage_stats"):
        return False
    include_usage = options.get("include_usage")
    return include_usage is None or include_usage is False


def with_usage_requested(body: bytes, layout: Layout | None = None) -> bytes:
    """A body for which ``omits_usage`` is true, with ``include_usage`` set.

    Unchanged if its members cannot be read, or if a body with a layout has unusually long stream options.
    """
    try:
        if layout is None:
            return with_member(body, _STREAM_OPTIONS, _with_usage(raw_member(body, _STREAM_OPTIONS)))
        start, end = layout.spans.get(_STREAM_OPTIONS, (0, 0))
        if end - start > _MAX_OPTIONS_BYTES:
            return body
        options = msgspec.Raw(body[start:end]) if end else None
        return with_members(body, {_STREAM_OPTIONS: _with_usage(options)}, layout)[0]
    except BodyError:
        return body


def _with_usage(options: msgspec.Raw | None) -> msgspec.Raw:
    if options is None or bytes(options) == b"null":
        return _INCLUDE_USAGE
    return msgspec.Raw(with_member(bytes(options), "include_usage", True))
