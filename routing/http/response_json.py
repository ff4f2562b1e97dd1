"""The parts of a JSON response that the router reads: token usage, and why the response ended."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

# Tokens of one request. Other values would spoil a counter for good, so they count as not reported.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]


class PromptDetails(msgspec.Struct, gc=False):
    """``prompt_tokens_details``; ``input_tokens_details`` of the responses API."""

    cached_tokens: Count | None = None


class Usage(msgspec.Struct, gc=False):
    """The usage object of vLLM's responses, in tokens; None: not reported."""

    prompt_tokens: Count | None = None
    input_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None  # of the messages API, which does not count them as input tokens
    cache_creation_input_tokens: Count | None = None  # as well
    completion_tokens: Count | None = None
    output_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None
    input_tokens_details: PromptDetails | None = None


class Choice(msgspec.Struct, gc=False):
    """One choice of a response."""

    finish_reason: Any = None


class StreamChunk(msgspec.Struct, gc=False):
    """The parts of a streamed event that distinguish the usage chunk from other events."""

    choices: Any = None
    usage: Any = None
    system_fingerprint: Any = None


class EventChoice(msgspec.Struct, gc=False):
    """One choice of a streamed event, as far as it shows whether a token was generated."""

    delta: dict[str, Any] | None = None  # of chats
    text: Any = None  # of completions
    token_ids: Any = None
    finish_reason: Any = None


class EventPart(msgspec.Struct, gc=False):
    """An item, a content part or a content block that an event adds."""

    type: Any = None


class StreamEvent(msgspec.Struct, gc=False):
    """The parts of a streamed event that show whether it comes before the first token."""

    type: Any = None  # of the responses API and the messages API
    choices: list[EventChoice] | None = None
    usage: Any = None
    error: Any = None
    content_block: EventPart | None = None
    item: EventPart | None = None
    part: EventPart | None = None


class ParsedResponse(msgspec.Struct, gc=False):
    """A whole JSON response."""

    usage: Usage | None = None
    choices: list[Choice] = []
    type: Any = None  # "message" in the messages API
    stop_reason: Any = None  # of the messages API


class PrefillResponse(ParsedResponse, gc=False):
    """The response of a prefill replica."""

    kv_transfer_params: dict[str, msgspec.Raw] | None = None  # where the KV blocks are
