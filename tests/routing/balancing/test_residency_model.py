"""The residency compared with a simple model: every cached block of each replica, with its last use."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from routing.balancing.block_index import ReplicaBlocks, Tail
from routing.balancing.residency import Residency, SentPrompt
from routing.balancing.residency_snapshot import decode_uses, encode_uses, restore_uses
from routing.types import ReplicaId
from tests.routing.building import names

REPLICAS = names(3)
MOST_ENTRIES, TTL_S = 20, 8.0  # of a crowded residency
NOW_AT = 1_700_000_000.0
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # of two letters, so that they diverge anywhere
salts = st.sampled_from([0, 1])  # of tenants or adapters, which share no blocks


class Sent(NamedTuple):
    """A dispatched prompt, for the residency and the model."""

    record: SentPrompt
    held: dict[int, float]  # the model of that replica
    new_blocks: frozenset[int]
    at_s: float


def chain(prompt: list[int], salt: int) -> list[int]:
    return [hash((salt, *prompt[: end + 1])) % 2**64 for end in range(len(prompt))]


class ResidencyMachine(RuleBasedStateMachine):
    """With enough capacity, each replica has the prompts that it was sent, except those rolled back or evicted."""

    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(block_tokens=1, run_tokens=4)
        self.held: dict[ReplicaId, dict[int, float]] = {}
        self.chains: set[tuple[int, ...]] = set()
        self.now_s = 0.0
        for replica in REPLICAS:
            self.is_added(replica)

    @rule(replica=st.sampled_from(REPLICAS))
    def is_added(self, replica: ReplicaId) -> None:
        self.residency.add_replica(replica)
        self.held.setdefault(replica, {})

    @rule(replica=st.sampled_from(REPLICAS))
    def is_removed(self, replica: ReplicaId) -> None:
        self.held.pop(replica, None)
        self.residency.forget_all_but(self.held)

    @rule(target=sent, replica=st.sampled_from(REPLICAS), prompt=prompts, salt=salts, is_matched=st.booleans())
    def is_sent(self, replica: ReplicaId, prompt: list[int], salt: int, *, is_matched: bool) -> Sent:
        self.now_s += 1
        hashes, held = chain(prompt, salt), self.held.setdefault(replica, {})
        self.chains.add(tuple(hashes))
        if is_matched:
            self.residency.match(hashes)
        record = self.residency.insert(replica, hashes, self.now_s, len(hashes))
        new_blocks = frozenset(hashes) - held.keys()
        held.update(dict.fromkeys(hashes, self.now_s))
        return Sent(record, held, new_blocks, self.now_s)

    @rule(one=consumes(sent))
    def is_rolled_back(self, one: Sent) -> None:
        one.record.roll_back()
        for block in one.new_blocks:
            if one.held.get(block) == one.at_s:
                del one.held[block]

    @rule(replica=st.sampled_from(REPLICAS), ago_s=st.integers(0, 6))
    def is_evicted(self, replica: ReplicaId, ago_s: int) -> None:
        entry, held = self.residency.replica(replica), self.held.get(replica, {})
        if entry is not None:
            entry.evict_until(self.now_s - ago_s)
        for block in [block for block, used_s in held.items() if used_s <= self.now_s - ago_s]:
            del held[block]

    @invariant()
    def matches_agree_with_the_model(self) -> None:
        for hashes in self.chains:
            match = self.residency.match(hashes)
            for replica, held in self.held.items():
                entry = self.residency.replica(replica)
                assert entry is not None
                expected = next((at for at, block in enumerate(hashes) if block not in held), len(hashes))
                assert match.tokens(entry.bit, 1_000_000) == expected, (replica, hashes)

    @invariant()
    def the_counts_agree(self) -> None:
        entries = [self.residency.replica(replica) for replica in self.held]
        assert len(self.residency) == sum(len(entry.runs) for entry in entries if entry)
        assert len({entry.bit for entry in entries if entry}) == len(self.held)
        for entry in entries:
            assert entry is not None
            assert entry.tokens == sum(run.tokens for run in entry.runs)
            assert all(run.mask & entry.bit for run in entry.runs)


class CrowdedMachine(RuleBasedStateMachine):
    """With too little capacity: whatever is evicted, no replica has a block without the block before it."""

    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(block_tokens=1, run_tokens=4, max_entries=MOST_ENTRIES, ttl_s=TTL_S)
        self.parents: dict[int, int | None] = {}  # by block, as all prompts have them
        self.now_s = 0.0
        for replica in REPLICAS:
            self.is_added(replica, 12)

    @rule(replica=st.sampled_from(REPLICAS), capacity=st.integers(1, 20))
    def is_added(self, replica: ReplicaId, capacity: int) -> None:
        self.residency.add_replica(replica, capacity)

    @rule(replica=st.sampled_from(REPLICAS))
    def is_removed(self, replica: ReplicaId) -> None:
        self.residency.forget_all_but(set(REPLICAS) - {replica})

    @rule(
        target=sent,
        replica=st.sampled_from(REPLICAS),
        prompt=prompts,
        salt=salts,
        is_matched=st.booleans(),
        later_s=st.sampled_from([0.0, 1.0, TTL_S / 2]),
    )
    def is_sent(
        self, replica: ReplicaId, prompt: list[int], salt: int, *, is_matched: bool, later_s: float
    ) -> SentPrompt:
        self.now_s += later_s
        hashes = chain(prompt, salt)
        self.parents.update(zip(hashes, [None, *hashes], strict=False))
        if is_matched:
            self.residency.match(hashes)
        return self.residency.insert(replica, hashes, self.now_s, len(hashes))

    @rule(one=consumes(sent))
    def is_rolled_back(self, one: SentPrompt) -> None:
        one.roll_back()

    @rule(one=consumes(sent), cached=st.integers(0, 12), generated=st.integers(0, 6) | st.none())
    def is_confirmed(self, one: SentPrompt, cached: int, generated: int | None) -> None:
        one.confirm(12, cached, generated)

    @rule(replica=st.sampled_from(REPLICAS), ago_s=st.integers(0, 6))
    def is_evicted(self, replica: ReplicaId, ago_s: int) -> None:
        if entry := self.residency.replica(replica):
            entry.evict_until(self.now_s - ago_s)

    @invariant()
    def no_block_outlives_its_predecessor(self) -> None:
        for entry in self.entries():
            runs = [run for run in entry.runs if not isinstance(run, Tail)]
            held = {block for run in runs for block in run.hashes}
            for run in runs:
                before = self.parents[run.hashes[0]]
                assert before is None or before in held, (entry.target, run.hashes)

    @invariant()
    def uses_hold_each_run_once_and_in_order(self) -> None:
        for entry in self.entries():
            left = [(run, use) for use in entry.uses for run in use.path[use.first :]]
            assert len(left) == len(entry.runs)
            assert all(entry.runs[run] is use for run, use in left)
            assert all(use.first < len(use.path) for use in entry.uses)
            assert [use.used_s for use in entry.uses] == sorted(use.used_s for use in entry.uses)

    @invariant()
    def nothing_exceeds_its_bound(self) -> None:
        entries = self.entries()
        assert len(self.residency) == sum(len(entry.runs) for entry in entries) <= MOST_ENTRIES + len(REPLICAS)
        assert self.residency.runs == len({id(run) for entry in entries for run in entry.runs})
        for entry in entries:
            assert entry.tokens == sum(run.tokens for run in entry.runs)
            assert all(run.mask & entry.bit for run in entry.runs)

    @invariant()
    def a_snapshot_restores_all_blocks_with_their_last_uses(self) -> None:
        restored = Residency(block_tokens=1, run_tokens=4)
        for entry in self.entries():
            restored.add_replica(entry.target)
            data = b"".join(encode_uses(entry, self.now_s, NOW_AT, 1_000_000))
            for _ in restore_uses(restored, entry.target, [decode_uses(data)], self.now_s, NOW_AT, 1_000_000.0):
                pass
            copy = restored.replica(entry.target)
            assert copy is not None
            assert uses_by_block(copy) == uses_by_block(entry)

    def entries(self) -> list[ReplicaBlocks]:
        found = (self.residency.replica(replica) for replica in REPLICAS)
        return [entry for entry in found if entry is not None]


def uses_by_block(entry: ReplicaBlocks) -> dict[int, float]:
    return {block: use.used_s for run, use in entry.runs.items() if not isinstance(run, Tail) for block in run.hashes}


TestResidency = ResidencyMachine.TestCase
TestCrowdedResidency = CrowdedMachine.TestCase
TestCrowdedResidency.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestResidency.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
