"""Converts bodies of Anthropic's messages API to the chat messages and tools that vLLM renders for them.

The order is that of the engine's chat template: tools, then ``system``, then the messages. The results of tools come
before the other blocks of their message. Cache marks (``cache_control``) change no token and move between turns, so
they are left out. Blocks with the attribution line of some clients, which changes with each request, are dropped, as
vLLM does. System messages stay where they are; engines with templates that allow only one system message move
them to the start, which the router cannot know.

Values of types that the API does not define stay as they are: the canonical prompt contains them as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from routing.paths import Message, MessagesBody

ATTRIBUTION: Final = "x-anthropic-billing-header"
_TOOL_CHANGES: Final = ("tool_addition", "tool_removal")
_NOT_CONTENT: Final = ("tool_use", "thinking", "redacted_thinking", "tool_reference", *_TOOL_CHANGES)
_encode_json: Final = msgspec.json.Encoder().encode  # keeps the order of keys, as engines do in the arguments of calls


def chat_messages(body: MessagesBody, count_parts: Callable[[int], None]) -> list[Any]:
    """The system prompt and the messages in OpenAI's form. ``count_parts`` gets the number of blocks of each list."""
    converted: list[Any] = []
    system = body.system
    if type(system) is list:
        count_parts(len(system))
        _append_system(system, converted)
    elif system:
        converted.append(Message(role="system", content=system))
    if type(body.messages) is not list:
        return converted if body.messages is None else [*converted, body.messages]
    count_parts(len(body.messages))
    for message in body.messages:
        if type(message) is dict:
            _convert(message, converted, count_parts)
        else:
            converted.append(message)
    return converted


def rendered_tools(body: MessagesBody) -> Any:
    """The tools without cache marks, and the changes to them in later system messages."""
    tools = body.tools
    if type(tools) is not list:
        return tools
    rendered = [_without_mark(tool) for tool in tools]
    for message in body.messages if type(body.messages) is list else ():
        if type(message) is dict and message.get("role") == "system" and type(message.get("content")) is list:
            rendered += [_without_mark(block) for block in message["content"] if _kind(block) in _TOOL_CHANGES]
    return rendered


def effort_of(body: MessagesBody) -> Any:
    """The reasoning effort that the engine renders; None if the body sets none."""
    if type(body.thinking) is dict and body.thinking.get("type") == "disabled":
        return "none"
    return body.output_config.get("effort") if type(body.output_config) is dict else None


def _convert(message: dict[str, Any], converted: list[Any], count_parts: Callable[[int], None]) -> None:
    role, content = message.get("role"), message.get("content")
    if type(content) is list:
        count_parts(len(content))
        if role == "system":
            _append_system(content, converted)
        else:
            _convert_blocks(role, content, converted, count_parts)
    elif not (role == "system" and type(content) is str and content.startswith(ATTRIBUTION)):
        converted.append(Message(role=role, content=content))


def _convert_blocks(role: Any, content: list[Any], converted: list[Any], count_parts: Callable[[int], None]) -> None:
    blocks = content
    if role == "user":
        for block in content:
            if _kind(block) == "tool_result":
                _convert_result(block, converted, count_parts)
        blocks = [block for block in content if _kind(block) != "tool_result"]
    parts = [part for part in map(_part, blocks) if part]
    if not parts and role == "user":
        return
    message = Message(role=role, content=parts[0] if len(parts) == 1 and type(parts[0]) is str else parts or None)
    message.tool_calls = [_tool_call(block) for block in blocks if _kind(block) == "tool_use"]
    message.reasoning = "".join(_texts(blocks, "thinking"))
    converted.append(message)


def _part(block: Any) -> Any:
    """A text, an image or a block of an unknown type; None for a block that is no part of the content."""
    kind = _kind(block)
    if kind == "text" and type(text := block.get("text") or "") is str:
        return text
    return None if kind in _NOT_CONTENT else block


def _convert_result(block: dict[str, Any], converted: list[Any], count_parts: Callable[[int], None]) -> None:
    """Append the result of a tool: its text, then its images as a user's message."""
    content, call_id = block.get("content"), block.get("tool_use_id")
    if type(content) is not list:
        converted.append(Message(role="tool", content=content, tool_call_id=call_id))
        return
    count_parts(len(content))
    converted.append(Message(role="tool", content="\n".join(_texts(content)), tool_call_id=call_id))
    others = [item for item in content if _kind(item) != "text"]
    if others:
        converted.append(Message(role="user", content=others))


def _tool_call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = _encode_json(block.get("input") or {}).decode()
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _append_system(blocks: list[Any], converted: list[Any]) -> None:
    text = "".join([text for text in _texts(blocks) if not text.startswith(ATTRIBUTION)])
    if text:
        converted.append(Message(role="system", content=text))


def _texts(blocks: list[Any], kind: str = "text") -> list[str]:
    """The texts of the blocks of one kind; the field has the name of the kind."""
    values = [block.get(kind) for block in blocks if _kind(block) == kind]
    return [value for value in values if type(value) is str]


def _without_mark(value: Any) -> Any:
    if type(value) is not dict or "cache_control" not in value:
        return value
    return {name: value[name] for name in value if name != "cache_control"}


def _kind(block: Any) -> Any:
    return block.get("type") if type(block) is dict else None
