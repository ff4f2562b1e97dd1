"""Request bodies of the four prompt endpoints, parsed only as far as placing them needs.

Theory of operation. msgspec decodes straight into the structs below and skips every other field, so a body costs
little more than one pass over its bytes. The engine, not the router, is the judge of a body: a field of an
unexpected type is kept as it is and becomes part of the canonical prompt. Only what leaves nothing to place is a
``BodyError``: no JSON, not an object, nested beyond reason, or a model that is no string.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from routing.core.types import BodyError


class Message(Struct, gc=False):
    """One chat message, with the fields that chat templates render."""

    role: Any = None
    content: Any = None  # text, a list of parts, or null
    name: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    task: Any = None
    tools: Any = None  # of a developer's message


class ParsedBody(Struct, gc=False, kw_only=True):
    """What every endpoint's body may say. ``Any`` is what the client sent, whatever it is."""

    model: str | None = None
    stream: Any = None
    stream_options: Any = None
    prompt_cache_key: Any = None
    session_id: Any = None  # vLLM's own, from 0.32 on
    user: Any = None
    metadata: Any = None
    cache_salt: Any = None  # vLLM keeps the caches of different salts apart
    n: Any = None  # from here on: what caps may bound
    best_of: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    chat_template: Any = None  # from here on: what ``rendering.py`` reads, each at some of the endpoints
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    reasoning: Any = None  # whose ``effort`` is the same at the responses API
    add_special_tokens: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    suffix: Any = None  # of a completion: what follows the gap to fill

    @property
    def session_key(self) -> str | None:
        """The first that the body names: ``prompt_cache_key``, ``session_id``, ``user``, ``metadata.session_id``."""
        if type(self.prompt_cache_key) is str and self.prompt_cache_key:
            return self.prompt_cache_key
        if type(self.session_id) is str and self.session_id:
            return self.session_id
        if type(self.user) is str and self.user:
            return self.user
        if type(self.metadata) is dict:
            session_id = self.metadata.get("session_id")
            if type(session_id) is str and session_id:
                return session_id
        return None


class ChatBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/chat/completions``."""

    messages: list[Message] | None = None
    tools: Any = None
    documents: Any = None  # that templates for retrieval render


class CompletionBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/completions``: a text, token ids, or a list of either."""

    prompt: Any = None
    prompt_embeds: Any = None  # one or several, base64; each is a prompt of its own


class EmbeddingBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/embeddings``: ``input`` like a completion's prompt, or messages like a chat's."""

    input: Any = None
    messages: list[Message] | None = None


class ResponsesBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/responses``: ``instructions`` is the system prompt, ``input`` a text or a list of items.

    What went before may be given by the id under which an engine stored it, or as messages.
    """

    instructions: Any = None
    previous_response_id: Any = None
    previous_input_messages: Any = None
    input: Any = None
    tools: Any = None


BODIES: dict[str, type[ParsedBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/responses": ResponsesBody,
}
_decoders = {path: msgspec.json.Decoder(body) for path, body in BODIES.items()}
_any_decoder = msgspec.json.Decoder(ParsedBody)


def parse_body(path: str, body: bytes | bytearray | memoryview) -> ParsedBody:
    """Parse the body of a POST to ``path``; BodyError names the field. About 0.4 us a KiB."""
    decoder = _decoders.get(path)
    if decoder is None:
        raise BodyError(None, f"no prompt is read from {path[:256]!r}")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        return _parse_odd(BODIES[path], body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None


def is_stream(body: bytes) -> bool:
    """Whether a body asks for events. Not on the path of a request that goes well: it is decoded once more."""
    try:
        return _any_decoder.decode(body).stream is True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _parse_odd(kind: type[ParsedBody], body: bytes | bytearray | memoryview) -> ParsedBody:
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
