"""A trace's block ids as hashes."""

from __future__ import annotations

import random

from routing.schema import LowestCostSettings
from routing.simulation.whatif import keys
from routing.simulation.whatif.keys import KeyBook
from routing.workload.columns import Columns


def test_ids_of_all_sizes_are_spread_over_64_bits_and_none_are_lost() -> None:
    rng, columns = random.Random(1), Columns(block_tokens=16)
    ids = [0, 1, 2**64 - 1, *(rng.getrandbits(rng.choice((8, 20, 64))) for _ in range(keys._PIECE))]
    columns.append(0.0, 16 * len(ids), 1, ids)

    assert list(KeyBook(LowestCostSettings(), columns).hashes) == [id_ * keys._SPREAD % 2**64 for id_ in ids]
    assert keys._SPREAD % 2  # odd: multiplying by it is one to one
