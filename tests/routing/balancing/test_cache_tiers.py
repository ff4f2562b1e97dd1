"""The estimated capacity follows what engines with lower cache tiers still have."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from routing.balancing.residency import Residency
from routing.types import TargetId

A = TargetId("a")
BLOCK = 64  # tokens
PROMPT = 20  # blocks
GPU_BLOCKS = 200


class Engine:
    """An LRU cache of whole prompts."""

    def __init__(self, blocks: int) -> None:
        self.prompts = blocks // PROMPT
        self.cached: OrderedDict[int, None] = OrderedDict()

    def serve(self, number: int) -> int:
        """Cached tokens of a prompt, which is cached from now on."""
        is_cached = number in self.cached
        self.cached[number] = None
        self.cached.move_to_end(number)
        if len(self.cached) > self.prompts:
            self.cached.popitem(last=False)
        return PROMPT * BLOCK if is_cached else 0


class Rig:
    """A residency, a replica and its engine."""

    def __init__(self, blocks: int) -> None:
        self.residency = Residency(block_tokens=BLOCK)
        self.replica = self.residency.add_replica(A, GPU_BLOCKS * BLOCK)
        self.engine = Engine(blocks)
        self.rng = random.Random("tiers")
        self.now_s = 0.0

    def send(self, number: int) -> float:
        """Send a prompt; the absolute error of its predicted cached tokens."""
        self.now_s += 6.0  # so that predictions are checked, and prompts do not expire
        chain = [number * 1000 + at for at in range(PROMPT)]
        predicted = self.residency.match(chain).tokens(self.replica.bit, PROMPT * BLOCK)
        record = self.residency.insert(A, chain, self.now_s, PROMPT * BLOCK)
        cached = self.engine.serve(number)
        record.confirm(PROMPT * BLOCK, cached)
        return abs(predicted - cached)

    def run(self, requests: int, prompts: int) -> float:
        """Mean error of requests for random prompts."""
        return sum(self.send(self.rng.randrange(prompts)) for _ in range(requests)) / requests


@pytest.mark.parametrize("ratio", [4, 8])
def test_a_lower_tier_is_found(ratio):
    rig = Rig(ratio * GPU_BLOCKS)
    rig.run(400, ratio * GPU_BLOCKS // PROMPT)

    assert rig.replica.capacity_ratio >= ratio / 2
    assert rig.run(400, ratio * GPU_BLOCKS // PROMPT) < 0.1 * PROMPT * BLOCK


@pytest.mark.parametrize(
    ("kept", "used"), [(1.0, 4), (1.2, 2)], ids=["not in another tier", "a little longer than expected"]
)
def test_without_a_lower_tier_the_capacity_is_the_reported_one(kept, used):
    rig = Rig(int(kept * GPU_BLOCKS))
    rig.run(2000, used * GPU_BLOCKS // PROMPT)

    assert rig.replica.capacity_ratio == 1.0


def test_a_tier_that_is_lost_is_unlearnt():
    rig = Rig(8 * GPU_BLOCKS)
    rig.run(400, 8 * GPU_BLOCKS // PROMPT)
    assert rig.replica.capacity_ratio > 1.0

    rig.engine = Engine(GPU_BLOCKS)
    rig.run(400, 8 * GPU_BLOCKS // PROMPT)

    assert rig.run(400, 8 * GPU_BLOCKS // PROMPT) < 0.2 * PROMPT * BLOCK


def test_with_other_routers_the_capacity_does_not_grow():
    rig = Rig(8 * GPU_BLOCKS)
    rig.residency.unrecorded_hits.has_other_routers = True
    for _ in range(100):
        rig.residency.unrecorded_hits.learn(PROMPT * BLOCK, PROMPT * BLOCK, None)
    rig.run(400, 8 * GPU_BLOCKS // PROMPT)

    assert rig.replica.capacity_ratio == 1.0


@pytest.mark.plain_python(reason="It sets a constant.")
def test_what_is_remembered_of_evicted_blocks_is_bounded(monkeypatch):
    monkeypatch.setattr("routing.balancing.residency.MAX_EVICTED", 30)
    rig = Rig(GPU_BLOCKS)
    remembered = []
    for number in range(300):
        rig.send(number)
        remembered.append(len(rig.replica.evicted) + len(rig.replica.older_evicted))

    assert max(remembered) <= 30
    assert min(remembered[100:]) >= 15
