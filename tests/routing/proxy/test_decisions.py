"""The latest decisions: what is kept of each, and how they are read."""

from __future__ import annotations

import json
import time
from array import array

import msgspec
import pytest

from routing.observability.decision_log import MAX_SHOWN_BLOCKS, DecisionRing
from routing.schema import LowestCostSettings
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import config, routed
from tests.routing.proxy.records import record, told
from tests.side_by_side import alone


def many(count: int) -> array[int]:
    """Hashes that lie evenly over their range."""
    return array("Q", [(number * 0x9E37_79B9_7F4A_7C15) % (1 << 64) for number in range(count)])


def pages_of(ring: DecisionRing, limit: int = 1000) -> list[list[str]]:
    """The names on each page, read from where the one before ended."""
    pages, after = [], 0
    while (page := told(ring, after, limit))["decisions"]:
        pages.append([one["request_id"] for one in page["decisions"]])
        after = page["next"]
    return pages


def test_a_page_shows_as_many_records_as_have_so_many_block_hashes_together() -> None:
    ring = DecisionRing()
    for number in range(5):
        ring.add(record(f"r{number}", many(MAX_SHOWN_BLOCKS // 2)))
    assert pages_of(ring) == [["r0", "r1"], ["r2", "r3"], ["r4"]]
    assert pages_of(ring, limit=1) == [["r0"], ["r1"], ["r2"], ["r3"], ["r4"]]


def test_a_record_that_is_longer_than_a_page_is_a_page_by_itself() -> None:
    ring = DecisionRing()
    for name, blocks in (("short", 1), ("long", MAX_SHOWN_BLOCKS + 1), ("last", 1)):
        ring.add(record(name, many(blocks)))
    assert pages_of(ring) == [["short"], ["long"], ["last"]]


def test_part_of_the_blocks_are_those_below_that_part_of_the_range_with_their_places() -> None:
    ring, hashes = DecisionRing(), many(1000)
    ring.add(record("r", hashes))
    whole = told(ring, 0, 1)["decisions"][0]
    assert (len(whole["blocks"]), whole["block_count"], "positions" in whole) == (1000, 1000, False)

    shown = {ratio: told(ring, 0, 1, ratio)["decisions"][0] for ratio in (0.0, 0.125, 0.5)}
    for ratio, one in shown.items():
        assert one["block_count"] == 1000
        assert [int(block, 16) for block in one["blocks"]] == [hashes[place] for place in one["positions"]]
        assert len(one["blocks"]) == pytest.approx(1000 * ratio, abs=2)
    assert set(shown[0.125]["blocks"]) < set(shown[0.5]["blocks"])  # a smaller part is a subset of a larger one


def test_who_wants_fewer_blocks_gets_more_records_a_page_and_still_no_endless_one() -> None:
    ring = DecisionRing()
    for number in range(600):
        ring.add(record(f"r{number}", many(256)))
    whole, part, none = (told(ring, 0, 1000, ratio)["decisions"] for ratio in (1.0, 0.05, 0.0))
    assert len(whole) == MAX_SHOWN_BLOCKS // 256
    assert len(whole) < len(part) < len(none) < 600


@alone
def test_a_page_keeps_requests_waiting_no_longer_than_3_ms_on_a_core_of_its_own() -> None:
    """Measured in units of what writing all the block hashes of a page takes, which is what the bound was set by."""
    ring = DecisionRing()
    for number in range(2000):
        ring.add(record(f"r{number}", many(128)))

    def taken_s(ratio: float) -> float:
        begun_s = time.thread_time()
        msgspec.json.encode(told(ring, 0, 1000, ratio))
        return time.thread_time() - begun_s

    rounds = [(taken_s(1.0), taken_s(0.0625)) for _ in range(15)]  # in turns, as the machine is now busy, now not
    whole_s, thin_s = (min(taken) for taken in zip(*rounds, strict=True))
    assert thin_s < 1.5 * whole_s


async def test_decisions_are_read_from_where_one_left_off(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness:
        for number in range(5):
            await harness.chat(headers=[b"X-Request-Id: r%d" % number])
        _, first = await harness.admin("GET", "/admin/decisions", params={"limit": "2"})
        _, rest = await harness.admin("GET", "/admin/decisions", params={"after": str(first["next"])})
        _, none = await harness.admin("GET", "/admin/decisions", params={"after": str(rest["next"])})
        assert (await harness.admin("GET", "/admin/decisions", params={"after": "x"}))[0] == 422
    assert [one["request_id"] for one in first["decisions"]] == ["r0", "r1"]
    assert [one["seq"] for one in rest["decisions"]] == [3, 4, 5]
    assert (none["decisions"], none["next"], none["dropped"]) == ([], 5, 0)
    assert first["boot"] == harness.router.boot
    assert set(first["decisions"][0]) == {
        "seq", "at", "request_id", "pool", "group", "matched_by", "policy", "revision", "arm", "strategy", "replica",
        "rank",
        "reason",
        "prompt_tokens_estimate", "prefix", "blocks", "block_count", "block_tokens", "hash_tokens",
        "candidates", "hit_tokens", "retries", "status", "streamed", "ttft_s", "latency_s",
        "prompt_tokens", "cached_tokens", "opening",
    }  # fmt: skip
    load = {"replica", "running", "waiting_tokens"}
    assert set(first["decisions"][0]["candidates"][0]) == load | {"hit_tokens", "cost"}  # its opening is described
    assert set(first["decisions"][1]["candidates"][0]) == load


async def test_a_decision_tells_the_hit_that_was_predicted_beside_the_one_that_was_delivered(
    replica: FakeReplica,
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "The same again. " * 100}]}).encode()
    async with routed(config([replica], settings=LowestCostSettings())) as harness:
        for _ in range(2):
            await harness.chat(body)
        _, listed = await harness.admin("GET", "/admin/decisions")
    first, again = listed["decisions"]

    assert (first["reason"], first["hit_tokens"]) == ("cold", 0)
    assert again["reason"] == "hit"
    assert 300 < again["hit_tokens"] <= again["prompt_tokens_estimate"]


async def test_no_text_of_a_prompt_is_remembered(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness:
        await harness.chat(json.dumps({"messages": [{"role": "user", "content": "canary " * 500}]}).encode())
        for path in ("/admin/decisions", "/metrics", "/admin/config", "/admin/replicas"):
            assert "canary" not in json.dumps(await harness.admin("GET", path))


def test_the_ring_is_bounded_in_number_and_in_bytes() -> None:
    ring = DecisionRing(max_records=100, max_bytes=50_000)
    for _ in range(500):
        ring.add(record("short", array("Q")))
    assert ring.bytes <= 50_000
    assert len(ring) == 50_000 // 950
    seen = told(ring, 0, 10)
    assert (seen["dropped"], seen["decisions"][0]["seq"], seen["next"]) == (
        500 - len(ring),
        500 - len(ring) + 1,
        500 - len(ring) + 10,
    )
    for _ in range(20):
        ring.add(record("long", array("Q", range(2048))))
    assert ring.bytes <= 50_000
    assert len(ring) == 2
