"""How deep a body's JSON is nested, computed from its bytes in linear time; the body was decoded before, so it is JSON.

Theory of operation. A body with no more opening brackets than levels are allowed is not deeper, and most bodies have
few: that costs a search. Of others only the brackets are kept, and pairs with nothing between them are removed, level
by level, as long as each round removes a quarter of what is left: all rounds together then cost at most four times the
first. If something is left, texts may hold brackets, so the texts are removed and the same is done again. What then
still shrinks too slowly, such as many deep and narrow values, is counted bracket by bracket.

Brackets in texts that pair with those around them can hide levels. Then the decoder's own bound holds, which is just
below Python's limit of recursion.

A request's body, read only as far as placing it needs.

Theory of operation. msgspec decodes straight into the structs of ``bodies.py`` and skips every other field, so a body
costs little more than one pass over its bytes. The engine, not the router, is the judge of a body: a field of an
unexpected type is kept as it is and becomes part of the canonical prompt. Only what leaves nothing to place is a
``BodyError``: no JSON, not an object, nested beyond reason, or a model that is no string.
"""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import Final

import msgspec

from routing.prompt.bodies import BODIES, Message, ParsedBody
from routing.types import BodyError

MAX_DEPTH: Final = 64  # lists and objects in one another
LARGE_BYTES: Final = 256 << 10  # of a body whose values are counted before they are read
FEW: Final = 4096  # quotes, or opening brackets, of a body that has no need of being counted
MAX_TEXTS: Final = 1 << 19  # keys and other texts in one body
MAX_CONTAINERS: Final = 1 << 18  # lists and objects in one body
SHRINKS: Final = 0.75  # of its length: what a round has to leave at most, or rounds end

_ALL_BUT_OPENING: Final = bytes(set(range(256)) - set(b"[{"))
_ALL_BUT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_ALL_BUT_BRACKETS_AND_QUOTES: Final = bytes(set(range(256)) - set(b'[]{}"'))
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
_STEPS: Final = bytes.maketrans(b"[]", b"\x01\xff")  # as signed bytes: one level down, one level up


def is_shallow(body: bytes, most: int = MAX_DEPTH) -> bool:
    """Whether a JSON text is nested in at most ``most`` levels. 0.5 us; 0.4 us a KiB of those with many brackets."""
    if _has_few(body, most, b"{", b"["):
        return True
    rounds, left = _without_pairs(body.translate(_ONE_KIND, _ALL_BUT_BRACKETS), most)
    if not left:
        return True
    rounds, left = _without_pairs(_outside_texts(body), most)
    return not left or (rounds > 0 and _depth(left) <= rounds)


def has_few_values(body: bytes) -> bool:
    """Whether a body has at most ``MAX_TEXTS`` and ``MAX_CONTAINERS``, as far as its size does not say so.

    Of bodies that are no JSON it says no more than that reading them is bounded. 0.1 ms a MiB of text, 5 of many
    values.
    """
    if len(body) <= LARGE_BYTES or (_has_few(body, FEW, b'"') and _has_few(body, FEW, b"{", b"[")):
        return True
    # A backslash before a quote that ends a text hides that quote, and never the one that begins it.
    quotes = body.count(b'"')
    if quotes > 2 * MAX_TEXTS and quotes - body.count(b'\\"') > 2 * MAX_TEXTS:
        return False
    if len(body.translate(None, _ALL_BUT_OPENING)) <= MAX_CONTAINERS:
        return True
    return _outside_texts(body).count(b"[") <= MAX_CONTAINERS


def _has_few(body: bytes, most: int, *signs: bytes) -> bool:
    """Whether there are at most so many of these signs; much faster than counting where there are few."""
    for sign in signs:
        at = body.find(sign)
        while at >= 0:
            most -= 1
            if most < 0:
                return False
            at = body.find(sign, at + 1)
    return True


def _without_pairs(brackets: bytes, rounds: int) -> tuple[int, bytes]:
    """Remove empty pairs in at most ``rounds`` rounds, while that is fast: the rounds that remain, what is left."""
    left = brackets
    if left.count(b"[") != left.count(b"]"):  # texts hold some
        return rounds, left
    while left and rounds > 0:
        before = len(left)
        left = left.replace(b"[]", b"")
        rounds -= 1
        if len(left) > SHRINKS * before:
            break
    return rounds, left


def _outside_texts(body: bytes) -> bytes:
    """The brackets that are not part of a text.

    Without escapes every quote begins or ends a text. Two quotes with no bracket between them are removed first, which
    leaves all others what they were: of most bodies no text is left then.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    quoted = plain.translate(_ONE_KIND, _ALL_BUT_BRACKETS_AND_QUOTES).replace(b'""', b"")
    return b"".join(quoted.split(b'"')[::2])


def _depth(brackets: bytes) -> int:
    """Levels of balanced brackets. 40 ns each."""
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
        raise BodyError(None, f"no prompt is read from {path[:256]!r}")
    try:
        return decode(body)
    except msgspec.ValidationError:
        return _parse_odd(BODIES[path], body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None


def session_key(body: ParsedBody) -> str | None:
    """The first that the body names: ``prompt_cache_key``, ``session_id``, ``user``, ``metadata.session_id``."""
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


def _parse_odd(kind: type[ParsedBody], body: bytes) -> ParsedBody:
    """Parse a body whose fields have other types than the API says, keeping each as it is."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None
    if type(fields) is not dict:
        raise BodyError(None, "the body must be a JSON object")
    if not isinstance(fields.get("model"), str | None):
        raise BodyError("model", "expected a string")
    known = {name: fields[name] for name in kind.__struct_fields__ if name in fields}
    if type(messages := known.get("messages")) is list:
        known["messages"] = [msgspec.convert(it, Message) if type(it) is dict else it for it in messages]
    return kind(**known)


def not_json(error: Exception) -> BodyError:
    """Why a body is no JSON, without a word of what is in it."""
    if isinstance(error, RecursionError):
        return BodyError(None, "the JSON is nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return BodyError(None, "the JSON is not valid UTF-8")
    return BodyError(None, f"the body is not valid JSON: {error}")
