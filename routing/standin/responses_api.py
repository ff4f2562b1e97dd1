"""The responses API, as vLLM 0.32 serves it with its store: a request becomes a chat, and responses are kept."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from typing import Any, Final

import msgspec

from routing.standin.errors import ApiError, bad_request, invalid
from routing.standin.replica import Choice, Generation
from routing.standin.responses import CRASHED, Api
from routing.standin.tools import ToolCall

PATH: Final = "/v1/responses"
MAX_STORED: Final = 1000
_TEXTS: Final = ("input_text", "output_text")
_encode: Final = msgspec.json.encode


class StoredResponse:
    """A response, and the conversation that it ends."""

    def __init__(self, document: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        self.document = document
        self.messages = messages


class ResponseStore:
    """The latest responses."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def add(self, response: StoredResponse) -> None:
        """Store a response under its id, and drop the oldest if there are too many."""
        self._responses[response.document["id"]] = response
        if len(self._responses) > MAX_STORED:
            self._responses.popitem(last=False)

    def find(self, response_id: str) -> StoredResponse:
        """The response with this id; ApiError if there is none."""
        response = self._responses.get(response_id)
        if response is None:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(404, "invalid_request_error", message, "response_id")
        return response


def chat_body(body: dict[str, Any], store: ResponseStore) -> dict[str, Any]:
    """The chat completion request that a Responses request is converted to, with the conversation before it."""
    if body.get("background"):
        raise bad_request("The stand-in does not support background responses.", "background")
    if body.get("input") is None:
        raise invalid("missing", "body.input", "Field required", body)
    previous = body.get("previous_response_id")
    messages = [] if previous is None else store.find(str(previous)).messages
    if body.get("instructions"):
        rest = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": body["instructions"]}, *rest]
    chat = {
        "model": body.get("model"),
        "messages": [*messages, *_messages(body["input"])],
        "max_tokens": body.get("max_output_tokens"),
        "stream": body.get("stream"),
        "temperature": body.get("temperature"),
        "cache_salt": body.get("cache_salt"),
    }
    if not body.get("tools"):
        return chat
    return chat | {"tools": body["tools"], "tool_choice": body.get("tool_choice", "auto")}


def _messages(items: Any) -> list[dict[str, Any]]:
    """The input as chat messages: a text, or a list of messages, calls and their outputs."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise invalid("list_type", "body.input", "Input should be a valid list", items)
    return [_message(item) for item in items]


def _message(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if item.get("type") == "function_call_output":
        return {"role": "tool", "content": item.get("output")}
    content = item.get("content")
    parts = [_part(part) for part in content] if isinstance(content, list) else content
    return {"role": item.get("role", "user"), "content": parts}


def _part(part: Any) -> Any:
    is_text = isinstance(part, dict) and part.get("type") in _TEXTS
    return {"type": "text", "text": part.get("text")} if is_text else part


class ResponseFormat:
    """One response: its document, and its events."""

    def __init__(
        self, generation: Generation, body: dict[str, Any], messages: list[dict[str, Any]], store: ResponseStore
    ) -> None:
        self._generation = generation
        self._call = generation.request.call
        self._body = body
        self._messages = messages
        self._store = store
        self._id = str(body.get("request_id") or f"resp_{secrets.token_hex(8)}")  # clients may choose it, as at vLLM
        self._item_id = f"msg_{secrets.token_hex(8)}"
        self._created_at = int(time.time())
        self._number = 0  # of the next event

    def complete(self) -> dict[str, Any]:
        """The complete response, which is stored unless the request says otherwise."""
        document = self._document()
        if self._body.get("store") is not False:
            (item,) = document["output"]
            self._store.add(StoredResponse(document, [*self._messages, _message(item)]))
        return document

    def _document(self, *, is_complete: bool = True) -> dict[str, Any]:
        """The response object."""
        body, (choice,) = self._body, self._generation.choices
        is_cut = is_complete and choice.finish_reason == "length"
        return {
            "id": self._id,
            "created_at": self._created_at,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": self._generation.request.model,
            "object": "response",
            "output": [self._item("completed", choice.text)] if is_complete else [],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": body.get("tool_choice") or "none",
            "tools": body.get("tools") or [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self._generation.request.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": body.get("previous_response_id"),
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": "in_progress" if not is_complete else "incomplete" if is_cut else "completed",
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": self._usage() if is_complete else None,
            "user": body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, output = self._generation.prompt_tokens, self._generation.completion_tokens
        cached = {"cached_tokens": self._generation.cached_tokens, "cache_write_tokens": 0}
        none: dict[str, list[int]] = {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
        return {
            "input_tokens": prompt,
            "input_tokens_details": cached | {"input_tokens_per_turn": [], "cached_tokens_per_turn": []},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0} | none,
            "total_tokens": prompt + output,
        }

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        if self._call is not None:
            return self._call_item(self._call, status, text)
        content = [] if text is None else [_text_part(text)]
        message = {"id": self._item_id, "content": content, "role": "assistant", "status": status}
        return message | {"type": "message", "phase": None}

    def _call_item(self, call: ToolCall, status: str, text: str | None) -> dict[str, Any]:
        arguments = "" if text is None else call.arguments(text)
        item = {"arguments": arguments, "call_id": f"call_{self._id[5:]}", "name": call.name, "type": "function_call"}
        return item | {"id": self._item_id, "status": status}

    # --- events ---

    def created(self) -> list[bytes]:
        """The events that come at once."""
        response = self._document(is_complete=False)
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def start(self) -> list[bytes]:
        """The output, and its only part or the beginning of its tool call."""
        added = self._event("output_item.added", item=self._item("in_progress", None), output_index=0)
        if self._call is not None:
            return [added, self._delta(self._call.opening)]
        return [added, self._of_part("content_part.added", part=_text_part(""))]

    def token(self, choice: Choice, number: int) -> bytes:
        """The text of one token."""
        return self._delta(choice.pieces[number])

    def last(self, choice: Choice, text: str) -> bytes:
        """The last text, if any."""
        del choice
        text += "" if self._call is None else self._call.closing
        return self._delta(text) if text else b""

    def _delta(self, text: str) -> bytes:
        if self._call is None:
            return self._of_part("output_text.delta", delta=text, logprobs=[])
        return self._event("function_call_arguments.delta", delta=text, item_id=self._item_id, output_index=0)

    def close(self) -> list[bytes]:
        """The whole text, and the whole response."""
        item = self._item("completed", self._generation.choices[0].text)
        return [
            *self._done(item),
            self._event("output_item.done", item=item, output_index=0),
            self._event("completed", response=self.complete()),
        ]

    def _done(self, item: dict[str, Any]) -> list[bytes]:
        if self._call is not None:
            fields = {"arguments": item["arguments"], "name": item["name"], "item_id": self._item_id}
            return [self._event("function_call_arguments.done", output_index=0, **fields)]
        (part,) = item["content"]
        return [
            self._of_part("output_text.done", logprobs=[], text=part["text"]),
            self._of_part("content_part.done", part=part),
        ]

    def failure(self) -> list[bytes]:
        """A response that has failed."""
        error = {"code": "server_error", "message": CRASHED}
        return [
            self._event("failed", response=self._document(is_complete=False) | {"status": "failed", "error": error})
        ]

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, content_index=0, item_id=self._item_id, output_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        data = _encode(fields | {"sequence_number": self._number, "type": name})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _text_part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def api_of(body: dict[str, Any], messages: list[dict[str, Any]], store: ResponseStore) -> Api:
    """The ``Api`` that writes the response to one request. The response gets an id of its own, not the request's."""

    def whole(generation: Generation, _: str) -> bytes:
        return _encode(ResponseFormat(generation, body, messages, store).complete())

    def stream(generation: Generation, _: str) -> ResponseFormat:
        return ResponseFormat(generation, body, messages, store)

    return Api("resp", whole, stream)
