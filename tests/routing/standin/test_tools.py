"""Calls of tools in the three chat APIs of the stand-in replica, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.routing.standin.replica_process import ReplicaProcess, Response, replica_process

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
MESSAGES = [{"role": "user", "content": "What is in a.txt?"}]
CHAT = {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
NAMED = CHAT | {"tool_choice": {"type": "function", "function": {"name": "read"}}}
ANTHROPIC = {
    "model": "tiny",
    "max_tokens": 100,
    "messages": MESSAGES,
    "tools": [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any"},
}
RESPONSES = {"input": "What is in a.txt?", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}


@pytest.fixture(scope="module")
def replica() -> Iterator[ReplicaProcess]:
    with replica_process("--step-s", "0.001", "--enable-auto-tool-choice") as process:
        yield process


def ask(replica: ReplicaProcess, path: str, body: dict[str, Any], **fields: Any) -> Response:
    response = replica.send("POST", path, body | fields)
    assert response.status == 200, response.body
    return response


@pytest.mark.parametrize("body", [CHAT, NAMED])
def test_a_chat_that_requires_a_call_gets_one(replica: ReplicaProcess, body: dict[str, Any]) -> None:
    whole = ask(replica, "/v1/chat/completions", body).json["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    *chunks, last = ask(replica, "/v1/chat/completions", body, stream=True).events
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]

    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert (whole["message"]["content"], call["function"]["name"], last) == ("", "read", "[DONE]")
    assert list(json.loads(call["function"]["arguments"])) == ["path"]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
    assert [(delta["index"], delta["function"].get("name")) for delta in deltas[:2]] == [(0, "read"), (0, None)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "read"}])
def test_a_message_that_requires_a_call_gets_one(replica: ReplicaProcess, choice: dict[str, Any]) -> None:
    whole = ask(replica, "/v1/messages", ANTHROPIC, tool_choice=choice).json
    events = ask(replica, "/v1/messages", ANTHROPIC, tool_choice=choice, stream=True).events
    (block,) = whole["content"]
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]

    assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "read", "tool_use")
    assert json.loads("".join(parts)) == block["input"]
    assert events[1]["content_block"] == {**block, "id": events[1]["content_block"]["id"], "input": {}}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_response_that_requires_a_call_gets_one_and_continues_after_it(replica: ReplicaProcess) -> None:
    whole = ask(replica, "/v1/responses", RESPONSES).json
    events = ask(replica, "/v1/responses", RESPONSES, stream=True).events
    (call,) = whole["output"]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Hello."}
    continued = ask(replica, "/v1/responses", {"input": [result], "previous_response_id": whole["id"]}).json

    assert (call["type"], call["name"], call["status"]) == ("function_call", "read", "completed")
    assert "".join(deltas) == call["arguments"] == events[-3]["arguments"] == events[-2]["item"]["arguments"]
    assert list(json.loads(call["arguments"])) == ["path"]
    assert continued["output"][0]["type"] == "message"
    assert continued["usage"]["input_tokens"] > 20


def test_without_a_required_call_the_output_is_text(replica: ReplicaProcess) -> None:
    for choice in ("auto", "none"):
        message = ask(replica, "/v1/chat/completions", CHAT, tool_choice=choice, max_tokens=4).json["choices"][0]
        assert (message["finish_reason"], "tool_calls" in message["message"]) == ("length", False)


@pytest.mark.parametrize(
    "fields",
    [{"tools": None}, {"tools": []}, {"tool_choice": {"type": "function", "function": {"name": "write"}}}],
)
def test_a_call_of_an_unknown_tool_is_a_bad_request(replica: ReplicaProcess, fields: dict[str, Any]) -> None:
    response = replica.send("POST", "/v1/chat/completions", CHAT | fields)
    assert (response.status, response.json["error"]["param"]) == (400, "tool_choice")
