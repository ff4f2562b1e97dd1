"""A trace's block ids as hashes."""

from __future__ import annotations

import random
from collections import Counter

from routing.replay import routed
from routing.replay.routed import KeyIndex
from routing.schema import LowestCostSettings
from routing.traffic.columns import Columns


def test_different_ids_have_different_hashes_whatever_their_neighbours() -> None:
    rng = random.Random(1)
    ids = [0, 1, 2**64 - 1, *(rng.getrandbits(rng.choice((8, 20, 64))) for _ in range(routed._PIECE_BYTES // 8))]

    assert hashes_of(ids) == [id_ ^ reversed_bytes(id_ % 2**32) << 32 for id_ in ids]
    assert hashes_of(ids[3:]) == hashes_of(ids)[3:]


def test_consecutive_ids_are_spread_over_64_bits() -> None:
    hashes = hashes_of(list(range(10_000)))

    eighths = Counter(hash_ >> 61 for hash_ in hashes)
    assert len(set(hashes)) == 10_000
    assert {part: round(count / 1250, 1) for part, count in eighths.items()} == dict.fromkeys(range(8), 1.0)


def hashes_of(ids: list[int]) -> list[int]:
    columns = Columns(block_tokens=16)
    columns.append(0.0, 16 * len(ids), 1, ids)
    return list(KeyIndex(LowestCostSettings(), columns).hashes)


def reversed_bytes(half: int) -> int:
    return int.from_bytes(half.to_bytes(4, "little"), "big")
