"""Request bodies of the JSON endpoints, with the fields that placement and caps need; ``parsing.py`` reads them."""

from __future__ import annotations

from typing import Any

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


class ChatBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/chat/completions``."""

    messages: list[Message] | None = None
    tools: Any = None
    documents: Any = None  # rendered by templates for retrieval


class CompletionBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/completions``: a text, token ids, or a list of either."""

    prompt: Any = None
    prompt_embeds: Any = None  # one or several prompts, base64


class EmbeddingBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/embeddings``, ``/pooling`` and ``/classify``: ``input`` like a completion's prompt, or messages."""

    input: Any = None
    messages: list[Message] | None = None
    data: Any = None  # of ``/pooling``: the input of an engine's plugin, which may load what it names


class ScoreBody(ParsedBody, gc=False, kw_only=True):
    """``/score`` and ``/rerank``: each text of one side is paired with one of the other. ``SCORED`` names the sides."""

    instruction: Any = None  # rendered before each pair
    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None
    documents: Any = None
    items: Any = None
    text_2: Any = None
    data_2: Any = None


SCORED = (("query", "queries", "text_1", "data_1"), ("documents", "items", "text_2", "data_2"))


class ResponsesBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/responses``: ``instructions`` is the system prompt, ``input`` a text or a list of items.

    Earlier turns are the id of a response that the engine stored, or messages.
    """

    instructions: Any = None
    previous_response_id: Any = None
    previous_input_messages: Any = None
    input: Any = None
    tools: Any = None
    conversation: Any = None  # an id, or an object with one


class MessagesBody(ParsedBody, gc=False, kw_only=True):
    """``/v1/messages``, Anthropic's form of a chat; ``anthropic.py`` converts it."""

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


BODIES: dict[str, type[ParsedBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": TokenizeBody,
    "/tokenize": TokenizeBody,
    "/detokenize": TokenizeBody,
    "/pooling": EmbeddingBody,
    "/classify": EmbeddingBody,
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), ScoreBody),
}
