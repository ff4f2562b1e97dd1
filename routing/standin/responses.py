"""Answers in vLLM 0.32's words: whole bodies, and the events of a stream. Field order is that of the captures.

A stream of server-sent events, written straight from the engine's timer.

One HTTP chunk for each event, as vLLM sends them, and one write for all that a step brings to a stream. The bytes go
to the connection's transport directly, so a token costs no task switch; aiohttp has sent the head before and ends
the body after.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from routing.standin.errors import CrashAfterChunks, error_body
from routing.standin.generation import Choice, Generation
from routing.standin.requests import encode, token_ids

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-standin"
DONE = b"data: [DONE]\n\n"
_COUNTS = ("prompt_tokens", "total_tokens", "completion_tokens")  # of a usage object, beside its details

_encode = msgspec.json.encode


def usage(generation: Generation) -> dict[str, Any]:
    """The usage object of a whole answer."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    details = {
        "cached_tokens": generation.cached_tokens,
        "created_cache_tokens": generation.created_cache_tokens if generation.ask.is_chat else None,
        "multimodal_tokens": None,
    }
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }


def stream_usage(generation: Generation) -> dict[str, Any]:
    """The usage object of a stream's last chunk: without the fields that are null."""
    whole = usage(generation)
    details = {name: value for name, value in whole["prompt_tokens_details"].items() if value is not None}
    return {**{name: whole[name] for name in _COUNTS}, "prompt_tokens_details": details}


def whole_answer(generation: Generation, answer_id: str) -> bytes:
    """The body of an answer that is not streamed."""
    is_chat = generation.ask.is_chat
    make = _chat_choice if is_chat else _completion_choice
    body: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": generation.ask.model,
        "choices": [make(choice, generation) for choice in generation.choices],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(generation),
    }
    if is_chat:
        body |= {"prompt_logprobs": None, "prompt_token_ids": _prompt_ids(generation, 0), "prompt_text": None}
    body |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    return _encode(body)


def _chat_choice(choice: Choice, generation: Generation) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": choice.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    return {
        "index": choice.index,
        "message": message,
        "logprobs": {"content": [_logprob(piece) for piece in choice.pieces]} if generation.ask.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": _ids(choice, generation),
        "routed_experts": None,
    }


def _completion_choice(choice: Choice, generation: Generation) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": _ids(choice, generation),
        "prompt_logprobs": None,
        "prompt_token_ids": _prompt_ids(generation, choice.index // generation.ask.n),
        "routed_experts": None,
    }


def _logprob(piece: str) -> dict[str, Any]:
    own = {"token": piece, "logprob": -1.0, "bytes": list(piece.encode())}
    return {**own, "top_logprobs": [own]}


def _ids(choice: Choice, generation: Generation) -> list[int] | None:
    return token_ids(encode(choice.text.encode())) if generation.ask.return_token_ids else None


def _prompt_ids(generation: Generation, index: int) -> list[int] | None:
    return token_ids(generation.ask.prompts[index]) if generation.ask.return_token_ids else None


class StreamFormat:
    """The events of one stream, prepared so that a token costs one join."""

    def __init__(self, generation: Generation, answer_id: str) -> None:
        ask = generation.ask
        self._generation = generation
        self._is_chat = ask.is_chat
        kind = "chat.completion.chunk" if ask.is_chat else "text_completion"
        model = _encode(ask.model).decode()
        quoted_id = _encode(answer_id).decode()
        created = int(time.time())
        self._head = f'data: {{"id":{quoted_id},"object":"{kind}","created":{created},"model":{model},"choices":['
        self._before = '"delta":{"content":' if ask.is_chat else '"text":'
        after = '},"logprobs":null' if ask.is_chat else ',"logprobs":null'
        null_stop = "" if ask.is_chat else ',"stop_reason":null,"prompt_token_ids":null'
        self._middle = f'{after},"finish_reason":null{null_stop},"token_ids":null}}]'
        self._after = after

    def role(self, index: int) -> bytes:
        """Chat's first event of each choice."""
        delta = f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]'
        return f'{self._head}{delta}{self._running_usage(0)},"prompt_token_ids":null,"prompt_text":null}}\n\n'.encode()

    def token(self, choice: Choice, number: int) -> bytes:
        """The event of token ``number`` (from 0), not the last."""
        text = _quoted(choice.pieces[number])
        usage_part = self._running_usage(number + 1)
        return f'{self._head}{{"index":{choice.index},{self._before}{text}{self._middle}{usage_part}}}\n\n'.encode()

    def last(self, choice: Choice, text: str) -> bytes:
        """The event that ends a choice, with the text that is left (none after an abort)."""
        stop = _encode(choice.stop_reason).decode()
        ids = "" if self._is_chat else ',"prompt_token_ids":null'
        end = f'{self._after},"finish_reason":"{choice.finish_reason}","stop_reason":{stop}{ids},"token_ids":null}}]'
        mark = "" if self._generation.ask.include_usage else f',"system_fingerprint":"{FINGERPRINT}"'
        body = f'{self._head}{{"index":{choice.index},{self._before}{_quoted(text)}{end}'
        return f"{body}{self._running_usage(choice.generated)}{mark}}}\n\n".encode()

    def usage(self) -> bytes:
        """The event before [DONE] where usage was asked for."""
        total = _encode(stream_usage(self._generation)).decode()
        return f'{self._head}],"usage":{total},"system_fingerprint":"{FINGERPRINT}"}}\n\n'.encode()

    def _running_usage(self, completion: int) -> str:
        """``continuous_usage_stats``: usage of the choice so far, without details."""
        generation = self._generation
        if not generation.ask.continuous_usage:
            return ""
        prompt = generation.prompt_tokens
        counts = f'"prompt_tokens":{prompt},"total_tokens":{prompt + completion},"completion_tokens":{completion}'
        return f',"usage":{{{counts},"completion_tokens_details":null}}'


def _quoted(text: str) -> str:
    """A JSON string; the stand-in's own text needs no escapes."""
    return f'"{text}"'


class EventStream:
    """Turns a generation's progress into chunks on a transport."""

    def __init__(
        self, generation: Generation, answer_id: str, transport: asyncio.Transport, crash: CrashAfterChunks | None
    ) -> None:
        self._generation = generation
        self._format = StreamFormat(generation, answer_id)
        self._transport = transport
        self._crash = crash
        self._sent = 0  # events
        self._has_roles = not generation.ask.is_chat

    def on_token(self, choice: Choice, before: int) -> None:
        """Send the events of a choice's new tokens; ``Generation.start`` calls it."""
        events: list[bytes] = []
        if not self._has_roles:
            self._has_roles = True
            events += (self._format.role(index) for index in range(len(self._generation.choices)))
        ends = choice.finish_reason is not None
        whole = choice.generated - 1 if ends and choice.generated > before else choice.generated
        events += (self._format.token(choice, number) for number in range(before, whole))
        if ends:
            events.append(self._format.last(choice, "".join(choice.pieces[whole : choice.generated])))
        self._send(events)

    def close(self) -> None:
        """Send what follows the last choice's end."""
        events = [self._format.usage()] if self._generation.ask.include_usage else []
        self._send([*events, DONE])

    @property
    def is_broken(self) -> bool:
        """Whether a fault has cut the stream short."""
        return self._crash is not None and self._sent >= self._crash.chunks

    def _send(self, events: list[bytes]) -> None:
        if self.is_broken or self._transport.is_closing():
            return
        if self._crash is not None:
            events = events[: self._crash.chunks - self._sent]
        self._sent += len(events)
        self._write(events)
        if self._crash is not None and self._sent >= self._crash.chunks:
            self._break(self._crash)

    def _write(self, events: list[bytes]) -> None:
        self._transport.write(b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events))

    def _break(self, crash: CrashAfterChunks) -> None:
        """Do what the fault says, and let the handler go."""
        if crash.how == "connection":
            self._transport.abort()
        else:
            failure = error_body(500, "InternalServerError", "EngineCore encountered an issue.")
            self._write([b"data: " + failure + b"\n\n", DONE])
        self._generation.end()
