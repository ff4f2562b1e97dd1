"""The blocks of one engine, from its events."""

from __future__ import annotations

import random
from collections.abc import Callable
from time import thread_time
from typing import Any

import pytest

from routing.kv_events.block_keys import BlockKeys
from routing.kv_events.decoding import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from routing.kv_events.engine_blocks import EngineBlocks
from tests.fakes.kv_publisher import encoded
from tests.routing.kv_events.test_decoding import FILES, messages


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, **fields: Any) -> BlockStored:
    """A stored event of blocks of two tokens."""
    known = {"medium": "GPU", "kind": "full_attention"}
    return BlockStored(hashes, parent, encoded(tokens), 2, **(known | fields))


def removed(*hashes: Any, medium: str = "GPU", group: int = 0) -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, group)


def below(*hashes: Any) -> BlockStored:
    """A stored event of the host's memory."""
    return BlockStored(list(hashes), None, encoded([]), 0, medium="CPU")


def engine(max_blocks: int = 100) -> EngineBlocks:
    """An engine of a pool whose engines have different hashes for the same block."""
    keys = BlockKeys()
    for hash_ in (1, 2):
        keys.compare(stored([hash_], [0, 0]))
    assert not keys.are_hashes
    return EngineBlocks(max_blocks, keys)


@pytest.mark.parametrize("name", FILES)
def test_a_captured_engine_has_as_many_blocks_as_it_can_hold_and_none_after_a_clear(name: str) -> None:
    """The engine has 63 usable blocks. In between it republished three blocks that it had, on a client's request."""
    blocks, counts = engine(), []
    for payload, _ in messages(name):
        for event in decode_batch(payload).events:
            match event:
                case BlockStored():
                    blocks.store(event, 0.0)
                case BlockRemoved():
                    blocks.remove(event)
                case AllBlocksCleared():
                    blocks.clear(is_complete=True)
        counts.append(blocks.blocks)

    assert counts[:3] == [4, 5, 6]
    assert counts[-2] - 3 == 63
    assert (counts[-1], len(blocks), blocks.is_complete) == (2, 2, True)


def test_a_block_is_cached_until_its_last_copy_is_removed() -> None:
    blocks = engine()
    for _ in range(3):
        run = blocks.store(stored([7], [1, 2]), 0.0)
    assert run is not None

    assert not blocks.remove(removed(7))
    assert not blocks.remove(removed(7))
    assert blocks.has_key(run.keys[0])
    assert len(blocks.remove(removed(7))) == 1
    assert not blocks.has_key(run.keys[0])
    assert not blocks.remove(removed(7))
    assert blocks.blocks == 0


def test_token_keys_depend_on_tokens_and_not_on_the_hashes_of_the_engine() -> None:
    one, other = engine(), engine()
    first = one.store(stored([1, 2, 3], [1, 2, 3, 4, 5, 6]), 0.0)
    other.store(stored([b"x"], [1, 2]), 0.0)
    second = other.store(stored([b"y", b"z"], [3, 4, 5, 6], parent=b"x"), 0.0)

    assert first is not None
    assert second is not None
    assert list(first.keys[1:]) == list(second.keys)
    assert (first.end, second.depth, second.end) == (3, 1, 3)


@pytest.mark.parametrize(
    ("other", "agree"),
    [
        ({}, True),
        ({"hashes": [9, 2]}, False),
        ({"hashes": [b"x", b"y"]}, False),
        ({"hashes": [9, 2], "adapter": "sql"}, True),
        ({"hashes": [9, 2], "extra_keys": [["salt"], None]}, True),
        ({"hashes": [9, 2], "parent": 3}, True),
        ({"hashes": [9, 2], "tokens": [1, 3, 3, 4]}, True),
        ({"hashes": [1, 9], "tokens": [1, 2, 4, 4]}, True),
    ],
)
def test_engines_that_agree_on_hashes_need_no_token_keys(other: dict[str, Any], agree: bool) -> None:
    keys = BlockKeys()
    first, second = EngineBlocks(100, keys), EngineBlocks(100, keys)
    same = {"hashes": [1, 2], "tokens": [1, 2, 3, 4]}
    for blocks, fields in ((first, same), (second, same | other)):
        event = stored(**fields)
        keys.compare(event)
        assert blocks.store(event, 0.0) is not None

    assert keys.are_hashes is agree
    assert first.has_key(1) is agree


@pytest.mark.parametrize("fields", [{"adapter": "sql"}, {"extra_keys": [["salt"], None]}])
def test_salts_and_adapters_give_other_token_keys(fields: dict[str, Any]) -> None:
    plain = engine().store(stored([1, 2], [1, 2, 3, 4], extra_keys=[None, None]), 0.0)
    other = engine().store(stored([1, 2], [1, 2, 3, 4], **({"extra_keys": [None, None]} | fields)), 0.0)
    without = engine().store(stored([1, 2], [1, 2, 3, 4]), 0.0)

    assert plain is not None
    assert other is not None
    assert without is not None
    assert not set(plain.keys) & set(other.keys)
    assert plain.keys == without.keys


def test_blocks_after_an_unknown_one_count_but_have_no_keys() -> None:
    blocks = engine()
    run = blocks.store(stored([5], [1, 2], parent=4), 3.0)
    after = blocks.store(stored([6], [1, 2], parent=5), 4.0)

    assert run is not None
    assert after is not None
    assert not run.keys
    assert not after.keys
    assert blocks.blocks == 2
    assert [run.stored_s for run, _ in blocks.remove(removed(5, 6, 99))] == [3.0, 4.0]


def test_a_block_stays_cached_until_the_last_tier_has_evicted_it() -> None:
    blocks = engine()
    stored_run = blocks.store(stored([1, 2], [1, 2, 3, 4]), 1.0)
    assert stored_run is not None
    key = stored_run.keys[1]
    for _ in range(2):  # the copies of two chunks
        blocks.store_in_lower_tiers(below(2))

    assert [(run.hashes, position) for run, position in blocks.remove(removed(2, 1))] == [([1, 2], 0)]
    assert (len(blocks), blocks.offloaded, blocks.blocks, blocks.has_key(key)) == (0, 1, 0, True)
    assert not blocks.remove(removed(2, medium="CPU"))
    assert [(run.hashes, position) for run, position in blocks.remove(removed(2, medium="CPU"))] == [([1, 2], 1)]
    assert (blocks.offloaded, blocks.has_key(key), blocks.has_lower_tiers) == (0, False, False)
    assert not blocks.remove(removed(2, medium="CPU"))
    assert (blocks.max_seen_blocks, blocks.max_seen_offloaded) == (2, 1)


def test_a_fetched_block_is_in_device_memory_again() -> None:
    blocks = engine()
    blocks.store(stored([1, 2], [1, 2, 3, 4]), 1.0)
    blocks.store_in_lower_tiers(below(1, 2))
    assert not blocks.remove(removed(2, 1))
    assert blocks.offloaded == 2

    run = blocks.store(stored([2], [3, 4], parent=1), 2.0)  # the first block is still in the lower tier
    assert run is not None
    assert (run.depth, blocks.offloaded) == (1, 1)
    assert not blocks.remove(removed(2, medium="CPU"))
    assert blocks.has_key(run.keys[0])


def test_blocks_of_lower_tiers_are_bounded_and_of_one_group() -> None:
    blocks = engine(max_blocks=50)
    for at in range(200):
        blocks.store(stored([at], [at, at]), float(at))
        blocks.store_in_lower_tiers(below(at))
        assert not blocks.remove(removed(at))
    assert (len(blocks), blocks.offloaded) == (0, 50)

    blocks.store_in_lower_tiers(BlockStored([1000], None, encoded([]), 0, medium="CPU", group=1))
    blocks.store(stored([1000], [1, 1]), 300.0)
    assert len(blocks.remove(removed(1000))) == 1


@pytest.mark.parametrize("fields", [{"medium": "CPU"}, {"kind": "sliding_window"}, {"group": 1}])
def test_only_device_memory_and_the_first_group_with_full_attention_count(fields: dict[str, Any]) -> None:
    blocks = engine()
    assert blocks.store(stored([1], [1, 2]), 0.0) is not None
    assert blocks.store(stored([2], [1, 2], **fields), 0.0) is None
    if "kind" not in fields:
        assert not blocks.remove(removed(1, **fields))
    assert blocks.blocks == 1


def test_the_beginning_of_a_block_does_not_count() -> None:
    blocks = engine()
    assert blocks.store(stored([1], [1, 2]), 0.0) is not None
    assert blocks.store(BlockStored([2], 1, encoded([3]), 1, medium="GPU"), 0.0) is None
    assert (blocks.blocks, blocks.block_tokens) == (1, 2)


def test_the_number_of_known_blocks_is_bounded() -> None:
    blocks = engine(max_blocks=50)
    for at in range(500):
        blocks.store(stored([at], [at, at], parent=at - 1 if at else None), float(at))

    assert len(blocks) == blocks.blocks == 50
    assert len(blocks.remove(removed(*range(450, 500)))) == 50
    assert len(blocks) == 0


def cpu_s_of(work: Callable[[], object]) -> float:
    began = thread_time()
    work()
    return thread_time() - began


@pytest.mark.parametrize("have_equal_hashes", [True, False])
def test_blocks_above_the_limit_cost_no_more_than_blocks_below_it(have_equal_hashes: bool) -> None:
    """The oldest of a dictionary was searched past all deleted ones: 56 times the time at this limit."""
    limit = 1 << 16
    blocks = EngineBlocks(limit) if have_equal_hashes else engine(limit)

    def store(first: int) -> None:
        for number in range(first, first + 30_000, 4):
            blocks.store(stored([number, number + 1, number + 2, number + 3], [number] * 8), 0.0)

    below_s = min(cpu_s_of(lambda first=first: store(first)) for first in (0, 30_000))  # type: ignore[misc]
    store(60_000)
    above_s = min(cpu_s_of(lambda first=first: store(first)) for first in (90_000, 120_000, 150_000))  # type: ignore[misc]
    assert above_s <= 20 * below_s
    assert limit * 0.99 < len(blocks) <= limit


def test_the_blocks_of_one_run_are_removed_in_any_order_in_linear_time() -> None:
    def remove_s(count: int) -> float:
        blocks = EngineBlocks(1 << 20)
        hashes = list(range(count))
        blocks.store(stored(hashes, [0] * (2 * count)), 0.0)
        random.Random(7).shuffle(hashes)
        took_s = cpu_s_of(lambda: [blocks.remove(removed(hash_)) for hash_ in hashes])
        assert len(blocks) == 0
        return took_s

    small_s, large_s = (min(remove_s(count) for _ in range(3)) for count in (1000, 64_000))
    assert large_s <= 64 * 12 * small_s  # quadratic time: 64 * 64
