"""The latest decisions, read page by page."""

from __future__ import annotations

from array import array

from routing.proxy.figures.decisions import MAX_SHOWN_BLOCKS, DecisionRing, Record


def record(name: str, blocks: int) -> Record:
    hashes = [array("Q", range(blocks))]
    return Record(name, 0.0, "chat", "", "", "everyday", 1, "prefix_hash", "a", "affinity", 100, 16, None, hashes, [])


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
        ring.add(record(f"r{number}", MAX_SHOWN_BLOCKS // 2))
    assert pages_of(ring) == [["r0", "r1"], ["r2", "r3"], ["r4"]]
    assert pages_of(ring, limit=1) == [["r0"], ["r1"], ["r2"], ["r3"], ["r4"]]


def test_a_record_that_is_longer_than_a_page_is_a_page_by_itself() -> None:
    ring = DecisionRing()
    for name, blocks in (("short", 1), ("long", MAX_SHOWN_BLOCKS + 1), ("last", 1)):
        ring.add(record(name, blocks))
    assert pages_of(ring) == [["short"], ["long"], ["last"]]
