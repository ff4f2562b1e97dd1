"""What an engine says of its KV events becomes a proposal, at the replica's own host only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.models import Replica
from controlplane.services.fleet.kv_event_sources import (
    proposed_events,
    read_event_sources,
    record_event_sources,
)
from controlplane.services.fleet.replicas import move_replica, update_replica
from controlplane.services.snapshots import newest_snapshot

VLLM = Path(__file__).parents[2] / "data" / "vllm"
URL = "http://gpu-1:8000"
EVENTS = {"endpoint": "tcp://gpu-1:5557", "replay_endpoint": None, "topic": ""}


def source(endpoint: str | None = "tcp://*:5557", **fields: Any) -> dict[str, Any]:
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint} | fields


def read(*sources: dict[str, Any], url: str = URL, ranks: int | None = None) -> dict[str, Any] | None:
    document = {str(rank): source for rank, source in enumerate(sources)}
    return read_event_sources(json.dumps(document).encode(), url, len(sources) if ranks is None else ranks)


def test_the_response_of_a_real_engine_is_understood() -> None:
    captures = map(json.loads, (VLLM / "vllm-http-0.32.0-ok.jsonl").read_text().splitlines())
    (body,) = [row["response"]["body"].encode() for row in captures if row["case"] == "GET /kv_event_sources"]

    assert read_event_sources(body, "http://127.0.0.1:18101", 1) == {
        "kv_events": {
            "endpoint": "tcp://127.0.0.1:25557",
            "replay_endpoint": "tcp://127.0.0.1:26557",
            "topic": "kv@127.0.0.1:18101@tiny",
        },
        "problem": "",
    }
    elsewhere = read_event_sources(body, URL, 1)
    assert elsewhere is not None
    assert elsewhere["kv_events"]["endpoint"] == "tcp://gpu-1:25557"
    assert elsewhere["kv_events"]["replay_endpoint"] is None
    assert elsewhere["problem"].startswith("The replay endpoint tcp://127.0.0.1:26557 is at another host than the")


@pytest.mark.parametrize(
    ("endpoint", "url", "expected"),
    [
        ("tcp://*:5557", URL, "tcp://gpu-1:5557"),
        ("tcp://0.0.0.0:5557", "https://gpu-1/engine", "tcp://gpu-1:5557"),
        ("tcp://[::]:5557", "http://[fd00::7]:8000", "tcp://[fd00::7]:5557"),
        ("tcp://GPU-1:5557", URL, "tcp://gpu-1:5557"),
        ("tcp://127.0.0.1:5557", "http://localhost:8000", "tcp://localhost:5557"),
    ],
)
def test_an_endpoint_is_at_the_replicas_own_host(endpoint: str, url: str, expected: str) -> None:
    reported = read(source(endpoint), url=url)
    assert reported == {"kv_events": EVENTS | {"endpoint": expected}, "problem": ""}


@pytest.mark.parametrize(
    ("endpoint", "problem"),
    [
        ("tcp://evil.example:5557", "is at another host than the replica, gpu-1."),
        ("tcp://127.0.0.1:5557", "is at another host than the replica, gpu-1."),
        ("ipc:///tmp/events", "is no TCP address that routers can connect to."),
        ("tcp://*:0", "is no TCP address that routers can connect to."),
        ("tcp://*:99999", "is no TCP address that routers can connect to."),
        ("tcp://\n" + "x" * 200 + ":1", "is at another host than the replica, gpu-1."),
    ],
)
def test_another_endpoint_is_ignored_with_a_reason(endpoint: str, problem: str) -> None:
    reported = read(source(endpoint))
    assert reported is not None
    assert reported["kv_events"] is None
    assert reported["problem"].endswith(problem)
    assert reported["problem"].isprintable()
    assert len(reported["problem"]) < 250


@pytest.mark.parametrize(
    "document",
    [
        b"{}", b"[]", b"not JSON", b'{"0": 5}', b'{"x": {}}', b"[" * 5000, b'{"0": {"endpoint": 5}}',
        json.dumps({"0": source() | {"enable_kv_cache_events": False}}).encode(),
        json.dumps({"0": source(publisher="null")}).encode(), json.dumps({"0": source(None)}).encode(),
    ],
)  # fmt: skip
def test_an_engine_without_events_proposes_nothing(document: bytes) -> None:
    assert read_event_sources(document, URL, 1) is None


def test_ranks_have_ports_that_follow_one_another() -> None:
    ranks = [source(f"tcp://*:{5557 + rank}", replay_endpoint=f"tcp://*:{5657 + rank}") for rank in range(3)]
    reported = read(*ranks)
    assert reported == {"kv_events": EVENTS | {"replay_endpoint": "tcp://gpu-1:5657"}, "problem": ""}

    mismatch = read(*ranks, ranks=1)
    assert mismatch is not None
    assert mismatch["problem"] == (
        "It publishes events of 3 data-parallel ranks, and this replica is set to 1 data-parallel rank."
    )
    apart = read(source("tcp://*:5557"), source("tcp://*:6000"))
    assert apart == {
        "kv_events": None,
        "problem": "The ports of the endpoint of the data-parallel ranks do not follow one another.",
    }
    alone = read_event_sources(json.dumps({"3": source("tcp://*:5560")}).encode(), URL, 1)
    assert alone == {"kv_events": EVENTS | {"endpoint": "tcp://gpu-1:5560"}, "problem": ""}


def test_topics_that_differ_or_are_too_long_are_not_used() -> None:
    same = read(source(topic="kv@a"))
    assert same is not None
    assert same["kv_events"]["topic"] == "kv@a"
    for sources in ([source(topic="a"), source("tcp://*:5558", topic="b")], [source(topic="t" * 300)]):
        other = read(*sources)
        assert other is not None
        assert other["kv_events"]["topic"] == ""


@pytest.mark.django_db
def test_a_report_is_stored_and_proposed_without_a_new_configuration(replica: Replica) -> None:
    before = newest_snapshot()
    record_event_sources(replica.pk, {"kv_events": EVENTS, "problem": ""})
    replica.refresh_from_db()
    assert proposed_events(replica) == EVENTS
    assert newest_snapshot() == before

    replica = update_replica(replica, kv_events=EVENTS)
    assert proposed_events(replica) is None
    for events, is_proposed in (
        ({"endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": "tcp://10.0.0.1:5657"}, False),  # as the user knows it
        ({"endpoint": "tcp://gpu-1:6000"}, True),
        ({"endpoint": "tcp://gpu-1:5557", "topic": "kv@other"}, True),
    ):
        assert (proposed_events(update_replica(replica, kv_events=events)) is not None) is is_proposed
    with_replay = EVENTS | {"replay_endpoint": "tcp://gpu-1:5657"}
    record_event_sources(replica.pk, {"kv_events": with_replay, "problem": ""})
    assert proposed_events(update_replica(replica, kv_events=EVENTS)) == with_replay

    record_event_sources(replica.pk, None)
    replica.refresh_from_db()
    assert (replica.reported_kv_events, replica.kv_events) == (None, EVENTS)


@pytest.mark.django_db
def test_endpoints_follow_a_replica_that_moves_and_others_stay(replica: Replica) -> None:
    events = {"endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": "tcp://10.9.9.9:5657", "topic": "kv@"}
    update_replica(replica, kv_events=events)

    moved = move_replica(replica, "http://[fd00::7]:8000")
    assert moved.kv_events == events | {"endpoint": "tcp://[fd00::7]:5557"}
    assert move_replica(update_replica(moved, kv_events=None), "http://10.0.0.3:8000").kv_events is None
