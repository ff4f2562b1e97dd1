"""What an answer says about itself: token usage, that its engine gave it up, an error in a stream that began well.

A whole answer is decoded; of one that came in pieces the end is searched. ``"usage"`` with its quotes cannot come from
a generated text, where JSON escapes every quote.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from routing.proxy.usage.answer_json import Said, Usage

WHOLE_BYTES: Final = 16 << 10  # of an answer that is decoded, which is faster than a search up to about here

_decode_usage: Final = msgspec.json.Decoder(Usage).decode
_decode_answer: Final = msgspec.json.Decoder(Said).decode
_usage: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})').match
_stream_error: Final = re.compile(rb'(?:^|\n)data:\s*\{\s*"error"\s*:').search
# Of the responses API: an event of its output; those named here come before the first token, or without any.
_token_event: Final = re.compile(rb'"type"\s*:\s*"response\.(?!created"|queued"|in_progress"|failed")').search
_abort: Final = re.compile(rb'"finish_reason"\s*:\s*"abort"').search


def said_by(answer: bytes) -> Said | None:
    """What a whole JSON answer says; None where that cannot be read."""
    if len(answer) > WHOLE_BYTES:
        return None
    try:
        said: Said = _decode_answer(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return said


def ends_aborted(said: Said) -> bool:
    """Whether an answer ends because its engine stopped: vLLM says so with status 200."""
    for choice in said.choices:  # noqa: SIM110 - without a generator, which costs more than all of this
        if choice.finish_reason == "abort":
            return True
    return False


def has_token_event(events: bytes) -> bool:
    """Whether events of the responses API go beyond those that come before the first token."""
    return _token_event(events) is not None


def text_ends_aborted(text: bytes) -> bool:
    """The same of an answer whose text is only searched. No text of a choice can say so, for the quotes."""
    return b'"abort"' in text and _abort(text) is not None


def prompt_and_cached(usage: Usage) -> tuple[int | None, int | None]:
    """Tokens of the prompt, and of those the ones taken from the prefix cache."""
    prompt = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens  # its property, without a call
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = None if details is None else details.cached_tokens
    return prompt, None if cached is None or cached > (prompt or 0) else cached


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
    return (b'"error"' in text and _stream_error(text) is not None) or text_ends_aborted(text)


def _read_usage(text: bytes) -> Usage | None:
    try:
        usage: Usage = _decode_usage(text)
    except msgspec.DecodeError:
        return None
    return usage
