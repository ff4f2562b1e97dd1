"""Continues a stream at another replica after the replica that generated it has failed.

Theory of operation. While a stream runs, ``KeptStream`` keeps the client's request and the events as they arrived,
within a limit for each stream and one for all of a process (``StreamBudget``). Nothing is parsed until a replica fails;
then the streams of that replica are read one by one, so that the loop serves others in between.
Then ``read`` finds the text that the client has, and ``rest`` writes the request for the rest: a chat with the text as
the beginning of the assistant's message, a completion with the text after its prompt. The engine that continues counts
the tokens of the text (``/tokenize``; without it each event counts as one), so that token limits and usage stay true.
``Splice`` rewrites the events of the rest, so that the client sees one stream.

A stream ends with an error, as without continuation, where the rest would not be what its engine would have generated.
``NotContinuableError`` has the reason. Chat templates may strip white space at the end of a message. So a chat
continues before it, and the splice removes it from the beginning of the rest.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from routing.http.response import chunked
from routing.http.usage import TAIL_BYTES, ResponseTail, event_ends, has_token
from routing.upstream.client import fetch

if TYPE_CHECKING:
    from collections.abc import Callable

    from routing.upstream.pool import Address


OK: Final = 200
MAX_CONTINUATIONS: Final = 2  # of one stream
MAX_STREAM_BYTES: Final = 1 << 20  # of a request, its prompt and its events: about 4,000 tokens
MAX_VALUES: Final = 50_000  # of a request, which are decoded in 10 ms; a text of 1 MiB has about 20,000 commas
_VALUE_MARKS: Final = (b",", b"[", b"{")
MAX_HELD_BYTES: Final = 256 << 10  # of an incomplete event
TURN_S: Final = 0.01  # between two streams that are read: the longest take 20 ms
MAX_BYTES: Final = 128 << 20  # of all streams of a process
RESERVED_BYTES: Final = 16 << 10  # reserved at once
TAIL_READS: Final = 6  # searched for usage and errors at the end of a stream, or more if they are shorter together
SHORT_TAIL_BYTES: Final = 768
EVENT_BYTES: Final = 64  # of memory for each read, beside its bytes
COUNT_TIMEOUT_S: Final = 10.0
MAX_COUNT_BYTES: Final = 1 << 20
COMPLETION_TOKENS: Final = 16  # that a completion without ``max_tokens`` has

# Parameters with which the rest would not be what its engine would have generated: reason, and harmless JSON values.
_UNSET: Final = ("null", "false")
_OBSTACLES: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    *(("choices", name, ("null", "1", "false")) for name in ("n", "best_of", "use_beam_search")),
    *(("logprobs", name, _UNSET) for name in ("logprobs", "prompt_logprobs")),
    *(("structured_output", name, ("null",)) for name in ("structured_outputs", "guided_json", "guided_regex")),
    *(("structured_output", name, ("null",)) for name in ("guided_choice", "guided_grammar", "regex", "ebnf")),
    *(("structured_output", name, ("null",)) for name in ("json_schema", "logits_processors", "vllm_xargs")),
    ("structured_output", "custom_logit_processor", ("null",)),
    *(("reasoning", name, ("null", "true")) for name in ("include_reasoning", "separate_reasoning")),
    ("parameters", "bad_words", ("null", "[]")),
    ("structured_output", "tool_choice", ("null", '"auto"', '"none"')),
    *(("penalties", name, ("null", "0", "0.0")) for name in ("presence_penalty", "frequency_penalty")),
    *(("parameters", name, _UNSET) for name in ("echo", "store", "continue_final_message", "return_token_ids")),
    *(("parameters", name, _UNSET) for name in ("return_tokens_as_token_ids", "include_stop_str_in_output")),
    *(("parameters", name, ("null",)) for name in ("kv_transfer_params", "truncate_prompt_tokens", "audio")),
    *(("parameters", name, ("null", '""')) for name in ("suffix", "prompt_embeds")),
    ("parameters", "add_generation_prompt", ("null", "true")),
    ("parameters", "modalities", ("null", '["text"]')),
)
_THOUGHTS: Final = ("<think>", "</think>")  # of an engine without a reasoning parser; chat templates drop them
_DELTAS: Final = {"role": "", "content": "", "reasoning": "reasoning", "reasoning_content": "reasoning"}
_LENGTHS: Final = ("max_tokens", "max_completion_tokens")

DONE_EVENT: Final = b"data: [DONE]\n\n"
_UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError, msgspec.DecodeError)

_error: Final = re.compile(
    rb'(?:(?<=\n)|^)data:\s*\{\s*"error"\s*:|(?:(?<=\n)|^)data:[^\n]*"finish_reason"\s*:\s*"abort"'
).search


class NotContinuableError(Exception):
    """A stream cannot be continued; its text is the reason, a label of ``stream_failures_total``."""


class SentText(NamedTuple):
    """What the client has of a stream."""

    text: str
    events: int  # with text
    head: dict[str, Any]  # members that all chunks have: id, created, model
    is_finished: bool  # the finish reason was sent
    has_usage: bool
    is_done: bool  # [DONE] was sent


class StreamBudget:
    """The memory of all streams that may be continued."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.used_bytes = 0
        self._max_bytes = max_bytes
        self._next_turn_at = 0.0

    def reserve(self, size: int) -> bool:
        """Reserve memory; False if there is too little."""
        if self.used_bytes + size > self._max_bytes:
            return False
        self.used_bytes += size
        return True

    def turn_in_s(self, now: float) -> float:
        """Seconds until the next stream may be read; each call takes a turn."""
        self._next_turn_at = max(self._next_turn_at + TURN_S, now)
        return self._next_turn_at - now


class KeptStream(ResponseTail):
    """A running stream's request, and the events that its client got.

    ``left``: how many more bytes may be kept before memory has to be reserved. Who has checked it may append a chunk to
    ``chunks`` instead of a call of ``add``.
    ``prompt_bytes``: of the prompt that is kept for placement.
    """

    def __init__(
        self, budget: StreamBudget, body: bytes, *, is_chat: bool, wants_usage: bool, prompt_bytes: int = 0
    ) -> None:
        ResponseTail.__init__(self)
        self.is_chat = is_chat
        self.wants_usage = wants_usage  # its client gets the usage
        self.continuations = 0
        self._budget = budget
        self._body = body
        self.chunks: list[bytes] = []  # as HTTP frames them
        self._request: dict[str, Any] = {}  # the body, once it was read
        self.left, self._reserved = -len(body) - prompt_bytes, 0
        self._turn: asyncio.TimerHandle | None = None
        self._counting: asyncio.Task[None] | None = None
        self._lost = ""  # why it cannot be continued
        self._fit()

    @property
    def is_lost(self) -> bool:
        """Whether it cannot be continued, and nothing is kept."""
        return bool(self._lost)

    def add(self, data: bytes) -> None:
        """Keep bytes of the response."""
        if self._lost:
            ResponseTail.add(self, data)
            return
        self.chunks.append(chunked(data, False))
        self.left -= len(data) + EVENT_BYTES
        if self.left < 0:
            self._fit()

    @property
    def text(self) -> bytes:
        """The end of the body."""
        if self._lost:
            return b"".join((self._fourth, self._third, self._second, self._last))
        text = self._events(TAIL_READS)
        return text if len(text) > SHORT_TAIL_BYTES else self._events(SHORT_TAIL_BYTES)

    def _events(self, count: int = 0) -> bytes:
        """The last reads; 0: all."""
        return b"".join([chunk[chunk.find(b"\n") + 1 : -2] for chunk in self.chunks[-count:]])

    def _fit(self) -> None:
        missing = -(self.left // RESERVED_BYTES) * RESERVED_BYTES
        if self._reserved - self.left > MAX_STREAM_BYTES:
            self.close("too_long")
        elif self._budget.reserve(missing):
            self._reserved += missing
            self.left += missing
        else:
            self.close("memory")

    def close(self, reason: str = "closed") -> None:
        """Drop everything, because the stream has ended or cannot be continued."""
        if self._counting is not None:
            self._counting.cancel()
        if self._turn is not None:
            self._turn.cancel()
        self._budget.used_bytes -= self._reserved
        self._last = self._events(TAIL_READS)[-TAIL_BYTES:] or self._last
        self.left, self._reserved, self._lost = -1, 0, reason
        self._body, self.chunks = b"", []

    def check(self, *, is_inside_event: bool) -> None:
        """NotContinuableError if the rest cannot be another replica's, whatever the text.

        ``is_inside_event``: the bytes that the client got end inside an event.
        """
        if self._lost:
            raise NotContinuableError(self._lost)
        if is_inside_event:
            raise NotContinuableError("inside_event")
        if self.continuations >= MAX_CONTINUATIONS:
            raise NotContinuableError("limit")

    def at_turn(self, callback: Callable[[], None]) -> None:
        """Call back when this stream may be read."""
        loop = asyncio.get_running_loop()
        self._turn = loop.call_later(self._budget.turn_in_s(loop.time()), callback)

    def read(self) -> SentText:
        """What the client has; NotContinuableError if the rest cannot be another replica's."""
        if self._lost:
            raise NotContinuableError(self._lost)
        if sum(map(self._body.count, _VALUE_MARKS)) > MAX_VALUES:
            raise NotContinuableError("too_long")
        try:
            self._request = self._request or msgspec.json.decode(self._body)
            sent = _sent_text(self._events(), is_chat=self.is_chat)
        except _UNREADABLE:
            raise NotContinuableError("response") from None
        if sent.is_finished and self.wants_usage and not sent.has_usage:
            raise NotContinuableError("usage")
        if not sent.is_finished:
            self._check_request(sent.text)
        return sent

    def count(self, address: Address, sent: SentText, on_counted: Callable[[int], None]) -> None:
        """Let an engine count the tokens of ``context(sent)``; if it does not, each event counts as one."""
        self.continuations += 1
        self.settle()
        if self.context(sent):
            request = {"model": sent.head["model"], "prompt": self.context(sent), "add_special_tokens": False}
            counting = _count_tokens(address, msgspec.json.encode(request), sent.events, on_counted)
            self._counting = asyncio.get_running_loop().create_task(counting)
        else:
            on_counted(0)

    def settle(self) -> None:
        """Drop an incomplete event, which the client did not get: another replica's events come next."""
        self.chunks = [chunked(complete_events(self._events()), False)]

    def rest(self, sent: SentText, tokens: int) -> bytes | None:
        """The request for the rest; None if the text has as many tokens as the client allows.

        ``tokens``: of ``context(sent)``. NotContinuableError if the client would miss its usage.
        """
        if (limits := self._limits(self._request, tokens)) is None:
            if self.wants_usage:
                raise NotContinuableError("usage")
            return None
        body = self._request | limits
        text = self.context(sent)
        if text and self.is_chat:
            body["messages"] = [*body["messages"], {"role": "assistant", "content": text}]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        elif text:
            body["prompt"] += text
        return msgspec.json.encode(body)

    def context(self, sent: SentText) -> str:
        """The text after which another engine continues."""
        return sent.text.rstrip() if self.is_chat else sent.text

    def _check_request(self, text: str) -> None:
        body = self._request
        for reason, name, harmless in _OBSTACLES:
            if json.dumps(body.get(name)) not in harmless:
                raise NotContinuableError(reason)
        response_format = body.get("response_format") or {"type": "text"}
        options = body.get("stream_options") or {}
        if not isinstance(response_format, dict) or response_format.get("type") != "text":
            raise NotContinuableError("structured_output")
        if not isinstance(options, dict) or options.get("continuous_usage_stats"):
            raise NotContinuableError("parameters")
        if body.get("seed") is not None and body.get("temperature") != 0:
            raise NotContinuableError("seed")
        if not isinstance(body.get("messages") if self.is_chat else body.get("prompt"), list if self.is_chat else str):
            raise NotContinuableError("prompt")
        if self.is_chat and any(mark in text for mark in _THOUGHTS):
            raise NotContinuableError("reasoning")

    def stops(self) -> list[str]:
        """The stop strings of the request; none if the engine may ignore them at first (``min_tokens``)."""
        stop = None if self._request.get("min_tokens") else self._request.get("stop")
        stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
        return [stop for stop in stops if isinstance(stop, str) and stop]

    def _limits(self, body: dict[str, Any], tokens: int) -> dict[str, int] | None:
        """The members that limit the length, less the tokens that were sent; None if none is left."""
        limits = {name: body[name] - tokens for name in _LENGTHS if isinstance(body.get(name), int)}
        if not self.is_chat and "max_tokens" not in body and tokens < COMPLETION_TOKENS:
            limits["max_tokens"] = COMPLETION_TOKENS - tokens
        if any(limit <= 0 for limit in limits.values()):
            return None
        if isinstance(body.get("min_tokens"), int):
            limits["min_tokens"] = max(0, body["min_tokens"] - tokens)
        return limits


def complete_events(data: bytes) -> bytes:
    """The complete events at the beginning of ``data``."""
    return b"".join(_events(data))


def error_at(data: bytes) -> int:
    """Where the event begins with which an engine ends a stream that it cannot complete; below 0 if there is none."""
    if b'"error"' not in data and b'"abort"' not in data:
        return -1
    match = _error(data)
    return -1 if match is None else match.start()


def fails_after_token(data: bytes) -> bool:
    """Whether the beginning of a stream has a token and then an error. An error before it may be the client's."""
    at = error_at(data)
    return at > 0 and has_token(data[:at])


async def _count_tokens(address: Address, body: bytes, default: int, on_counted: Callable[[int], None]) -> None:
    tokens = default
    with suppress(OSError, TimeoutError, *_UNREADABLE):
        async with asyncio.timeout(COUNT_TIMEOUT_S):
            status, response = await fetch(address, "/tokenize", body, max_bytes=MAX_COUNT_BYTES)
        count = msgspec.json.decode(response)["count"]
        if status == OK and type(count) is int and 0 <= count <= len(body):
            tokens = count
    on_counted(tokens)


def _sent_text(events: bytes, *, is_chat: bool) -> SentText:
    parts: list[str] = []
    head: dict[str, Any] = {}
    is_finished = has_usage = is_done = False
    for event in _events(events):
        chunk = _chunk(event)
        if chunk is None:
            is_done = is_done or b"[DONE]" in event
            continue
        if not chunk["choices"]:
            has_usage = has_usage or bool(chunk.get("usage"))
            continue
        head = head or {name: chunk[name] for name in ("id", "created", "model")}
        (choice,) = chunk["choices"]
        if choice.get("logprobs"):
            raise NotContinuableError("logprobs")
        parts.append(_text(choice, is_chat=is_chat))
        is_finished = is_finished or choice.get("finish_reason") is not None
    if not head:
        raise NotContinuableError("response")
    return SentText("".join(parts), sum(map(bool, parts)), head, is_finished, has_usage, is_done)


def _text(choice: dict[str, Any], *, is_chat: bool) -> str:
    """The text of one event's choice; NotContinuableError if it has something else."""
    if not is_chat:
        return choice["text"] or ""
    delta = choice["delta"]
    for name, value in delta.items():
        if value and (reason := _DELTAS.get(name, "tools")):
            raise NotContinuableError(reason)
    return delta.get("content") or ""


def _events(data: bytes) -> list[bytes]:
    """The complete events at the beginning of ``data``."""
    return [data[start:end] for start, end in pairwise([0, *[match.end() for match in event_ends(data)]])]


def _chunk(event: bytes) -> dict[str, Any] | None:
    """The chunk of an event; None for comments and the end; one of ``_UNREADABLE`` for another event."""
    data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
    if not data or data == b"[DONE]":
        return None
    chunk: dict[str, Any] = msgspec.json.decode(data)
    chunk["choices"]  # an error has none
    return chunk


def encode_event(chunk: dict[str, Any]) -> bytes:
    """An event with this chunk."""
    return b"data: %b\n\n" % msgspec.json.encode(chunk)


def finish_event(sent: SentText, *, is_chat: bool) -> bytes:
    """The event that ends a text of the length that its client allows."""
    content: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return encode_event({**sent.head, "object": kind, "choices": [{"index": 0, **content, "finish_reason": "length"}]})


class Splice:
    """Rewrites the events of the rest of a stream: one id, no second role, true usage, no text twice."""

    def __init__(self, kept: KeptStream, sent: SentText, tokens: int) -> None:
        self._kept = kept
        self._head = sent.head
        self._tokens = tokens  # of the text, which the rest's engine counts as its prompt
        self._repeated = sent.text[len(kept.context(sent)) :]  # white space that the rest may begin with again
        self._stops = kept.stops()
        self._sent_end = sent.text[-max((len(stop) - 1 for stop in self._stops), default=0) or len(sent.text) :]
        self._rest = ""  # text after ``_sent_end``, as long as a stop string may have begun there
        self.is_stopped = False  # a stop string has ended across the seam
        self._held = b""  # of an incomplete event

    def feed(self, data: bytes) -> bytes:
        """The bytes for the client, which are kept. An incomplete event is held back; ValueError if it is too long."""
        events = _events(self._held + data)
        self._held = (self._held + data)[sum(map(len, events)) :]
        if len(self._held) > MAX_HELD_BYTES:
            raise ValueError(f"an event of more than {MAX_HELD_BYTES} bytes")
        passed = b"".join(map(self._rewritten, events))
        if passed:
            self._kept.add(passed)
        return passed

    def flush(self) -> bytes:
        """The incomplete event that is held back when the stream ends."""
        incomplete_event, self._held = self._held, b""
        return incomplete_event

    def _rewritten(self, event: bytes) -> bytes:
        try:
            chunk = _chunk(event)
            if chunk is None:
                return event
            if not chunk["choices"]:
                return self._usage(chunk)
            return self._choice(chunk, chunk["choices"][0])
        except _UNREADABLE:
            return event

    def _usage(self, chunk: dict[str, Any]) -> bytes:
        usage, details = chunk["usage"], chunk["usage"].get("prompt_tokens_details")
        if not self._kept.wants_usage:
            return b""
        usage["prompt_tokens"] -= self._tokens
        usage["completion_tokens"] += self._tokens
        if details and details.get("cached_tokens") is not None:
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
        return encode_event({**chunk, **self._head})

    def _choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bytes:
        if self.is_stopped:
            return b""
        content, name = (choice["delta"], "content") if self._kept.is_chat else (choice, "text")
        content.pop("role", None)
        if text := content.get(name):
            content[name] = self._without_stop(self._without_repeated(text), choice)
        if not (any(content.values()) if self._kept.is_chat else content[name]) and choice.get("finish_reason") is None:
            return b""
        return encode_event({**chunk, **self._head})

    def _without_repeated(self, text: str) -> str:
        while self._repeated and text:
            if self._repeated[0] != text[0]:
                self._repeated = ""
            else:
                self._repeated, text = self._repeated[1:], text[1:]
        return text

    def _without_stop(self, text: str, choice: dict[str, Any]) -> str:
        """End the text where a stop string ends that began before the seam: engines look for it in their own text."""
        if not self._stops or len(self._rest) > len(self._sent_end):
            return text
        self._rest += text
        near = self._sent_end + self._rest
        seam = len(self._sent_end)
        for stop in self._stops:
            if any(near.startswith(stop, start) for start in range(max(0, seam - len(stop) + 1), seam)):
                self.is_stopped = True
                choice["finish_reason"], choice["stop_reason"] = "stop", stop
                return ""
        return text
