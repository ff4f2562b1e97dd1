"""Responses in the format of vLLM 0.32: whole bodies, and the events of a stream, with the captures' field order.

What all handlers use is here too: the replica, JSON bodies of requests, and JSON responses.

Events are written straight from the engine's timer to the connection's transport, so that a token costs no task
switch: one HTTP chunk for each event, as vLLM sends them, and one write per stream and engine step. aiohttp sends the
headers before and ends the body after.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
from aiohttp import web

from routing.standin.errors import CrashAfterChunks, error_body
from routing.standin.replica import Choice, Generation, Replica
from routing.standin.requests import decode_body, encode, token_ids
from routing.standin.tools import ToolCall, call_id

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-standin"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode

replica_key: web.AppKey[Replica] = web.AppKey("replica", Replica)


def json_response(body: bytes, status: int = 200) -> web.Response:
    """A response with this JSON."""
    return web.Response(body=body, status=status, content_type="application/json")


def ok(value: object) -> web.Response:
    """A response with this value as JSON."""
    return json_response(msgspec.json.encode(value))


async def read_json(request: web.Request) -> dict[str, Any]:
    """The request's body, a JSON object; ApiError otherwise."""
    return decode_body(await request.read(), request.headers.get("Content-Type", ""))


def usage(generation: Generation, *, is_stream: bool = False) -> dict[str, Any]:
    """The usage object of a whole response; that of a stream's last event has no null fields."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    details: dict[str, int | None] = {
        "cached_tokens": generation.cached_tokens,
        "created_cache_tokens": generation.created_cache_tokens if generation.request.is_chat else None,
        "multimodal_tokens": None,
    }
    if is_stream:
        details = {name: value for name, value in details.items() if value is not None}
    whole = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }
    return whole if is_stream else {**whole, "completion_tokens_details": None}


def whole_response(generation: Generation, response_id: str) -> bytes:
    """The body of a response that is not streamed."""
    is_chat = generation.request.is_chat
    body: dict[str, Any] = {
        "id": response_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": generation.request.model,
        "choices": [_choice(choice, generation, response_id) for choice in generation.choices],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(generation),
    }
    if is_chat:
        body |= {"prompt_logprobs": None, "prompt_token_ids": _prompt_ids(generation, 0), "prompt_text": None}
    body |= {"kv_transfer_params": generation.transfer_params, "ec_transfer_params": None, "metrics": None}
    return _encode(body)


def finish_reason_of(choice: Choice, call: ToolCall | None) -> str | None:
    """The finish reason that a client gets."""
    return "tool_calls" if call is not None and choice.finish_reason == "stop" else choice.finish_reason


def _choice(choice: Choice, generation: Generation, response_id: str) -> dict[str, Any]:
    request, call = generation.request, generation.request.call
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text if call is None else "",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    if call is not None:
        function = {"name": call.name, "arguments": call.arguments(choice.text)}
        message["tool_calls"] = [{"id": call_id(response_id, choice.index), "type": "function", "function": function}]
    with_logprobs = request.is_chat and request.logprobs
    prompt = {
        "prompt_logprobs": None,
        "prompt_token_ids": _prompt_ids(generation, choice.index // request.n),
    }
    return {
        "index": choice.index,
        **({"message": message} if request.is_chat else {"text": choice.text}),
        "logprobs": {"content": [_logprob(piece) for piece in choice.pieces]} if with_logprobs else None,
        "finish_reason": finish_reason_of(choice, call),
        "stop_reason": choice.stop_reason,
        "token_ids": token_ids(encode(choice.text.encode())) if request.return_token_ids else None,
        **({} if request.is_chat else prompt),
        "routed_experts": None,
    }


def _logprob(piece: str) -> dict[str, Any]:
    token = {"token": piece, "logprob": -1.0, "bytes": list(piece.encode())}
    return {**token, "top_logprobs": [token]}


def _prompt_ids(generation: Generation, index: int) -> list[int] | None:
    return token_ids(generation.request.prompts[index]) if generation.request.return_token_ids else None


class StreamFormat(Protocol):
    """The events of one stream in the format of one API."""

    def created(self) -> list[bytes]:
        """The events before the first token, sent when the stream opens."""

    def start(self) -> list[bytes]:
        """The events that are sent together with the first token and precede it."""

    def token(self, choice: Choice, number: int) -> bytes:
        """The event of token ``number`` (from 0), not the last."""

    def last(self, choice: Choice, text: str) -> bytes:
        """The event that ends a choice, with its last text (empty after an abort)."""

    def close(self) -> list[bytes]:
        """The events that follow the end of the last choice."""

    def failure(self) -> list[bytes]:
        """The events of an engine that has crashed."""


class Api(NamedTuple):
    """How one API writes responses."""

    id_prefix: str
    whole: Callable[[Generation, str], bytes]  # the generation and the response's id
    stream: Callable[[Generation, str], StreamFormat]


CRASHED = "EngineCore encountered an issue."
_NONE: Mapping[str, Any] = {}


class CompletionFormat:
    """The events of a chat or completion."""

    def __init__(self, generation: Generation, response_id: str) -> None:
        request = generation.request
        self._generation = generation
        self._call = request.call
        self._is_chat = request.is_chat
        kind = "chat.completion.chunk" if request.is_chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": kind,
            "created": int(time.time()),
            "model": request.model,
        }
        rest = {"token_ids": None}
        self._details = rest if request.is_chat else {"stop_reason": None, "prompt_token_ids": None} | rest

    def created(self) -> list[bytes]:
        """This API has no events before the first token."""
        return []

    def start(self) -> list[bytes]:
        """Chat's first event of each choice, and the beginning of its call."""
        if not self._is_chat:
            return []
        role, last = {"delta": {"role": "assistant", "content": ""}}, {"prompt_token_ids": None, "prompt_text": None}
        choices = self._generation.choices
        events = [self._event(choice, role, 0, last=last) for choice in choices]
        if self._call is not None:
            function = {"name": self._call.name, "arguments": self._call.opening}
            for choice in choices:
                call = {"id": call_id(self._head["id"], choice.index), "type": "function", "index": 0}
                delta = {"delta": {"tool_calls": [call | {"function": function}]}}
                events.append(self._event(choice, delta, 0, details=self._details))
        return events

    def token(self, choice: Choice, number: int) -> bytes:
        """The event of token ``number`` (from 0), not the last."""
        return self._event(choice, self._content(choice.pieces[number]), number + 1, details=self._details)

    def last(self, choice: Choice, text: str) -> bytes:
        """The event that ends a choice, with its last text (empty after an abort)."""
        details = {
            "finish_reason": finish_reason_of(choice, self._call),
            "stop_reason": choice.stop_reason,
            **({} if self._is_chat else {"prompt_token_ids": None}),
            "token_ids": None,
        }
        mark = {} if self._generation.request.include_usage else {"system_fingerprint": FINGERPRINT}
        text += "" if self._call is None else self._call.closing
        return self._event(choice, self._content(text), choice.generated, details=details, last=mark)

    def close(self) -> list[bytes]:
        """The usage, if the request includes it, and [DONE]."""
        if not self._generation.request.include_usage:
            return [DONE]
        total = usage(self._generation, is_stream=True)
        return [_event(self._head | {"choices": [], "usage": total, "system_fingerprint": FINGERPRINT}), DONE]

    def failure(self) -> list[bytes]:
        """An error event and [DONE]."""
        return [b"data: " + error_body(500, "InternalServerError", CRASHED) + b"\n\n", DONE]

    def _content(self, text: str) -> dict[str, Any]:
        if self._call is not None:
            return {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}}
        return {"delta": {"content": text}} if self._is_chat else {"text": text}

    def _event(
        self,
        choice: Choice,
        content: dict[str, Any],
        completion: int,
        *,
        details: Mapping[str, Any] = _NONE,
        last: Mapping[str, Any] = _NONE,
    ) -> bytes:
        """An event of one choice after ``completion`` of its tokens."""
        part = {"index": choice.index, **content, "logprobs": None, "finish_reason": None, **details}
        return _event({**self._head, "choices": [part], **self._running_usage(completion), **last})

    def _running_usage(self, completion: int) -> dict[str, Any]:
        """``continuous_usage_stats``: usage of the choice so far, without details."""
        if not self._generation.request.continuous_usage:
            return {}
        prompt = self._generation.prompt_tokens
        counts = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        return {"usage": {**counts, "completion_tokens_details": None}}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _encode(document)


class EventStream:
    """Writes a generation's progress to a transport."""

    def __init__(
        self,
        generation: Generation,
        stream_format: StreamFormat,
        transport: asyncio.Transport,
        crash: CrashAfterChunks | None,
    ) -> None:
        self._generation = generation
        self._format = stream_format
        self._transport = transport
        self._crash = crash
        self._sent = 0  # events
        self._is_broken = False  # the fault has ended the stream
        self._has_started = False

    def open(self) -> None:
        """Send the events that precede the first token and do not wait for it."""
        if events := self._format.created():
            self._send(events)

    def on_progress(self, choice: Choice, before: int) -> None:
        """Send the events of a choice's new tokens; see ``Generation.run``."""
        events: list[bytes] = []
        if not self._has_started:
            self._has_started = True
            events += self._format.start()
        ends = choice.finish_reason is not None
        whole = choice.generated - 1 if ends and choice.generated > before else choice.generated
        events += (self._format.token(choice, number) for number in range(before, whole))
        if ends:
            events.append(self._format.last(choice, "".join(choice.pieces[whole : choice.generated])))
        self._send(events)

    def close(self) -> None:
        """Send the events that follow the end of the last choice."""
        self._send(self._format.close())

    def _send(self, events: list[bytes]) -> None:
        crash = self._crash
        if self._is_broken or self._transport.is_closing():
            return
        if crash is not None:
            events = events[: crash.chunks - self._sent]
        self._sent += len(events)
        self._write(events)
        if crash is not None and self._sent >= crash.chunks:
            self._break(crash)

    def _write(self, events: list[bytes]) -> None:
        self._transport.write(b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events))

    def _break(self, crash: CrashAfterChunks) -> None:
        """Apply the fault, and let the handler return."""
        self._is_broken = True
        if crash.how == "connection":
            self._transport.abort()
        else:
            self._write(self._format.failure())
        self._generation.end()


CHAT = Api("chatcmpl", whole_response, CompletionFormat)
COMPLETION = Api("cmpl", whole_response, CompletionFormat)
