"""The blocks of one engine, from its events."""

from __future__ import annotations

import random
from collections.abc import Callable
from time import thread_time
from typing import Any

import msgspec
import pytest

from routing.kv_events.decoding import CLEARED, STORED, KvEvent, decode_batch
from routing.kv_events.engine_blocks import EngineBlocks
from tests.fakes.kv_publisher import removed_event as removed
from tests.routing.kv_events.test_decoding import messages


def stored(hashes: list[Any], parent: Any = None, **fields: Any) -> KvEvent:
    """A stored event of blocks of two tokens."""
    known = {"medium": "GPU", "kind": "full_attention", "block_tokens": 2}
    return KvEvent(STORED, hashes, parent, **(known | fields))


def below(*hashes: Any) -> KvEvent:
    """A stored event of the host's memory."""
    return KvEvent(STORED, list(hashes), medium="CPU")


def test_a_captured_engine_has_as_many_blocks_as_it_can_hold_and_none_after_a_clear():
    """The engine has 63 usable blocks. In between it republished three blocks that it had, on a client's request."""
    blocks, counts = EngineBlocks(100), []
    for payload, _ in messages():
        for event in decode_batch(payload).events:
            if event.type == CLEARED:
                blocks.clear(is_complete=True)
            elif event.type == STORED:
                blocks.store(event, 0.0)
            else:
                blocks.remove(event)
        counts.append(blocks.blocks)

    assert counts[:3] == [4, 5, 6]
    assert counts[-2] - 3 == 63
    assert (counts[-1], len(blocks), blocks.is_complete) == (2, 2, True)


def test_a_block_is_cached_until_its_last_copy_is_removed():
    blocks = EngineBlocks(100)
    for _ in range(3):
        blocks.store(stored([7]), 0.0)

    assert not blocks.remove(removed(7))
    assert not blocks.remove(removed(7))
    assert 7 in blocks
    assert len(blocks.remove(removed(7))) == 1
    assert 7 not in blocks
    assert not blocks.remove(removed(7))
    assert blocks.blocks == 0


def test_keys_depend_on_tokens_and_not_on_the_hashes_of_the_engine_nor_on_its_events():
    def tokens(*ids: int) -> dict[str, Any]:
        return {"tokens": msgspec.Raw(msgspec.msgpack.encode(ids))}

    one, other = EngineBlocks(100), EngineBlocks(100)
    first = one.store(stored([1, 2, 3], **tokens(1, 200, 300, 4, 70_000, 6)), 0.0)
    other.store(stored([b"x"], **tokens(1, 200)), 0.0)
    second = other.store(stored([b"y", b"z"], parent=b"x", **tokens(300, 4, 70_000, 6)), 0.0)

    assert first is not None
    assert second is not None
    assert first.keys[1:] == second.keys
    assert all(key in other for key in first.keys)
    other.remove(removed(b"z"))
    assert [key in other for key in first.keys] == [True, True, False]
    assert [key in one for key in (*first.keys, 1)] == [True, True, True, False]


def test_no_key_is_left_of_blocks_that_are_gone():
    """With copies, lower tiers, blocks after unknown ones, and more blocks than are known."""
    rng, blocks, keys = random.Random(7), EngineBlocks(20), set[Any]()
    for at in range(3000):
        hash_ = rng.randrange(40)
        encoded = msgspec.Raw(msgspec.msgpack.encode([hash_, hash_]))
        store = stored([hash_], hash_ - 1 if hash_ % 8 else None, tokens=encoded)
        action = rng.randrange(4)
        if action == 0 and (run := blocks.store(store, float(at))) is not None:
            keys.update(run.keys)
        elif action == 1:
            blocks.store_in_lower_tiers(below(hash_))
        elif action > 1:
            blocks.remove(removed(hash_, medium="GPU" if action == 2 else "CPU"))
    assert any(key in blocks for key in keys)
    for hash_ in range(40):
        for _ in range(200):
            blocks.remove(removed(hash_))
            blocks.remove(removed(hash_, medium="CPU"))
    assert not any(key in blocks for key in keys)


def test_blocks_after_an_unknown_one_count_but_have_no_place():
    blocks = EngineBlocks(100)
    run = blocks.store(stored([5], parent=4), 3.0)
    after = blocks.store(stored([6], parent=5), 4.0)

    assert run is not None
    assert after is not None
    assert not run.keys
    assert not after.keys
    assert blocks.blocks == 2
    assert [run.stored_s for run, _ in blocks.remove(removed(5, 6, 99))] == [3.0, 4.0]


def test_a_block_stays_cached_until_the_last_tier_has_evicted_it():
    blocks = EngineBlocks(100)
    blocks.store(stored([1, 2]), 1.0)
    for _ in range(2):  # the copies of two chunks
        blocks.store_in_lower_tiers(below(2))

    assert [(run.hashes, position) for run, position in blocks.remove(removed(2, 1))] == [([1, 2], 0)]
    assert (len(blocks), blocks.offloaded, blocks.blocks, 2 in blocks) == (0, 1, 0, True)
    assert not blocks.remove(removed(2, medium="CPU"))
    assert [(run.hashes, position) for run, position in blocks.remove(removed(2, medium="CPU"))] == [([1, 2], 1)]
    assert (blocks.offloaded, 2 in blocks, blocks.has_lower_tiers) == (0, False, False)
    assert not blocks.remove(removed(2, medium="CPU"))
    assert (blocks.max_seen_blocks, blocks.max_seen_offloaded) == (2, 1)


def test_a_fetched_block_is_in_device_memory_again():
    blocks = EngineBlocks(100)
    blocks.store(stored([1, 2]), 1.0)
    blocks.store_in_lower_tiers(below(1, 2))
    assert not blocks.remove(removed(2, 1))
    assert blocks.offloaded == 2

    run = blocks.store(stored([2], parent=1), 2.0)  # the first block is still in the lower tier
    assert run is not None
    assert (run.depth, blocks.offloaded) == (1, 1)
    assert not blocks.remove(removed(2, medium="CPU"))
    assert 2 in blocks


def test_blocks_of_lower_tiers_are_bounded_and_of_one_group():
    blocks = EngineBlocks(50)
    for at in range(200):
        blocks.store(stored([at]), float(at))
        blocks.store_in_lower_tiers(below(at))
        assert not blocks.remove(removed(at))
    assert (len(blocks), blocks.offloaded) == (0, 50)

    blocks.store_in_lower_tiers(KvEvent(STORED, [1000], medium="CPU", group=1))
    blocks.store(stored([1000]), 300.0)
    assert len(blocks.remove(removed(1000))) == 1


@pytest.mark.parametrize("fields", [{"medium": "CPU"}, {"kind": "sliding_window"}, {"group": 1}])
def test_only_device_memory_and_the_first_group_with_full_attention_count(fields):
    blocks = EngineBlocks(100)
    assert blocks.store(stored([1]), 0.0) is not None
    assert blocks.store(stored([2], **fields), 0.0) is None
    if "kind" not in fields:
        assert not blocks.remove(removed(1, **fields))
    assert blocks.blocks == 1


def test_the_beginning_of_a_block_does_not_count():
    blocks = EngineBlocks(100)
    assert blocks.store(stored([1]), 0.0) is not None
    assert blocks.store(stored([2], 1, block_tokens=1), 0.0) is None
    assert (blocks.blocks, blocks.block_tokens) == (1, 2)


def test_the_number_of_known_blocks_is_bounded():
    blocks = EngineBlocks(50)
    for at in range(500):
        blocks.store(stored([at], parent=at - 1 if at else None), float(at))

    assert len(blocks) == blocks.blocks == 50
    assert len(blocks.remove(removed(*range(450, 500)))) == 50
    assert len(blocks) == 0


def cpu_s_of(work: Callable[[], object]) -> float:
    began = thread_time()
    work()
    return thread_time() - began


def test_blocks_above_the_limit_cost_no_more_than_blocks_below_it():
    """The oldest of a dictionary was searched past all deleted ones: 56 times the time at this limit."""
    limit = 1 << 16
    blocks = EngineBlocks(limit)

    def store(first: int) -> None:
        for number in range(first, first + 30_000, 4):
            blocks.store(stored([number, number + 1, number + 2, number + 3]), 0.0)

    below_s = min(cpu_s_of(lambda first=first: store(first)) for first in (0, 30_000))  # type: ignore[misc]
    store(60_000)
    above_s = min(cpu_s_of(lambda first=first: store(first)) for first in (90_000, 120_000, 150_000))  # type: ignore[misc]
    assert above_s <= 20 * below_s
    assert limit * 0.99 < len(blocks) <= limit


def test_the_blocks_of_one_run_are_removed_in_any_order_in_linear_time():
    def remove_s(count: int) -> float:
        blocks = EngineBlocks(1 << 20)
        hashes = list(range(count))
        blocks.store(stored(hashes), 0.0)
        random.Random(7).shuffle(hashes)
        took_s = cpu_s_of(lambda: [blocks.remove(removed(hash_)) for hash_ in hashes])
        assert len(blocks) == 0
        return took_s

    small_s, large_s = (min(remove_s(count) for _ in range(3)) for count in (1000, 64_000))
    assert large_s <= 64 * 12 * small_s  # quadratic time: 64 * 64
