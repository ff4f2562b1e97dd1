"""A request's body, read only as far as placing it needs.

Theory of operation. msgspec decodes straight into the structs of ``bodies.py`` and skips every other field, so a body
costs little more than one pass over its bytes. The engine, not the router, is the judge of a body: a field of an
unexpected type is kept as it is and becomes part of the canonical prompt. Only what leaves nothing to place is a
``BodyError``: no JSON, not an object, nested beyond reason, or a model that is no string.
"""

from __future__ import annotations

from typing import Final

import msgspec

from routing.core.prompt.bodies import BODIES, Message, ParsedBody
from routing.core.prompt.nesting import MAX_CONTAINERS, MAX_DEPTH, MAX_TEXTS, has_few_values, is_shallow
from routing.core.types import BodyError

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
