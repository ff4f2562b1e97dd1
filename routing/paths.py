"""The paths of the data port: what the router knows of each is one ``Endpoint``, and a body with what it reads there.

A new path is a row of ``DataPath``, and a body here that ``prompt/canonical.py`` writes if its prompt is placed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final, Self

from msgspec import Struct


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
    """The fields that bodies of all endpoints have. ``Any`` fields hold what the client sent, of any type."""

    length_fields: ClassVar[tuple[str, ...]] = ()  # that engines read at the endpoint, the usual one first
    prompt_fields: ClassVar[tuple[str, ...]] = ()  # each with one prompt or a list of them
    rendering_fields: ClassVar[tuple[str, ...]] = ()  # that change how engines render the prompt

    model: str | None = None
    stream: Any = None
    stream_options: Any = None  # of chat and completions
    prompt_cache_key: Any = None
    session_id: Any = None  # of vLLM, from 0.32 on
    user: Any = None
    metadata: Any = None
    cache_salt: Any = None  # vLLM keeps the caches of different salts apart
    n: Any = None  # from here on: parameters that caps bound
    best_of: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    echo: Any = None  # whether the response begins with the prompt
    chat_template: Any = None  # from here on: parameters that ``rendering_of`` reads at some endpoints
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    reasoning: Any = None  # of the responses API; its ``effort`` is the reasoning effort
    add_special_tokens: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    suffix: Any = None  # of a completion that fills a gap: the text after the gap


_TEMPLATE_FIELDS: Final = ("chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs")


class ChatBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/chat/completions``."""

    length_fields = ("max_tokens", "max_completion_tokens")
    rendering_fields = ("chat_template", *_TEMPLATE_FIELDS, "reasoning_effort", "add_special_tokens")

    messages: list[Message] | None = None
    tools: Any = None
    documents: Any = None  # rendered by templates for retrieval


class CompletionBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/completions``: a text, token ids, or a list of either."""

    length_fields = ("max_tokens",)
    prompt_fields = ("prompt", "prompt_embeds")
    rendering_fields = ("add_special_tokens",)

    prompt: Any = None
    prompt_embeds: Any = None  # one or several prompts, base64


class EmbeddingBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/embeddings``, ``/pooling`` and ``/classify``: ``input`` like a completion's prompt, or messages."""

    prompt_fields = ("input",)
    rendering_fields = ("chat_template", *_TEMPLATE_FIELDS, "add_special_tokens")

    input: Any = None
    messages: list[Message] | None = None
    data: Any = None  # of ``/pooling``: the input of an engine's plugin, which may load what it names


SCORED: Final = (("query", "queries", "text_1", "data_1"), ("documents", "items", "text_2", "data_2"))


class ScoreBody(ParsedBody, gc=False, kw_only=True):
    """``/score`` and ``/rerank``: each text of one side is paired with one of the other. ``SCORED`` names the sides."""

    prompt_fields = SCORED[1]
    rendering_fields = ("chat_template_kwargs", "mm_processor_kwargs")

    instruction: Any = None  # rendered before each pair
    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None
    documents: Any = None
    items: Any = None
    text_2: Any = None
    data_2: Any = None


class ResponsesBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/responses``: ``instructions`` is the system prompt, ``input`` a text or a list of items.

    Earlier turns are the id of a response that the engine stored, or messages.
    """

    length_fields = ("max_output_tokens",)
    rendering_fields = _TEMPLATE_FIELDS

    instructions: Any = None
    previous_response_id: Any = None
    previous_input_messages: Any = None
    input: Any = None
    tools: Any = None
    conversation: Any = None  # an id, or an object with one


class MessagesBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/messages``, Anthropic's form of a chat; ``anthropic.py`` converts it."""

    length_fields = ("max_tokens",)
    rendering_fields = ("chat_template_kwargs", "reasoning_effort")

    system: Any = None
    messages: Any = None
    tools: Any = None
    thinking: Any = None
    output_config: Any = None


class TokenizeBody(ParsedBody, gc=False, kw_only=True):
    """Endpoints that compute no KV blocks, so that no replica is better than another: their prompt is not read."""

    messages: Any = None  # engines load the media in them


class FormBody(ParsedBody, gc=False, kw_only=True):
    """Fields of a multipart form; ``forms.py`` reads them."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What the router knows of one path. Clients POST to it."""

    path: str
    body: type[ParsedBody]
    operation: str = ""  # its name in traces, by the GenAI conventions; empty: it has none
    generates: bool = False  # a model generates the response; else equal requests always have equal responses
    is_cacheable: bool = False  # whether the response of an equal request may be served again
    may_transfer: bool = False  # whether another replica may prefill its prompt and hand over the KV blocks
    may_continue: bool = False  # whether another replica may generate the rest of a stream (proxy/continuation.py)
    is_form: bool = False  # its body is a multipart form, without a prompt to place it by


class DataPath(StrEnum):
    """A path of the data port that replicas serve. Stored responses, and their ids, belong to ``/v1/responses``."""

    endpoint: Endpoint

    def __new__(cls, endpoint: Endpoint) -> Self:
        path = str.__new__(cls, endpoint.path)
        path._value_ = endpoint.path
        path.endpoint = endpoint
        return path

    CHAT_COMPLETIONS = Endpoint(
        "/v1/chat/completions",
        ChatBody,
        "chat",
        generates=True,
        is_cacheable=True,
        may_transfer=True,
        may_continue=True,
    )
    COMPLETIONS = Endpoint(
        "/v1/completions",
        CompletionBody,
        "text_completion",
        generates=True,
        is_cacheable=True,
        may_transfer=True,
        may_continue=True,
    )
    EMBEDDINGS = Endpoint("/v1/embeddings", EmbeddingBody, "embeddings", is_cacheable=True)
    RESPONSES = Endpoint("/v1/responses", ResponsesBody, "chat", generates=True)
    MESSAGES = Endpoint("/v1/messages", MessagesBody, "chat", generates=True, is_cacheable=True)
    COUNT_TOKENS = Endpoint("/v1/messages/count_tokens", TokenizeBody)
    TOKENIZE = Endpoint("/tokenize", TokenizeBody)
    DETOKENIZE = Endpoint("/detokenize", TokenizeBody)
    POOLING = Endpoint("/pooling", EmbeddingBody, is_cacheable=True)
    CLASSIFY = Endpoint("/classify", EmbeddingBody, is_cacheable=True)
    SCORE = Endpoint("/score", ScoreBody, is_cacheable=True)
    SCORE_V1 = Endpoint("/v1/score", ScoreBody, is_cacheable=True)
    RERANK = Endpoint("/rerank", ScoreBody, is_cacheable=True)
    RERANK_V1 = Endpoint("/v1/rerank", ScoreBody, is_cacheable=True)
    RERANK_V2 = Endpoint("/v2/rerank", ScoreBody, is_cacheable=True)
    TRANSCRIPTIONS = Endpoint("/v1/audio/transcriptions", FormBody, generates=True, is_form=True)
    TRANSLATIONS = Endpoint("/v1/audio/translations", FormBody, generates=True, is_form=True)


ENDPOINTS: Final = {path.encode(): path.endpoint for path in DataPath}
BODIES: Final = {str(path): path.endpoint.body for path in DataPath if not path.endpoint.is_form}
ANTHROPIC: Final = DataPath.MESSAGES.encode()  # at paths that begin with it, known or not, errors have Anthropic's form
