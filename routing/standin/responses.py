"""Responses in the format of vLLM 0.32: whole bodies, and the events of a stream, with the captures' field order.

What all handlers use is here too: the replica, JSON bodies of requests, and JSON responses.

Events are written straight from the engine's timer to the connection's transport, so that a token costs no task
switch: one HTTP chunk for each event, as vLLM sends them, and one write per stream and engine step. aiohttp sends the
headers before and ends the body after.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
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


async def read_json(request: web.Request) -> dict[str, object]:
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


class CompletionFormat:
    """The events of a chat or completion, prepared so that a token costs one join."""

    def __init__(self, generation: Generation, response_id: str) -> None:
        request = generation.request
        self._generation = generation
        self._call = request.call
        self._response_id = response_id
        self._is_chat = request.is_chat
        kind = "chat.completion.chunk" if request.is_chat else "text_completion"
        model = _encode(request.model).decode()
        quoted_id = _encode(response_id).decode()
        created = int(time.time())
        self._head = f'data: {{"id":{quoted_id},"object":"{kind}","created":{created},"model":{model},"choices":['
        self._before = '"delta":{"content":' if request.is_chat else '"text":'
        self._after = '},"logprobs":null' if request.is_chat else ',"logprobs":null'
        if request.call is not None:
            self._before = '"delta":{"tool_calls":[{"index":0,"function":{"arguments":'
            self._after = '}}]},"logprobs":null'
        null_stop = "" if request.is_chat else ',"stop_reason":null,"prompt_token_ids":null'
        self._middle = f'{self._after},"finish_reason":null{null_stop},"token_ids":null}}]'

    def created(self) -> list[bytes]:
        """This API has no events before the first token."""
        return []

    def start(self) -> list[bytes]:
        """Chat's first event of each choice, and the beginning of its call."""
        indexes = range(len(self._generation.choices))
        events = [self._role(index) for index in indexes] if self._is_chat else []
        return events if self._call is None else events + [self._opening(self._call, index) for index in indexes]

    def _opening(self, call: ToolCall, index: int) -> bytes:
        function = {"name": call.name, "arguments": call.opening}
        started = {"id": call_id(self._response_id, index), "type": "function", "index": 0, "function": function}
        delta = _encode({"tool_calls": [started]}).decode()
        end = ',"logprobs":null,"finish_reason":null,"token_ids":null}]'
        return f'{self._head}{{"index":{index},"delta":{delta}{end}{self._running_usage(0)}}}\n\n'.encode()

    def close(self) -> list[bytes]:
        """The usage, if the request includes it, and [DONE]."""
        return [self._usage(), DONE] if self._generation.request.include_usage else [DONE]

    def failure(self) -> list[bytes]:
        """An error event and [DONE]."""
        return [b"data: " + error_body(500, "InternalServerError", CRASHED) + b"\n\n", DONE]

    def _role(self, index: int) -> bytes:
        delta = f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]'
        return f'{self._head}{delta}{self._running_usage(0)},"prompt_token_ids":null,"prompt_text":null}}\n\n'.encode()

    def token(self, choice: Choice, number: int) -> bytes:
        """The event of token ``number`` (from 0), not the last. The text of a token needs no JSON escapes."""
        text = f'{{"index":{choice.index},{self._before}"{choice.pieces[number]}"{self._middle}'
        return f"{self._head}{text}{self._running_usage(number + 1)}}}\n\n".encode()

    def last(self, choice: Choice, text: str) -> bytes:
        """The event that ends a choice, with its last text (empty after an abort)."""
        stop = _encode(choice.stop_reason).decode()
        ids = "" if self._is_chat else ',"prompt_token_ids":null'
        reason = finish_reason_of(choice, self._call)
        end = f'{self._after},"finish_reason":"{reason}","stop_reason":{stop}{ids},"token_ids":null}}]'
        mark = "" if self._generation.request.include_usage else f',"system_fingerprint":"{FINGERPRINT}"'
        quoted = f'"{text}"' if self._call is None else _encode(text + self._call.closing).decode()
        body = f'{self._head}{{"index":{choice.index},{self._before}{quoted}{end}'
        return f"{body}{self._running_usage(choice.generated)}{mark}}}\n\n".encode()

    def _usage(self) -> bytes:
        total = _encode(usage(self._generation, is_stream=True)).decode()
        return f'{self._head}],"usage":{total},"system_fingerprint":"{FINGERPRINT}"}}\n\n'.encode()

    def _running_usage(self, completion: int) -> str:
        """``continuous_usage_stats``: usage of the choice so far, without details."""
        if not self._generation.request.continuous_usage:
            return ""
        prompt = self._generation.prompt_tokens
        counts = f'"prompt_tokens":{prompt},"total_tokens":{prompt + completion},"completion_tokens":{completion}'
        return f',"usage":{{{counts},"completion_tokens_details":null}}'


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
