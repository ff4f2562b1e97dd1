"""The latest decisions, read page by page."""

from __future__ import annotations

import time
from array import array

import msgspec
import pytest

from routing.proxy.decisions.record import Record
from routing.proxy.decisions.ring import MAX_SHOWN_BLOCKS, DecisionRing
from tests.side_by_side import alone


def record(name: str, blocks: array[int]) -> Record:
    return Record(name, 0.0, "chat", "", "", "everyday", 1, "prefix_hash", "a", "affinity", 100, 16, None, [blocks], [])


def many(count: int) -> array[int]:
    """Hashes that lie evenly over their range."""
    return array("Q", [(number * 0x9E37_79B9_7F4A_7C15) % (1 << 64) for number in range(count)])


def pages_of(ring: DecisionRing, limit: int = 1000) -> list[list[str]]:
    """The names on each page, read from where the one before ended."""
    pages, after = [], 0
    while (page := ring.after(after, limit))["decisions"]:
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
    whole = ring.after(0, 1)["decisions"][0]
    assert (len(whole["blocks"]), whole["block_count"], "positions" in whole) == (1000, 1000, False)

    shown = {ratio: ring.after(0, 1, ratio)["decisions"][0] for ratio in (0.0, 0.125, 0.5)}
    for ratio, one in shown.items():
        assert one["block_count"] == 1000
        assert [int(block, 16) for block in one["blocks"]] == [hashes[place] for place in one["positions"]]
        assert len(one["blocks"]) == pytest.approx(1000 * ratio, abs=2)
    assert set(shown[0.125]["blocks"]) < set(shown[0.5]["blocks"])  # a smaller part is a subset of a larger one


def test_who_wants_fewer_blocks_gets_more_records_a_page_and_still_no_endless_one() -> None:
    ring = DecisionRing()
    for number in range(600):
        ring.add(record(f"r{number}", many(256)))
    whole, part, none = (ring.after(0, 1000, ratio)["decisions"] for ratio in (1.0, 0.05, 0.0))
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
        msgspec.json.encode(ring.after(0, 1000, ratio))
        return time.thread_time() - begun_s

    rounds = [(taken_s(1.0), taken_s(0.0625)) for _ in range(15)]  # in turns, as the machine is now busy, now not
    whole_s, thin_s = (min(taken) for taken in zip(*rounds, strict=True))
    assert thin_s < 1.5 * whole_s
