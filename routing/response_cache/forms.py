"""The two forms of a generated response, as one JSON object and as a stream of events, and conversion between them.

A stream that was stored answers a later request for a whole response, and the other way round. Conversions have the
members that vLLM 0.32 sends, in its order (``tests/data``), except those that only one form has. Streams from a
conversion have one event per choice or content block, not one per token. A form with anything unexpected is not
converted: the functions return None, and the request is a miss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from routing.http.usage import Fingerprint, UsageFilter
from routing.paths import DataPath

Json = dict[str, Any]

CHAT: Final = DataPath.CHAT_COMPLETIONS.encode()
MESSAGES: Final = DataPath.MESSAGES.encode()
DONE: Final = b"[DONE]"
_TEXTS: Final = ("content", "reasoning", "reasoning_content", "refusal")
_BLOCK_TEXTS: Final = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}

_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.encode


def whole_of_stream(path: bytes, data: bytes) -> Json | None:
    """The response that the events of a complete stream amount to; None if it is incomplete or not understood."""
    try:
        events = list(_events(data))
        if path == MESSAGES:
            return _whole_message(events)
        return _whole_choices(events, is_chat=path == CHAT)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, IndexError):
        return None


def stream_of_whole(path: bytes, whole: Json, *, with_usage: bool) -> bytes | None:
    """The events of a stream with this response; ``with_usage``: the client asked for the usage event."""
    try:
        if path == MESSAGES:
            return b"".join(_message_events(whole))
        return b"".join(_choice_events(whole, is_chat=path == CHAT, with_usage=with_usage))
    except (KeyError, TypeError, AttributeError):
        return None


def without_usage_event(data: bytes) -> bytes:
    """A stream of choices without its usage event, for a client that did not ask for one."""
    usage_filter = UsageFilter(Fingerprint())
    return usage_filter.feed(data) + usage_filter.flush()


def _events(data: bytes) -> Iterator[Json]:
    """The JSON objects of a stream's events; KeyError if the stream has no end."""
    is_complete = False
    for line in data.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        text = line[5:].strip()
        if text == DONE:
            is_complete = True
            break
        event = _decode(text)
        yield event
        is_complete = event.get("type") == "message_stop"
    if not is_complete:
        raise KeyError("end")


# --- choices: chat and completions ---


def _whole_choices(events: list[Json], *, is_chat: bool) -> Json | None:
    first, choices, usage, fingerprint = events[0], dict[int, Json](), None, None
    for event in events:
        if "error" in event:
            return None
        usage = event.get("usage") or usage
        fingerprint = event.get("system_fingerprint") or fingerprint
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], _empty_choice(part["index"], is_chat=is_chat))
            if is_chat:
                _add_delta(choice["message"], part["delta"])
            else:
                choice["text"] += part["text"]
            _add_details(choice, part)
    for choice in choices.values():
        if is_chat:
            _finish_message(choice["message"])
    return {
        "id": first["id"],
        "object": "chat.completion" if is_chat else "text_completion",
        "created": first["created"],
        "model": first["model"],
        "choices": [choices[index] for index in sorted(choices)],
        "service_tier": None,
        "system_fingerprint": fingerprint,
        "usage": usage,
    }


def _empty_choice(index: int, *, is_chat: bool) -> Json:
    empty: Json = {"index": index}
    if is_chat:
        message = {"role": "assistant", "content": None, "refusal": None, "annotations": None, "audio": None}
        empty["message"] = {**message, "function_call": None, "reasoning": None}
    else:
        empty["text"] = ""
    return {**empty, "logprobs": None, "finish_reason": None, "stop_reason": None, "token_ids": None}


def _add_delta(message: Json, delta: Json) -> None:
    message["role"] = delta.get("role") or message["role"]
    for name in _TEXTS:
        if delta.get(name) is not None:
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", {})
        known = calls.setdefault(
            call["index"], {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        known["id"] = call.get("id") or known["id"]
        function = call.get("function") or {}
        known["function"]["name"] = function.get("name") or known["function"]["name"]
        known["function"]["arguments"] += function.get("arguments") or ""


def _finish_message(message: Json) -> None:
    if "tool_calls" in message:
        calls = message["tool_calls"]
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        message["content"] = message["content"] or None


def _add_details(choice: Json, part: Json) -> None:
    for name in ("finish_reason", "stop_reason"):
        choice[name] = part.get(name) if part.get(name) is not None else choice[name]
    if part.get("token_ids") is not None:
        choice["token_ids"] = (choice["token_ids"] or []) + part["token_ids"]
    logprobs = part.get("logprobs")
    if logprobs is not None:
        known = choice["logprobs"] = choice["logprobs"] or {}
        for name, values in logprobs.items():
            known[name] = (known.get(name) or []) + values if isinstance(values, list) else values


def _choice_events(whole: Json, *, is_chat: bool, with_usage: bool) -> Iterator[bytes]:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    head = {"id": whole["id"], "object": kind, "created": whole["created"], "model": whole["model"]}
    for choice in whole["choices"]:
        details = {name: choice.get(name) for name in ("finish_reason", "stop_reason", "token_ids")}
        if is_chat:
            begin = {"index": choice["index"], "delta": {"role": "assistant", "content": ""}}
            yield _event({**head, "choices": [{**begin, "logprobs": None, "finish_reason": None}]})
            content = {"delta": _delta(choice["message"])}
        else:
            content = {"text": choice["text"]}
        parts = {"index": choice["index"], **content, "logprobs": choice.get("logprobs"), **details}
        yield _event({**head, "choices": [parts], "system_fingerprint": whole.get("system_fingerprint")})
    if with_usage:
        yield _event({**head, "choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def _delta(message: Json) -> Json:
    delta = {name: message[name] for name in _TEXTS if message.get(name) is not None}
    if message.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
    return delta


def _event(content: Json) -> bytes:
    return b"data: %b\n\n" % _encode(content)


# --- Anthropic's messages ---


def _whole_message(events: list[Json]) -> Json | None:
    message: Json = {}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = {**event["message"], "content": []}
        elif kind == "content_block_start":
            message["content"].append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            _add_block_delta(message["content"][event["index"]], event["delta"])
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = {**message["usage"], **(event.get("usage") or {})}
        elif kind == "error":
            return None
    for block in message["content"]:
        if isinstance(text := block.pop("_json", None), str):
            block["input"] = _decode(text or "{}")
    return message


def _add_block_delta(block: Json, delta: Json) -> None:
    if delta["type"] == "input_json_delta":
        block["_json"] = block.get("_json", "") + delta["partial_json"]
        return
    name = _BLOCK_TEXTS[delta["type"]]
    block[name] = (block.get(name) or "") + delta[name]


def _message_events(whole: Json) -> Iterator[bytes]:
    usage = whole["usage"]
    empty = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    yield _named("message_start", message={**empty, "usage": {**usage, "output_tokens": 0}})
    for index, block in enumerate(whole["content"]):
        start, deltas = _block_parts(block)
        yield _named("content_block_start", content_block=start, index=index)
        for delta in deltas:
            yield _named("content_block_delta", delta=delta, index=index)
        yield _named("content_block_stop", index=index)
    delta = {"stop_reason": whole["stop_reason"], "stop_sequence": whole.get("stop_sequence")}
    yield _named("message_delta", delta=delta, usage=usage)
    yield _named("message_stop")


def _block_parts(block: Json) -> tuple[Json, list[Json]]:
    """The block of ``content_block_start``, and its deltas; KeyError for an unknown kind of block."""
    if block["type"] == "tool_use":
        partial = _encode(block["input"]).decode()
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": partial}]
    names = {"text": ("text",), "thinking": ("thinking", "signature")}[block["type"]]
    kinds = {name: kind for kind, name in _BLOCK_TEXTS.items()}
    deltas = [{"type": kinds[name], name: block[name]} for name in names if block.get(name)]
    return {**block, **{name: "" for name in names if name in block}}, deltas


def _named(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **content}))


# --- what may be stored ---

_ENDS: Final = {"stop", "end_turn", "stop_sequence"}
_LENGTH_ENDS: Final = {"length", "max_tokens"}
_CALL_ENDS: Final = {"tool_calls", "tool_use", "function_call"}


def may_store(whole: Json, *, has_length_limit: bool, stores_tool_calls: bool) -> bool:
    """Whether a response is complete and neither filtered nor refused.

    One that ended at a length limit counts as complete if the request set the limit (``has_length_limit``).
    """
    if "error" in whole:
        return False
    if whole.get("type") == "message":
        endings, contents = [whole.get("stop_reason")], whole.get("content") or []
        has_calls = any(block.get("type") == "tool_use" for block in contents)
    else:
        choices = whole.get("choices")
        if choices is None:
            return True  # embeddings and scores have no ending
        endings = [choice.get("finish_reason") for choice in choices]
        messages = [choice.get("message") or {} for choice in choices]
        if any(message.get("refusal") for message in messages):
            return False
        has_calls = any(message.get("tool_calls") or message.get("function_call") for message in messages)
    allowed = _ENDS | (_LENGTH_ENDS if has_length_limit else set()) | (_CALL_ENDS if stores_tool_calls else set())
    return bool(endings) and all(ending in allowed for ending in endings) and (stores_tool_calls or not has_calls)
