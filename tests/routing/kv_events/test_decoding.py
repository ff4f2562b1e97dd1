"""Payloads of KV event messages, and bytes that are none."""

from __future__ import annotations

import base64
import json
import random
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from routing.kv_events.decoding import (
    MAX_EVENT_BLOCKS,
    MAX_PAYLOAD_BYTES,
    KvEvent,
    MalformedEventsError,
    decode_batch,
    joined,
)

FILE = Path(__file__).parents[2] / "data" / "vllm" / "vllm-kv-events-0.32.0.jsonl"


def messages() -> list[tuple[bytes, Any]]:
    """Payloads as on the wire, with their contents as captured."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    return [(base64.b64decode(line["frames_b64"][2]), line["decoded"]) for line in lines]


def test_events_are_as_captured_and_removals_in_a_row_are_one_event():
    removals = 0
    for payload, (at_s, sent, rank) in messages():
        batch = decode_batch(payload)
        events = batch.events

        assert (batch.at_s, batch.rank) == (at_s, rank)
        assert [
            (event.type, event.hashes, event.parent, event.block_tokens, event.medium, event.group, event.kind)
            for event in events
        ] == [
            (
                event["type"],
                *(event.get("block_hashes", []), event.get("parent_block_hash"), event.get("block_size", 0)),
                *(event.get("medium"), event.get("group_idx"), event.get("kv_cache_spec_kind")),
            )
            for event in sent
        ]
        hashes = [hash_ for event in events for hash_ in event.hashes]
        together = joined(events)
        assert [hash_ for event in together for hash_ in event.hashes] == hashes
        assert not any(pair[0].type == pair[1].type == "BlockRemoved" for pair in pairwise(together))
        removals += len(events) - len(together)
    assert removals > 10


def stored(**fields: Any) -> dict[str, Any]:
    known = {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [5, 6, 7, 8], "block_size": 2}
    return {"type": "BlockStored", **known, **fields}


def decoded(*events: Any) -> list[KvEvent]:
    return joined(decode_batch(msgspec.msgpack.encode([0.0, list(events), 0])).events)


def test_hashes_may_be_bytes():
    long, short = b"\x01" * 32, b"\x02" * 32
    first, removed = decoded(stored(block_hashes=[long, short]), {"type": "BlockRemoved", "block_hashes": [long]})

    assert (first.hashes, removed.hashes) == ([long, short], [long])


def test_fields_and_events_of_later_releases_are_tolerated():
    events = decoded(stored(lookahead_token_ids=[9], ownership={"a": 1}), {"type": "BlockMoved", "to": "disk"})

    assert [event.type for event in events] == ["BlockStored"]


def test_removals_of_another_group_or_tier_are_events_of_their_own():
    fields: list[dict[str, Any]] = [{}, {}, {"group_idx": 1}, {"medium": "CPU"}, {"medium": "CPU"}]
    events = [{"type": "BlockRemoved", "block_hashes": [at], **each} for at, each in enumerate(fields)]

    assert [event.hashes for event in decoded(*events)] == [[0, 1], [2], [3, 4]]


# Two blocks stored and one removed in the host's memory, as vLLM 0.32's offloading connector reports them.
OFFLOADED = (
    "k8s/8AAAAAAAAJOJpHR5cGWrQmxvY2tTdG9yZWSsYmxvY2tfaGFzaGVzkc8BAQEBAQEBAbFwYXJlbnRfYmxvY2tfaGFzaMCpdG9rZW5faWRzkKpi"
    "bG9ja19zaXplAKdsb3JhX2lkwKZtZWRpdW2jQ1BVqWxvcmFfbmFtZcCpZ3JvdXBfaWR4AImkdHlwZatCbG9ja1N0b3JlZKxibG9ja19oYXNoZXOR"
    "zwICAgICAgICsXBhcmVudF9ibG9ja19oYXNowKl0b2tlbl9pZHOQqmJsb2NrX3NpemUAp2xvcmFfaWTApm1lZGl1baNDUFWpbG9yYV9uYW1lwKln"
    "cm91cF9pZHgAhKR0eXBlrEJsb2NrUmVtb3ZlZKxibG9ja19oYXNoZXORzwEBAQEBAQEBpm1lZGl1baNDUFWpZ3JvdXBfaWR4AAA="
)


def test_offloaded_blocks_are_reported_by_their_hashes_alone():
    *stores, removal = decode_batch(base64.b64decode(OFFLOADED)).events

    assert [(event.hashes, event.medium, event.group) for event in (*stores, removal)] == [
        ([0x0101010101010101], "CPU", 0),
        ([0x0202020202020202], "CPU", 0),
        ([0x0101010101010101], "CPU", 0),
    ]
    (described,) = decoded(stored(medium="STORAGE", block_size=2))  # with token ids, which do not count
    assert (described.hashes, described.medium) == ([1, 2], "STORAGE")


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": []},
        {"token_ids": [1] * 3},
        {"token_ids": [1] * 9},
        {"token_ids": [1, 2, 3, "x"]},
        {"token_ids": [1, 2, 3, -1]},
        {"token_ids": 5},
        {"token_ids": {}},
        {"extra_keys": [None]},
    ],
)
def test_where_token_ids_are_not_those_of_the_blocks_hashes_are_keys(fields):
    event, other = decoded(stored(**fields), stored(lora_name="sql", extra_keys=[["salt"], None]))

    assert event.keys(None) == [1, 2]
    assert len({*other.keys(None), *other.keys("sql"), 1, 2}) == 6


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(block_size=0, token_ids=[]), "block_size: 0"),
        (stored(block_size=1 << 40), "block_size"),
        (stored(block_hashes=["a", "b"]), "block_hashes"),
        (stored(block_hashes=[1.5, 2]), "block_hashes"),
        ({"type": "BlockRemoved"}, "block_hashes"),
        (["BlockRemoved", [1]], "object"),
        ({"no": "type"}, "type"),
        (7, "int"),
        (None, "None|null"),
    ],
)  # fmt: skip
def test_an_event_that_is_not_as_described_is_rejected_with_the_field(event, reason):
    with pytest.raises(MalformedEventsError, match=reason):
        decoded(event)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        b"\x90",
        b"hello",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x93\x00\x91" + b"\x91" * 100_000,
    ],
)
def test_bytes_that_are_no_batch_are_rejected(payload):
    with pytest.raises(MalformedEventsError):
        decode_batch(payload)


def test_a_payload_over_the_limit_is_rejected_before_it_is_decoded():
    whole = msgspec.msgpack.encode([0.0, [], 0, b"x" * MAX_PAYLOAD_BYTES])
    with pytest.raises(MalformedEventsError, match="bytes"):
        decode_batch(whole)
    assert decode_batch(msgspec.msgpack.encode([0.0, [], 0, b"x" * 1000])).events == []


def test_damaged_payloads_never_raise_anything_else():
    rng = random.Random(7)
    for payload, _ in messages():
        for _ in range(200):
            damaged = bytearray(payload)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            with suppress(MalformedEventsError):
                end = rng.randint(0, len(damaged)) if rng.random() < 0.3 else len(damaged)
                for event in decode_batch(bytes(damaged[:end])).events:
                    assert len(event.keys(event.adapter)) == len(event.hashes)


@pytest.mark.parametrize("event", [stored(), {"type": "BlockRemoved", "block_hashes": []}])
def test_an_event_of_too_many_blocks_is_rejected(event):
    assert decoded(event | {"block_hashes": list(range(MAX_EVENT_BLOCKS))})
    with pytest.raises(MalformedEventsError, match="block_hashes"):
        decoded(event | {"block_hashes": list(range(MAX_EVENT_BLOCKS + 1))})
