"""What an answer's JSON says about itself, as far as it is read: its token usage, and why it ended."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

# Tokens of one request. What is no such number would spoil a counter for good, so it counts as not said.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]


class PromptDetails(msgspec.Struct, gc=False):
    """``prompt_tokens_details``; ``input_tokens_details`` of the responses API."""

    cached_tokens: Count | None = None


class Usage(msgspec.Struct, gc=False):
    """The usage object of vLLM's answers. Tokens; None where the replica does not say."""

    prompt_tokens: Count | None = None
    input_tokens: Count | None = None
    completion_tokens: Count | None = None
    output_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None
    input_tokens_details: PromptDetails | None = None

    @property
    def prompt(self) -> int | None:
        """Tokens of the prompt."""
        return self.input_tokens if self.prompt_tokens is None else self.prompt_tokens

    @property
    def generated(self) -> int | None:
        """Tokens of the answer."""
        return self.output_tokens if self.completion_tokens is None else self.completion_tokens

    @property
    def lacks_details(self) -> bool:
        """Whether tokens were generated and nothing says how many of the prompt's were cached."""
        details = self.prompt_tokens_details or self.input_tokens_details
        return (details is None or details.cached_tokens is None) and bool(self.generated)


class Choice(msgspec.Struct, gc=False):
    """One of an answer's choices."""

    finish_reason: Any = None


class StreamChunk(msgspec.Struct, gc=False):
    """One event of a stream, as far as telling the usage chunk from others needs it."""

    choices: Any = None
    usage: Any = None


class ParsedResponse(msgspec.Struct, gc=False):
    """A whole JSON answer."""

    usage: Usage | None = None
    choices: list[Choice] = []
