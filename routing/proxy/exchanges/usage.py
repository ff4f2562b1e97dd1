"""What an answer says about itself: its token usage, and an error inside a stream that began well.

Both stand near the end, so the last few reads are kept by reference and looked at once, when the answer is complete.
A short read is joined to the one before it, so that what is kept is long enough however the end is cut.
``"usage"`` with its quotes cannot come from a generated text, where JSON escapes every quote.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

TAIL_BYTES = 4096  # kept of each of the last four reads: usage and [DONE] may come one by one, and in two
SHORT_BYTES = 128  # a read that is shorter is joined to the one before, until that is no longer short
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


class Tail:
    """The end of an answer's body. It is added to for each read of a stream, so its reads lie in its own slots."""

    __slots__ = ("_fourth", "_last", "_second", "_third")

    def __init__(self) -> None:
        self._last = self._second = self._third = self._fourth = b""

    def add(self, data: bytes) -> None:
        """Keep the end of a read, and let the oldest go."""
        if len(data) < SHORT_BYTES and len(self._last) < SHORT_BYTES:
            self._last += data
            return
        self._fourth = self._third
        self._third = self._second
        self._second = self._last
        self._last = data if len(data) <= TAIL_BYTES else data[-TAIL_BYTES:]

    @property
    def text(self) -> bytes:
        """All that is kept."""
        return b"".join((self._fourth, self._third, self._second, self._last))

    def usage(self) -> Usage | None:
        """The last usage object, or None where there is none that can be read."""
        text = self.text
        end = len(text)
        while (at := text.rfind(b'"usage"', 0, end)) >= 0:
            if found := _usage(text, at):
                return _read_usage(found[1])
            end = at
        return None

    def has_error(self) -> bool:
        """Whether a stream ended with an error object or aborted, as vLLM's does when its engine dies or stops."""
        text = self.text
        return (b'"error"' in text and _stream_error(text) is not None) or was_aborted(text)

    def ends_event(self) -> bool:
        """Whether the last bytes end an event, so that another one may follow."""
        text = self.text
        return not text or text.endswith((b"\n\n", b"\r\n\r\n"))


def _read_usage(text: bytes) -> Usage | None:
    try:
        return _decoder.decode(text)
    except msgspec.DecodeError:
        return None
