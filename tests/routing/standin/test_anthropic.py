"""Anthropic's messages API of the stand-in replica: usage, stop reasons, errors and faults as vLLM reports them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.routing.standin.replica_process import ReplicaProcess, Response, replica_process

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
QUESTION = {"role": "user", "content": "What is in a.txt?"}
TOOLS = [{"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}]
TURN = [
    QUESTION,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {"path": "a.txt"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "Hello."}]},
]


@pytest.fixture(scope="module")
def shared() -> Iterator[ReplicaProcess]:
    with replica_process("--enable-auto-tool-choice") as process:
        yield process


@pytest.fixture
def replica(shared: ReplicaProcess) -> Iterator[ReplicaProcess]:
    yield shared
    shared.restore()


def ask(replica: ReplicaProcess, path: str = MESSAGES, **fields: Any) -> Response:
    body = {"model": "tiny", "max_tokens": 4, "messages": [QUESTION], **fields}
    return replica.send("POST", path, {name: value for name, value in body.items() if value is not None})


def test_cached_and_created_tokens_are_not_input_tokens(replica: ReplicaProcess) -> None:
    first, again = (ask(replica, system="Be brief. " * 100).json["usage"] for _ in range(2))

    assert first["cache_read_input_tokens"] == again["cache_creation_input_tokens"] == 0
    assert first["cache_creation_input_tokens"] == again["cache_read_input_tokens"] > 100
    assert 0 < first["input_tokens"] == again["input_tokens"] < 16


def test_counted_tokens_are_those_of_the_prompt(replica: ReplicaProcess) -> None:
    fields = {"system": "Be brief. " * 100, "tools": TOOLS, "messages": TURN}
    usage = ask(replica, **fields).json["usage"]
    counted = ask(replica, COUNT, max_tokens=None, **fields).json

    whole = usage["input_tokens"] + usage["cache_creation_input_tokens"]
    assert counted == {"input_tokens": whole, "context_management": {"original_input_tokens": whole}}
    assert ask(replica, COUNT, max_tokens=None, messages=[QUESTION]).json["input_tokens"] < whole


def test_a_stop_sequence_is_the_stop_reason(replica: ReplicaProcess) -> None:
    text = ask(replica).json["content"][0]["text"]
    stopped = ask(replica, stop_sequences=[text[5:8]]).json

    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[5:8])
    assert ask(replica, max_tokens=2000).json["stop_reason"] == "end_turn"


def test_a_stream_has_the_text_and_usage_of_the_whole_message(replica: ReplicaProcess) -> None:
    whole = ask(replica, max_tokens=20).json
    events = ask(replica, max_tokens=20, stream=True).events

    assert (
        "".join(event["delta"].get("text", "") for event in events if "delta" in event) == whole["content"][0]["text"]
    )
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["usage"]["output_tokens"] == 20


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "other"}, 404, "NotFoundError"),
        ({"messages": []}, 400, "BadRequestError"),
        ({"max_tokens": 10**6}, 400, "BadRequestError"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "BadRequestError"),
    ],
)
def test_errors_of_vllm_have_anthropics_form(
    replica: ReplicaProcess, fields: dict[str, Any], status: int, kind: str
) -> None:
    response = ask(replica, **fields)

    assert (response.status, response.json["type"], response.json["error"]["type"]) == (status, "error", kind)


@pytest.mark.parametrize("fields", [{"max_tokens": None}, {"model": None}, {"messages": None}, {"messages": "a"}])
def test_errors_of_the_framework_keep_their_own_form(replica: ReplicaProcess, fields: dict[str, Any]) -> None:
    response = ask(replica, **fields)

    assert (response.status, response.json["error"]["code"], response.json["error"]["type"]) == (
        400,
        400,
        "Bad Request",
    )


def test_a_crashed_engine_sends_an_error_event(replica: ReplicaProcess) -> None:
    replica.fault(kind="crash_after_chunks", chunks=3, how="engine")
    events = ask(replica, stream=True).events

    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "error",
    ]
