"""The responses API of the stand-in replica: streams, stored responses, later turns and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from routing.standin.errors import ApiError
from routing.standin.responses_api import MAX_STORED, ResponseStore, StoredResponse
from tests.routing.standin.replica_process import ReplicaProcess, Response, replica_process

PATH = "/v1/responses"


@pytest.fixture(scope="module")
def replica() -> Iterator[ReplicaProcess]:
    with replica_process() as process:
        yield process


def ask(replica: ReplicaProcess, text: Any = "Say something.", **fields: Any) -> Response:
    body = {"model": "tiny", "input": text, "max_output_tokens": 4, **fields}
    return replica.send("POST", PATH, {name: value for name, value in body.items() if value is not None})


def test_a_stored_response_can_be_read_and_not_cancelled(replica: ReplicaProcess) -> None:
    made = ask(replica).json
    path = f"{PATH}/{made['id']}"

    assert replica.send("GET", path).json == made
    cancelled = replica.send("POST", f"{path}/cancel")
    assert (cancelled.status, cancelled.json["error"]["param"]) == (400, "response_id")
    assert replica.send("DELETE", path).status == 405


def test_a_response_that_is_not_stored_is_not_found(replica: ReplicaProcess) -> None:
    response_id = ask(replica, store=False).json["id"]
    for method, path in (("GET", f"{PATH}/{response_id}"), ("POST", f"{PATH}/{response_id}/cancel")):
        found = replica.send(method, path)
        assert (found.status, found.json["error"]["type"]) == (404, "invalid_request_error")
    assert ask(replica, previous_response_id=response_id).status == 404


def test_a_later_turn_continues_the_cached_conversation(replica: ReplicaProcess) -> None:
    first = ask(replica, "A question of some length. " * 50, instructions="Be brief.", max_output_tokens=50).json
    later = ask(replica, "And then?", previous_response_id=first["id"]).json

    assert later["previous_response_id"] == first["id"]
    assert later["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    assert later["usage"]["input_tokens_details"]["cached_tokens"] > first["usage"]["input_tokens"]


def test_a_stream_begins_at_once_and_ends_with_the_stored_response(replica: ReplicaProcess) -> None:
    events = ask(replica, stream=True).events

    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:-4] == ["output_text.delta"] * 4
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    completed = events[-1]["response"]
    assert "".join(event.get("delta", "") for event in events) == completed["output"][0]["content"][0]["text"]
    assert completed["id"] == events[0]["response"]["id"]
    assert replica.send("GET", f"{PATH}/{completed['id']}").json == completed


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
def test_items_of_every_kind_are_part_of_the_prompt(replica: ReplicaProcess, items: list[Any]) -> None:
    assert ask(replica, items).json["usage"]["input_tokens"] > ask(replica, items[:-1]).json.get("usage", {}).get(
        "input_tokens", 0
    )


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"input": None}, 400), ({"input": [5]}, 400), ({"model": "other"}, 404), ({"background": True}, 400)],
)
def test_invalid_requests_are_rejected(replica: ReplicaProcess, fields: dict[str, Any], status: int) -> None:
    body = {"model": "tiny", "input": "Hi"} | fields
    response = replica.send("POST", PATH, {name: value for name, value in body.items() if value is not None})

    assert (response.status, response.json["error"]["code"]) == (status, status)


def test_the_latest_responses_are_kept() -> None:
    store = ResponseStore()
    for number in range(MAX_STORED + 1):
        store.add(StoredResponse({"id": f"resp_{number}"}, []))

    with pytest.raises(ApiError, match="not found"):
        store.find("resp_0")
    assert store.find(f"resp_{MAX_STORED}").document == {"id": f"resp_{MAX_STORED}"}
