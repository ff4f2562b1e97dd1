"""Anthropic's messages API, as vLLM 0.32 serves it: a request becomes a chat, and the output a message."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from routing.paths import Message, MessagesBody
from routing.prompt.anthropic import chat_messages
from routing.standin.errors import ApiError, invalid
from routing.standin.replica import Choice, Generation
from routing.standin.requests import read_messages
from routing.standin.responses import CRASHED, Api, finish_reason_of
from routing.standin.tools import ToolCall, call_id

PATH: Final = "/v1/messages"
FRAMEWORK_ERROR: Final = "Bad Request"  # errors of the framework keep its own format, also on this path
# null for an aborted generation
_STOP_REASONS: Final = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
_TOOL_CHOICES: Final = {"any": "required", "none": "none"}
_encode: Final = msgspec.json.encode


def error_body(error: ApiError) -> bytes:
    """An error in Anthropic's format, with the type that vLLM gives it."""
    return _encode({"type": "error", "error": {"type": error.kind, "message": str(error)}})


def chat_body(body: dict[str, Any], *, is_counted: bool = False) -> dict[str, Any]:
    """The chat that vLLM makes of a request. ``is_counted``: only its tokens are counted."""
    for name in ("model",) if is_counted else ("model", "max_tokens"):
        if not body.get(name):
            raise invalid("missing", f"body.{name}", "Field required", body)
    read_messages(body)
    converted = chat_messages(MessagesBody(system=body.get("system"), messages=body["messages"]), lambda _: None)
    chat = {
        "model": body["model"],
        "messages": [_as_dict(message) for message in converted],
        "stream": body.get("stream"),
        "max_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences"),
        "temperature": body.get("temperature"),
        "cache_salt": body.get("cache_salt"),
    }
    return chat | _tools(body) if body.get("tools") else chat


def _as_dict(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content, "tool_calls": message.tool_calls}


def _tools(body: dict[str, Any]) -> dict[str, Any]:
    choice = body.get("tool_choice") or {}
    functions = [
        {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
        for tool in body["tools"]
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    if choice.get("type") == "tool":
        return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    return {"tools": tools, "tool_choice": _TOOL_CHOICES.get(str(choice.get("type")), "auto")}


def usage(generation: Generation) -> dict[str, int]:
    """The usage object, in which cached tokens are not part of the input tokens."""
    cached, created = generation.cached_tokens, generation.created_cache_tokens
    return {
        "input_tokens": generation.prompt_tokens - cached - created,
        "output_tokens": generation.completion_tokens,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
    }


def whole_message(generation: Generation, response_id: str) -> bytes:
    """The body of a response that is not streamed; null members are left out."""
    (choice,), call = generation.choices, generation.request.call
    reasons = {name: value for name, value in _stop(choice, call).items() if value is not None}
    content: list[dict[str, Any]] = [{"type": "text", "text": choice.text}]
    if call is not None:
        content = [_tool_use(call, response_id) | {"input": {call.argument: choice.text}}]
    return _encode(_message(generation, response_id) | {"content": content} | reasons | {"usage": usage(generation)})


def _message(generation: Generation, response_id: str) -> dict[str, Any]:
    model = generation.request.model
    return {"id": response_id, "type": "message", "role": "assistant", "content": [], "model": model}


def _tool_use(call: ToolCall, response_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id(response_id, 0), "name": call.name, "input": {}}


def _stop(choice: Choice, call: ToolCall | None) -> dict[str, str | None]:
    reason = _STOP_REASONS.get(finish_reason_of(choice, call) or "")
    reason = "stop_sequence" if choice.stop_reason is not None else reason
    return {"stop_reason": reason, "stop_sequence": choice.stop_reason}


class MessageFormat:
    """The events of one message."""

    def __init__(self, generation: Generation, response_id: str) -> None:
        self._generation = generation
        self._call = generation.request.call
        self._id = response_id

    def created(self) -> list[bytes]:
        """None: vLLM sends the first event with the first token."""
        return []

    def start(self) -> list[bytes]:
        """The message, and its only block."""
        message = _message(self._generation, self._id) | {"stop_reason": None, "stop_sequence": None}
        tokens = {"input_tokens": self._generation.prompt_tokens, "output_tokens": 0}
        started = _event("message_start", message=message | {"usage": tokens})
        if self._call is None:
            return [started, _event("content_block_start", content_block={"type": "text", "text": ""}, index=0)]
        block = _tool_use(self._call, self._id)
        return [started, _event("content_block_start", content_block=block, index=0), self._delta(self._call.opening)]

    def token(self, choice: Choice, number: int) -> bytes:
        """The text of one token."""
        return self._delta(choice.pieces[number])

    def last(self, choice: Choice, text: str) -> bytes:
        """The last text, if any."""
        del choice
        text += "" if self._call is None else self._call.closing
        return self._delta(text) if text else b""

    def _delta(self, text: str) -> bytes:
        text_delta = {"type": "text_delta", "text": text}
        delta = text_delta if self._call is None else {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", delta=delta, index=0)

    def close(self) -> list[bytes]:
        """The end of the block, the stop reason with the usage, and the end of the message."""
        (choice,) = self._generation.choices
        return [
            _event("content_block_stop", index=0),
            _event("message_delta", delta=_stop(choice, self._call), usage=usage(self._generation)),
            _event("message_stop"),
        ]

    def failure(self) -> list[bytes]:
        """An error event."""
        return [_event("error", error={"type": "internal_error", "message": CRASHED})]


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind} | fields))


MESSAGES = Api("chatcmpl", whole_message, MessageFormat)
