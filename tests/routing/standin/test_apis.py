"""APIs of the stand-in replica beside chats: messages, responses, calls of tools, pooling and speech, as vLLM's."""

from __future__ import annotations

import json
import math
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
    with replica_process("--step-s", "0.001", "--enable-auto-tool-choice") as process:
        yield process


@pytest.fixture
def replica(shared: ReplicaProcess) -> Iterator[ReplicaProcess]:
    yield shared
    shared.restore()


def ask_message(replica: ReplicaProcess, path: str = MESSAGES, **fields: Any) -> Response:
    body = {"model": "tiny", "max_tokens": 4, "messages": [QUESTION], **fields}
    return replica.send("POST", path, {name: value for name, value in body.items() if value is not None})


def test_counted_tokens_are_those_of_the_prompt(replica):
    fields = {"system": "Be brief. " * 100, "tools": TOOLS, "messages": TURN}
    usage = ask_message(replica, **fields).json["usage"]
    counted = ask_message(replica, COUNT, max_tokens=None, **fields).json

    whole = usage["input_tokens"] + usage["cache_creation_input_tokens"]
    assert counted == {"input_tokens": whole, "context_management": {"original_input_tokens": whole}}
    assert ask_message(replica, COUNT, max_tokens=None, messages=[QUESTION]).json["input_tokens"] < whole


def test_a_stop_sequence_is_the_stop_reason(replica):
    text = ask_message(replica).json["content"][0]["text"]
    stopped = ask_message(replica, stop_sequences=[text[5:8]]).json

    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[5:8])
    assert ask_message(replica, max_tokens=2000).json["stop_reason"] == "end_turn"


def test_a_stream_has_the_text_and_usage_of_the_whole_message(replica):
    whole = ask_message(replica, max_tokens=20).json
    events = ask_message(replica, max_tokens=20, stream=True).events

    assert (
        "".join(event["delta"].get("text", "") for event in events if "delta" in event) == whole["content"][0]["text"]
    )
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["usage"]["output_tokens"] == 20


def test_a_crashed_engine_sends_an_error_event(replica):
    replica.fault(kind="crash_after_chunks", chunks=3, how="engine")
    events = ask_message(replica, stream=True).events

    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "error",
    ]


# --- The responses API of the stand-in replica: streams, stored responses, later turns and refusals ---


RESPONSES_PATH = "/v1/responses"


def ask_response(replica: ReplicaProcess, text: Any = "Say something.", **fields: Any) -> Response:
    body = {"model": "tiny", "input": text, "max_output_tokens": 4, **fields}
    return replica.send("POST", RESPONSES_PATH, {name: value for name, value in body.items() if value is not None})


def test_a_response_that_is_not_stored_is_not_found(replica):
    response_id = ask_response(replica, store=False).json["id"]
    found = replica.send("GET", f"{RESPONSES_PATH}/{response_id}")
    assert (found.status, found.json["error"]["type"]) == (404, "invalid_request_error")
    assert ask_response(replica, previous_response_id=response_id).status == 404


def test_a_later_turn_continues_the_cached_conversation(replica):
    first = ask_response(
        replica, "A question of some length. " * 50, instructions="Be brief.", max_output_tokens=50
    ).json
    later = ask_response(replica, "And then?", previous_response_id=first["id"]).json

    assert later["previous_response_id"] == first["id"]
    assert later["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    assert later["usage"]["input_tokens_details"]["cached_tokens"] > first["usage"]["input_tokens"]


def test_a_stream_begins_at_once_and_ends_with_the_stored_response(replica):
    events = ask_response(replica, stream=True).events

    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:-4] == ["output_text.delta"] * 4
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    completed = events[-1]["response"]
    assert "".join(event.get("delta", "") for event in events) == completed["output"][0]["content"][0]["text"]
    assert completed["id"] == events[0]["response"]["id"]
    assert replica.send("GET", f"{RESPONSES_PATH}/{completed['id']}").json == completed


@pytest.mark.parametrize(
    "items",
    [
        [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "Hello."},
        ],
    ],
)
def test_items_of_every_kind_are_part_of_the_prompt(replica, items):
    assert ask_response(replica, items).json["usage"]["input_tokens"] > ask_response(replica, items[:-1]).json.get(
        "usage", {}
    ).get("input_tokens", 0)


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"input": None}, 400), ({"input": [5]}, 400), ({"model": "other"}, 404), ({"background": True}, 400)],
)
def test_invalid_responses_are_rejected(replica, fields, status):
    body = {"model": "tiny", "input": "Hi"} | fields
    response = replica.send("POST", RESPONSES_PATH, {name: value for name, value in body.items() if value is not None})

    assert (response.status, response.json["error"]["code"]) == (status, status)


# --- Calls of tools in the three chat APIs of the stand-in replica, whole and streamed ---


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
CHAT_MESSAGES = [{"role": "user", "content": "What is in a.txt?"}]
CHAT = {"messages": CHAT_MESSAGES, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
NAMED = CHAT | {"tool_choice": {"type": "function", "function": {"name": "read"}}}
ANTHROPIC = {
    "model": "tiny",
    "max_tokens": 100,
    "messages": CHAT_MESSAGES,
    "tools": [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any"},
}
RESPONSES = {"input": "What is in a.txt?", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}


def ask_ok(replica: ReplicaProcess, path: str, body: dict[str, Any], **fields: Any) -> Response:
    response = replica.send("POST", path, body | fields)
    assert response.status == 200, response.body
    return response


@pytest.mark.parametrize("body", [CHAT, NAMED])
def test_a_chat_that_requires_a_call_gets_one(replica, body):
    whole = ask_ok(replica, "/v1/chat/completions", body).json["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    *chunks, last = ask_ok(replica, "/v1/chat/completions", body, stream=True).events
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]

    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert (whole["message"]["content"], call["function"]["name"], last) == ("", "read", "[DONE]")
    assert list(json.loads(call["function"]["arguments"])) == ["path"]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
    assert [(delta["index"], delta["function"].get("name")) for delta in deltas[:2]] == [(0, "read"), (0, None)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "read"}])
def test_a_message_that_requires_a_call_gets_one(replica, choice):
    whole = ask_ok(replica, "/v1/messages", ANTHROPIC, tool_choice=choice).json
    events = ask_ok(replica, "/v1/messages", ANTHROPIC, tool_choice=choice, stream=True).events
    (block,) = whole["content"]
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]

    assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "read", "tool_use")
    assert json.loads("".join(parts)) == block["input"]
    assert events[1]["content_block"] == {**block, "id": events[1]["content_block"]["id"], "input": {}}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_response_that_requires_a_call_gets_one_and_continues_after_it(replica):
    whole = ask_ok(replica, "/v1/responses", RESPONSES).json
    events = ask_ok(replica, "/v1/responses", RESPONSES, stream=True).events
    (call,) = whole["output"]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Hello."}
    continued = ask_ok(replica, "/v1/responses", {"input": [result], "previous_response_id": whole["id"]}).json

    assert (call["type"], call["name"], call["status"]) == ("function_call", "read", "completed")
    assert "".join(deltas) == call["arguments"] == events[-3]["arguments"] == events[-2]["item"]["arguments"]
    assert list(json.loads(call["arguments"])) == ["path"]
    assert continued["output"][0]["type"] == "message"
    assert continued["usage"]["input_tokens"] > 20


def test_without_a_required_call_the_output_is_text(replica):
    for choice in ("auto", "none"):
        message = ask_ok(replica, "/v1/chat/completions", CHAT, tool_choice=choice, max_tokens=4).json["choices"][0]
        assert (message["finish_reason"], "tool_calls" in message["message"]) == ("length", False)


@pytest.mark.parametrize(
    "fields",
    [{"tools": None}, {"tools": []}, {"tool_choice": {"type": "function", "function": {"name": "write"}}}],
)
def test_a_call_of_an_unknown_tool_is_a_bad_request(replica, fields):
    response = replica.send("POST", "/v1/chat/completions", CHAT | fields)
    assert (response.status, response.json["error"]["param"]) == (400, "tool_choice")


# --- The stand-in replica with a pooling or a speech model ---


RERANK, SCORE = ("/rerank", "/v1/rerank", "/v2/rerank"), ("/score", "/v1/score")


@pytest.fixture(scope="module")
def pooling() -> Iterator[ReplicaProcess]:
    with replica_process("--task", "pooling") as process:
        yield process


@pytest.fixture(scope="module")
def speech() -> Iterator[ReplicaProcess]:
    with replica_process("--task", "transcription") as process:
        yield process


@pytest.mark.parametrize("path", RERANK)
def test_documents_are_ranked_by_their_score(pooling, path):
    body = {"model": "tiny", "query": "What?", "documents": ["A.", "B.", "C."], "top_n": 2}
    ranked = pooling.send("POST", path, body).json

    scores = [row["relevance_score"] for row in ranked["results"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    assert all(row["document"]["text"] == body["documents"][row["index"]] for row in ranked["results"])
    assert ranked["usage"]["prompt_tokens"] == ranked["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("path", SCORE)
@pytest.mark.parametrize("names", [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")])
def test_pairs_are_scored(pooling, path, names):
    one_to_many = pooling.send("POST", path, dict(zip(names, ("A.", ["B.", "C."]), strict=True))).json
    many = pooling.send("POST", path, dict(zip(names, (["A.", "A."], ["B.", "C."]), strict=True))).json

    assert [row["score"] for row in one_to_many["data"]] == [row["score"] for row in many["data"]]
    assert [row["object"] for row in many["data"]] == ["score"] * 2


def test_embeddings_pooling_and_classes(pooling):
    embedded = pooling.send("POST", "/v1/embeddings", {"input": ["A.", "B."]}).json
    pooled = pooling.send("POST", "/pooling", {"messages": [{"role": "user", "content": "A."}]}).json
    classes = pooling.send("POST", "/classify", {"input": "A."}).json["data"]

    assert [math.hypot(*row["embedding"]) for row in embedded["data"]] == pytest.approx([1, 1])
    assert len(pooled["data"][0]["data"]) == len(embedded["data"][0]["embedding"])
    assert sum(classes[0]["probs"]) == pytest.approx(1)
    assert classes[0]["label"] in ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/rerank", {"query": "A."}, 400),
        ("/rerank", {"query": "A.", "documents": [5]}, 400),
        ("/score", {"text_1": "A."}, 400),
        ("/score", {"text_1": ["A.", "B."], "text_2": ["A.", "B.", "C."]}, 400),
        ("/pooling", {"input": None}, 400),
        ("/classify", {"input": "A.", "model": "other"}, 404),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A."}]}, 404),
    ],
)
def test_invalid_requests_are_rejected(pooling, path, body, status):
    assert pooling.send("POST", path, body).status == status


def form(speech: ReplicaProcess, path: str, model: bytes = b"tiny", name: bytes = b"file") -> Response:
    start = b"--xyz\r\nContent-Disposition: form-data; name="
    file = start + b'"' + name + b'"; filename="a.wav"\r\n\r\n' + b"RIFF" * 20_000 + b"\r\n"
    body = file + start + b'"model"\r\n\r\n' + model + b"\r\n--xyz--\r\n"
    return speech.send("POST", path, body, {"Content-Type": "multipart/form-data; boundary=xyz"})


def test_recordings_are_transcribed_and_translated(speech):
    transcribed = form(speech, "/v1/audio/transcriptions").json
    translated = form(speech, "/v1/audio/translations").json

    assert transcribed == {"text": translated["text"], "usage": {"type": "duration", "seconds": 3}}
    assert form(speech, "/v1/audio/translations", model=b"other").status == 404
    assert form(speech, "/v1/audio/translations", name=b"other").status == 400
