from __future__ import annotations

from routing.balancing.candidates import Candidates
from routing.balancing.hash_ring import HashRing
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.residency import Residency
from routing.balancing.strategies.cache_aware import CacheAware
from routing.schema import CacheAwareSettings
from routing.types import Reason
from tests.routing.building import FixedKeys, names

A, B, C, D = names(4)
PROMPT = list(range(1000, 1010))
KEYS = FixedKeys(chain=PROMPT, prompt_tokens=100)


class Rig:
    """Four replicas, ten tokens a block."""

    def __init__(self, min_hit_ratio: float = 0.3, load_factor: float = 1.0) -> None:
        self.tracker = LoadTracker(lambda: 0.0)
        self.residency = Residency(block_tokens=10)
        weights = dict.fromkeys((A, B, C, D), 1.0)
        bits = {name: self.residency.add_replica(name).bit for name in weights}
        self.candidates = Candidates(weights, self.tracker, bits=bits)
        settings = CacheAwareSettings(min_hit_ratio=min_hit_ratio, load_factor=load_factor, min_bound=2)
        self.strategy = CacheAware(HashRing(weights), self.residency, settings)

    def hold(self, blocks: int, *replicas: str) -> None:
        for replica in replicas:
            self.residency.insert(replica, PROMPT[:blocks], 0.0)

    def run(self, replica: str, requests: int) -> None:
        for _ in range(requests):
            self.tracker.dispatch(replica, 10)

    def choose(self):
        return self.strategy.choose(KEYS, self.candidates)


def test_the_least_loaded_replica_with_the_longest_cached_prefix_is_chosen() -> None:
    rig = Rig()
    rig.hold(5, A)
    rig.hold(8, B, C)
    rig.run(B, 1)

    assert (rig.choose().target, rig.choose().reason, rig.choose().hit_tokens) == (C, Reason.HIT, 80)


def test_if_the_preferred_replica_is_full_the_next_shorter_prefix_follows_then_the_least_loaded() -> None:
    rig = Rig()
    rig.hold(8, A)
    rig.hold(5, B)
    rig.run(A, 20)
    assert (rig.choose().target, rig.choose().skipped, rig.choose().hit_tokens) == (B, (A,), 50)

    rig.run(B, 20)
    rig.run(C, 1)
    spilled = rig.choose()
    assert (spilled.target, spilled.reason, spilled.skipped, spilled.hit_tokens) == (D, Reason.SPILL, (A, B), 0)


def test_one_hot_replica_does_not_disable_affinity_for_others() -> None:
    rig = Rig()
    rig.run(A, 1000)
    rig.hold(8, B)

    assert (rig.choose().target, rig.choose().reason) == (B, Reason.HIT)


def test_a_short_cached_prefix_does_not_count() -> None:
    rig = Rig(min_hit_ratio=0.5)
    rig.hold(4, A)
    rig.run(A, 1)
    choice = rig.choose()

    assert choice.reason is Reason.COLD
    assert choice.target != A


def test_routers_send_an_uncached_prompt_to_the_same_idle_replica() -> None:
    preferred_replicas = {Rig().choose().target for _ in range(5)}

    assert len(preferred_replicas) == 1
