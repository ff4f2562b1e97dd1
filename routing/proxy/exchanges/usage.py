"""What an answer says about itself: its token usage, and an error inside a stream that began well.

``"usage"`` with its quotes cannot come from a generated text, where JSON escapes every quote.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

WHOLE_BYTES = 16 << 10  # of a JSON answer that is decoded as a whole, which is faster than a search up to about here

_usage = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})').match
_stream_error = re.compile(rb'(?:^|\n)data:\s*\{\s*"error"\s*:').search


# Tokens of one request. What is no such number would spoil a counter for good, so it counts as not said.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]


class PromptDetails(msgspec.Struct):
    """``prompt_tokens_details``; ``input_tokens_details`` of the responses API."""

    cached_tokens: Count | None = None


class Usage(msgspec.Struct):
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

    def prompt_and_cached(self) -> tuple[int | None, int | None]:
        """Tokens of the prompt, and of those the ones taken from the prefix cache."""
        prompt = self.input_tokens if self.prompt_tokens is None else self.prompt_tokens
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = None if details is None else details.cached_tokens
        return prompt, None if cached is None or cached > (prompt or 0) else cached


class _Answer(msgspec.Struct):
    """A whole JSON answer, as far as it is read here."""

    usage: Usage | None = None


_decoder = msgspec.json.Decoder(Usage)
_answers = msgspec.json.Decoder(_Answer)


def usage_of(answer: bytes) -> Usage | None:
    """What a whole JSON answer says about its tokens; None where that cannot be read."""
    try:
        return _answers.decode(answer).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_abort = re.compile(rb'"finish_reason"\s*:\s*"abort"').search


def was_aborted(text: bytes) -> bool:
    """Whether an answer ends because its engine stopped: vLLM says so with status 200. No text can, for its quotes."""
    return b'"abort"' in text and _abort(text) is not None


def last_usage(text: bytes) -> Usage | None:
    """The last usage object in a text, or None where there is none that can be read."""
    end = len(text)
    while (at := text.rfind(b'"usage"', 0, end)) >= 0:
        if found := _usage(text, at):
            return _read_usage(found[1])
        end = at
    return None


def has_error(text: bytes) -> bool:
    """Whether a stream ended with an error object or aborted, as vLLM's does when its engine dies or stops."""
    return (b'"error"' in text and _stream_error(text) is not None) or was_aborted(text)


def _read_usage(text: bytes) -> Usage | None:
    try:
        return _decoder.decode(text)
    except msgspec.DecodeError:
        return None
