"""Payloads of KV event messages: four encodings of the same events, and bytes that are none."""

from __future__ import annotations

import base64
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from routing.kv_events.decoding import (
    MAX_EVENT_BLOCKS,
    MAX_PAYLOAD_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    MalformedEventsError,
    decode_batch,
)

FOLDER = Path(__file__).parents[2] / "data" / "vllm"
NEWEST = "vllm-kv-events-0.32.0"
FILES = [NEWEST, *(f"vllm-kv-events-array-format-{release}" for release in ("0.10.2", "0.16.0", "0.22.0"))]


def messages(name: str) -> list[tuple[bytes, Any]]:
    """Payloads as on the wire, with their contents as captured."""
    lines = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
    return [(base64.b64decode(line["frames_b64"][2]), line["decoded"]) for line in lines]


def joined(events: list[Any]) -> list[Any]:
    """The events with removals that follow each other in one."""
    result: list[Any] = []
    for event in events:
        if result and event["type"] == result[-1]["type"] == "BlockRemoved":
            result[-1]["block_hashes"] += event["block_hashes"]
        else:
            result.append(event)
    return result


@pytest.mark.parametrize("name", FILES)
def test_every_encoding_gives_the_events_as_captured(name: str) -> None:
    expected = [decoded for _, decoded in messages(NEWEST)]
    for (payload, _), (at_s, events, rank) in zip(messages(name), expected, strict=True):
        batch = decode_batch(payload)

        assert (batch.at_s, batch.rank) == (at_s, rank)
        for event, sent in zip(batch.events, joined(events), strict=True):
            match event:
                case BlockStored():
                    assert event.hashes == sent["block_hashes"]
                    assert event.parent == sent["parent_block_hash"]
                    assert ids(event) == sent["token_ids"]
                    assert (event.block_tokens, event.medium, event.group) == (32, "GPU", 0)
                    assert event.adapter == ""
                case BlockRemoved():
                    assert (event.hashes, event.medium, event.group) == (sent["block_hashes"], "GPU", 0)
                case AllBlocksCleared():
                    assert sent == {"type": "AllBlocksCleared"}


def ids(event: BlockStored) -> list[int]:
    """The token ids of an event."""
    encoded = b"".join(event.tokens.blocks(event.block_tokens, len(event.hashes)))
    head = b"\xdc" + len(event.tokens).to_bytes(2, "big")
    return msgspec.msgpack.decode(head + encoded, type=list[int])


def test_salt_and_kind_are_read_where_the_release_sends_them() -> None:
    newest = [decode_batch(payload).events[0] for payload, _ in messages(NEWEST)]
    oldest = [decode_batch(payload).events[0] for payload, _ in messages(FILES[1])]

    assert {event.kind for event in newest if isinstance(event, BlockStored)} == {"full_attention"}
    salted, plain, unreported = newest[5], newest[0], oldest[5]
    assert isinstance(salted, BlockStored)
    assert isinstance(plain, BlockStored)
    assert isinstance(unreported, BlockStored)
    encoded = msgspec.msgpack.encode(["tenant-a"])
    assert [salted.extra_bytes(position) for position in range(4)] == [encoded, b"", b"", b""]
    assert plain.extra_bytes(0) == unreported.extra_bytes(0) == b""


def stored(**fields: Any) -> dict[str, Any]:
    known = {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [5, 6, 7, 8], "block_size": 2}
    return {"type": "BlockStored", **known, **fields}


def decoded(*events: Any) -> list[Any]:
    return decode_batch(msgspec.msgpack.encode([0.0, list(events), 0])).events


def test_hashes_may_be_bytes_and_adapters_have_a_name_or_a_number() -> None:
    long, short = b"\x01" * 32, b"\x02" * 32
    (event,) = decoded(stored(block_hashes=[long, short], lora_id=7))
    (named,) = decoded(stored(lora_id=7, lora_name="sql"))
    (removed,) = decoded(["BlockRemoved", [long]])

    assert (event.hashes, event.adapter, named.adapter, removed.hashes) == ([long, short], "7", "sql", [long])


def test_fields_and_events_of_later_releases_are_tolerated() -> None:
    later = stored(lookahead_token_ids=[9], ownership={"a": 1})
    array_form = ["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, None, 0, "full_attention", None, "more"]
    events = decoded(
        later,
        {"type": "BlockMoved", "to": "disk"},
        ["BlockMoved", 3],
        array_form,
        {"type": "BlockRemoved"} | {"block_hashes": [1]},
    )

    assert [type(event).__name__ for event in events] == ["BlockStored", "BlockStored", "BlockRemoved"]


# Two blocks stored and one removed in the host's memory, as vLLM 0.32's offloading connector reports them.
OFFLOADED = (
    "k8s/8AAAAAAAAJOJpHR5cGWrQmxvY2tTdG9yZWSsYmxvY2tfaGFzaGVzkc8BAQEBAQEBAbFwYXJlbnRfYmxvY2tfaGFzaMCpdG9rZW5faWRzkKpi"
    "bG9ja19zaXplAKdsb3JhX2lkwKZtZWRpdW2jQ1BVqWxvcmFfbmFtZcCpZ3JvdXBfaWR4AImkdHlwZatCbG9ja1N0b3JlZKxibG9ja19oYXNoZXOR"
    "zwICAgICAgICsXBhcmVudF9ibG9ja19oYXNowKl0b2tlbl9pZHOQqmJsb2NrX3NpemUAp2xvcmFfaWTApm1lZGl1baNDUFWpbG9yYV9uYW1lwKln"
    "cm91cF9pZHgAhKR0eXBlrEJsb2NrUmVtb3ZlZKxibG9ja19oYXNoZXORzwEBAQEBAQEBpm1lZGl1baNDUFWpZ3JvdXBfaWR4AAA="
)


def test_offloaded_blocks_are_reported_by_their_hashes_alone() -> None:
    *stores, removal = decode_batch(base64.b64decode(OFFLOADED)).events

    assert [(event.hashes, event.medium, event.group) for event in (*stores, removal)] == [
        ([0x0101010101010101], "CPU", 0),
        ([0x0202020202020202], "CPU", 0),
        ([0x0101010101010101], "CPU", 0),
    ]
    assert [len(event.tokens) for event in stores] == [0, 0]
    (described,) = decoded(stored(medium="STORAGE", block_size=2))  # with token ids, which do not count
    assert (described.hashes, described.medium) == ([1, 2], "STORAGE")


@pytest.mark.parametrize(
    "fields", [{"token_ids": [5, 6, 7]}, {"token_ids": []}, {"token_ids": [1] * 9}, {"extra_keys": [None]}]
)
def test_token_ids_of_other_blocks_than_those_stored_do_not_count(fields: dict[str, Any]) -> None:
    """A group with a sliding window: blocks before the window are left out, their token ids are not."""
    window = stored(kv_cache_spec_kind="sliding_window", group_idx=1, **fields)
    empty, first, other = decoded(stored(block_hashes=[], extra_keys=[]), window, stored(block_hashes=[7, 8]))

    assert (first.hashes, first.kind, len(first.tokens), first.extra_keys) == ([1, 2], "sliding_window", 0, None)
    assert (empty.hashes, len(empty.tokens)) == ([], 0)
    assert (other.hashes, len(other.tokens)) == ([7, 8], 4)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(block_size=0, token_ids=[]), "block_size 0"),
        (stored(block_size=1 << 40), "block_size"),
        (stored(token_ids=5), "token_ids"),
        (stored(token_ids={}), "token_ids"),
        (stored(block_hashes=["a", "b"]), "block_hashes"),
        (stored(block_hashes=[1.5, 2]), "block_hashes"),
        ({"type": "BlockRemoved"}, "block_hashes"),
        (["BlockRemoved"], "BlockRemoved|length|array"),
        ({"no": "type"}, "type"),
        ([], "array|length|empty"),
        (7, "array|int"),
        (None, "null|array"),
    ],
)  # fmt: skip
def test_an_event_that_is_not_as_described_is_rejected_with_the_field(event: Any, reason: str) -> None:
    with pytest.raises(MalformedEventsError, match=reason):
        decoded(event)


@pytest.mark.parametrize("token", [-1, 1 << 32, 1.5, None, "x", []])
def test_blocks_before_a_token_that_is_no_number_have_ids(token: Any) -> None:
    (event,) = decoded(stored(token_ids=[5, 70_000, 200, token]))
    assert event.tokens.blocks(2, 2) == [b"\x05\xce\x00\x01\x11\x70"]


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
def test_bytes_that_are_no_batch_are_rejected(payload: bytes) -> None:
    with pytest.raises(MalformedEventsError):
        decode_batch(payload)


def test_a_payload_over_the_limit_is_rejected_before_it_is_decoded() -> None:
    whole = msgspec.msgpack.encode([0.0, [], 0, b"x" * MAX_PAYLOAD_BYTES])
    with pytest.raises(MalformedEventsError, match="bytes"):
        decode_batch(whole)
    assert decode_batch(msgspec.msgpack.encode([0.0, [], 0, b"x" * 1000])).events == []


@pytest.mark.parametrize("name", FILES)
def test_damaged_payloads_never_raise_anything_else(name: str) -> None:
    rng = random.Random(name)
    for payload, _ in messages(name):
        for _ in range(200):
            damaged = bytearray(payload)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            with suppress(MalformedEventsError):
                decode_batch(bytes(damaged[: rng.randint(0, len(damaged))] if rng.random() < 0.3 else damaged))


@pytest.mark.parametrize("event", [stored(), {"type": "BlockRemoved", "block_hashes": []}])
def test_an_event_of_too_many_blocks_is_rejected(event: dict[str, Any]) -> None:
    assert decoded(event | {"block_hashes": list(range(MAX_EVENT_BLOCKS))})
    with pytest.raises(MalformedEventsError, match="block_hashes"):
        decoded(event | {"block_hashes": list(range(MAX_EVENT_BLOCKS + 1))})
