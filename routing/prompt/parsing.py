"""Parses request bodies as far as placement needs, and rejects those with too deep nesting or too many values.

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
"""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import Final

import msgspec

from routing.prompt.bodies import BODIES, Message, ParsedBody
from routing.types import BodyError

MAX_DEPTH: Final = 64  # nested lists and objects
LARGE_BYTES: Final = 256 << 10  # above this size, values are counted before a body is parsed
FEW: Final = 4096  # quotes, or opening brackets, of a body whose values need no counting
MAX_TEXTS: Final = 1 << 19  # keys and other texts in one body
MAX_CONTAINERS: Final = 1 << 18  # lists and objects in one body
MAX_ROUND_RATIO: Final = 0.75  # of the length: rounds stop after one that leaves more

_ALL_BUT_OPENING: Final = bytes(set(range(256)) - set(b"[{"))
_ALL_BUT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_ALL_BUT_BRACKETS_AND_QUOTES: Final = bytes(set(range(256)) - set(b'[]{}"'))
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
_STEPS: Final = bytes.maketrans(b"[]", b"\x01\xff")  # as signed bytes: one level down, one level up


def is_shallow(body: bytes, levels: int = MAX_DEPTH) -> bool:
    """Whether a JSON text has at most ``levels`` nested levels. 0.5 us, or 0.4 us a KiB with many brackets."""
    if _has_few(body, levels, b"{", b"["):
        return True
    rounds, rest = _without_pairs(body.translate(_ONE_KIND, _ALL_BUT_BRACKETS), levels)
    if not rest:
        return True
    rounds, rest = _without_pairs(_outside_texts(body), levels)
    return not rest or (rounds > 0 and _depth(rest) <= rounds)


def has_few_values(body: bytes) -> bool:
    """Whether a body has at most ``MAX_TEXTS`` and ``MAX_CONTAINERS``; small bodies are not counted.

    A body that is not JSON may pass, but parsing it is bounded too. 0.1 ms a MiB of text, 5 ms a MiB of many values.
    """
    if len(body) <= LARGE_BYTES or (_has_few(body, FEW, b'"') and _has_few(body, FEW, b"{", b"[")):
        return True
    # A backslash before the quote that ends a text hides that quote from this count, but never one that begins a text.
    quotes = body.count(b'"')
    if quotes > 2 * MAX_TEXTS and quotes - body.count(b'\\"') > 2 * MAX_TEXTS:
        return False
    if len(body.translate(None, _ALL_BUT_OPENING)) <= MAX_CONTAINERS:
        return True
    return _outside_texts(body).count(b"[") <= MAX_CONTAINERS


def _has_few(body: bytes, limit: int, *signs: bytes) -> bool:
    """Whether these signs occur at most ``limit`` times; faster than counting where they are rare."""
    for sign in signs:
        at = body.find(sign)
        while at >= 0:
            limit -= 1
            if limit < 0:
                return False
            at = body.find(sign, at + 1)
    return True


def _without_pairs(brackets: bytes, rounds: int) -> tuple[int, bytes]:
    """Remove empty pairs in at most ``rounds`` rounds, while that is fast: the unused rounds, and the rest."""
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


def _outside_texts(body: bytes) -> bytes:
    """The brackets that are not part of a text.

    Without escapes every quote begins or ends a text. Pairs of quotes with no bracket between them are removed first,
    which does not change the role of the others and leaves no text in most bodies.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    quoted = plain.translate(_ONE_KIND, _ALL_BUT_BRACKETS_AND_QUOTES).replace(b'""', b"")
    return b"".join(quoted.split(b'"')[::2])


def _depth(brackets: bytes) -> int:
    """Nested levels of balanced brackets. 40 ns each."""
    return max(accumulate(array("b", brackets.translate(_STEPS))), default=0)


_decoders: Final = {path: msgspec.json.Decoder(body).decode for path, body in BODIES.items()}


def parse_body(path: str, body: bytes) -> ParsedBody:
    """Parse the body of a POST to ``path``; BodyError names the field. About 0.4 us a KiB."""
    if not has_few_values(body):
        raise BodyError(None, f"more than {MAX_TEXTS:,} texts and keys, or {MAX_CONTAINERS:,} lists and objects")
    parsed = _decoded(path, body)
    if not is_shallow(body):
        raise BodyError(None, f"the JSON is nested in more than {MAX_DEPTH} levels")
    return parsed


def _decoded(path: str, body: bytes) -> ParsedBody:
    decode = _decoders.get(path)
    if decode is None:
        raise BodyError(None, f"{path[:256]!r} is not an endpoint with a prompt")
    try:
        return decode(body)
    except msgspec.ValidationError:
        return _parse_untyped(BODIES[path], body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json_error(error) from None


def session_key(body: ParsedBody) -> str | None:
    """The first of ``prompt_cache_key``, ``session_id``, ``user`` and ``metadata.session_id`` that the body has."""
    if type(body.prompt_cache_key) is str and body.prompt_cache_key:
        return body.prompt_cache_key
    if type(body.session_id) is str and body.session_id:
        return body.session_id
    if type(body.user) is str and body.user:
        return body.user
    if type(body.metadata) is dict:
        session_id = body.metadata.get("session_id")
        if type(session_id) is str and session_id:
            return session_id
    return None


def _parse_untyped(kind: type[ParsedBody], body: bytes) -> ParsedBody:
    """Parse a body whose fields have other types than the API defines, keeping each value as it is."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json_error(error) from None
    if type(fields) is not dict:
        raise BodyError(None, "the body must be a JSON object")
    if not isinstance(fields.get("model"), str | None):
        raise BodyError("model", "expected a string")
    known = {name: fields[name] for name in kind.__struct_fields__ if name in fields}
    if type(messages := known.get("messages")) is list:
        known["messages"] = [msgspec.convert(item, Message) if type(item) is dict else item for item in messages]
    return kind(**known)


def not_json_error(error: Exception) -> BodyError:
    """Why a body is not JSON, without quoting its content."""
    if isinstance(error, RecursionError):
        return BodyError(None, "the JSON is nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return BodyError(None, "the JSON is not valid UTF-8")
    return BodyError(None, f"the body is not valid JSON: {error}")
