"""Replicas that answer, and so slowly that they are better left alone; and those that only look like it (R8)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.health.slowness import (
    FEWEST,
    FULLER,
    LATE_PEERS,
    PEERS,
    TRICKLE_S,
    Observation,
    Slowness,
    observation,
)
from routing.types import ReplicaId

STALL_S = 3.0
TICK_S = 0.25


def at_pace(seconds: float, late_s: float = 0.0, prefill_s: float = 0.0) -> Observation:
    return Observation(late_s, seconds, seconds, prefill_s)


WELL = at_pace(0.02)


@dataclass
class Pool:
    """Replicas that show the same at every look until told otherwise."""

    observations: dict[str, Observation]
    held: dict[str, float] = field(default_factory=dict)
    slowness: Slowness = field(default_factory=Slowness)
    now_s: float = 0.0

    def stall_detector(self, seconds: float) -> Mapping[str, float]:
        """Who is found slow within this time, and after how many seconds for the first time."""
        found: dict[str, float] = {}
        begun = self.now_s
        while self.now_s < begun + seconds:
            self.now_s += TICK_S
            observations = {ReplicaId(name): seen for name, seen in self.observations.items()}
            for name, _ in self.slowness.evaluate(
                observations, STALL_S, self.now_s, lambda name: self.held.get(name, 0.0)
            ):
                found.setdefault(name, self.now_s - begun)
        return found


def pool(first: Observation, others: Iterable[Observation] = (WELL, WELL, WELL)) -> Pool:
    return Pool({"a": first} | {f"peer-{number}": seen for number, seen in enumerate(others)})


def test_a_replica_whose_streams_get_a_byte_now_and_then_trickles() -> None:
    found = pool(at_pace(1.5)).stall_detector(10.0)

    assert found == {"a": pytest.approx(STALL_S + TICK_S)}


def test_one_that_begins_to_trickle_is_found_within_five_seconds() -> None:
    replicas = pool(WELL)
    assert replicas.stall_detector(10.0) == {}

    seconds = 0.0
    while not (found := replicas.stall_detector(TICK_S)):
        seconds += TICK_S
        replicas.observations["a"] = at_pace(min(seconds, 2.0))  # streams fall silent, and then get a byte in 4 s
        assert seconds <= 5.0
    assert set(found) == {"a"}


@pytest.mark.parametrize(
    ("seen", "others"),
    [
        (at_pace(0.4), (WELL, WELL)),  # an event in 0.8 s
        (at_pace(1.5), (at_pace(0.2), at_pace(0.2))),  # all are slow
        (at_pace(1.5), (Observation(), Observation())),  # nobody to compare with
        (at_pace(1.5), ()),
        (at_pace(1.5, prefill_s=2.0), (WELL, WELL)),  # the engine prefills, and decodes nothing meanwhile
        (Observation(peer_pace_s=1.5), (WELL, WELL)),  # a stream or two
    ],
)
def test_no_replica_trickles_that(seen: Observation, others: tuple[Observation, ...]) -> None:
    assert pool(seen, others).stall_detector(20.0) == {}


def test_a_moment_of_it_is_no_trickle() -> None:
    replicas = pool(WELL)
    for _ in range(10):
        replicas.observations["a"] = at_pace(2.0)
        assert replicas.stall_detector(2.5) == {}
        replicas.observations["a"] = WELL
        assert replicas.stall_detector(1.5) == {}


def test_one_whose_first_bytes_come_far_later_than_elsewhere_is_late() -> None:
    assert pool(Observation(late_s=3.1)).stall_detector(TICK_S) == {"a": TICK_S}


@pytest.mark.parametrize(
    ("seen", "others"),
    [
        (Observation(late_s=2.9), (WELL, WELL)),
        (Observation(late_s=9.0), (Observation(late_s=3.0), Observation(late_s=2.5))),  # the pool has too much to do
        (Observation(late_s=9.0), ()),
    ],
)
def test_no_replica_is_late_that(seen: Observation, others: tuple[Observation, ...]) -> None:
    assert pool(seen, others).stall_detector(TICK_S) == {}


def test_peers_that_have_just_caught_up_were_late_all_the_same() -> None:
    replicas = pool(Observation(late_s=5.0), (Observation(late_s=4.0), Observation(late_s=4.0)))
    assert replicas.stall_detector(2.0) == {}
    replicas.observations |= {"peer-0": WELL, "peer-1": WELL}

    assert replicas.stall_detector(5.0) == {}
    assert set(replicas.stall_detector(60.0)) == {"a"}


def test_who_is_fuller_than_its_peers_has_a_queue_and_is_well() -> None:
    replicas = pool(Observation(late_s=9.0))
    replicas.held = {"a": 200_000, "peer-0": 100_000, "peer-1": 90_000, "peer-2": 120_000}
    assert replicas.stall_detector(TICK_S) == {}

    replicas.held["a"] = 100_000
    assert set(replicas.stall_detector(TICK_S)) == {"a"}


def test_two_that_are_slow_do_not_shield_each_other() -> None:
    replicas = pool(at_pace(2.0), (at_pace(2.0), WELL, WELL))

    assert set(replicas.stall_detector(10.0)) == {"a", "peer-0"}


def test_a_replica_that_is_probed_is_nobodys_measure() -> None:
    replicas = pool(
        Observation(late_s=4.0),
        (Observation(late_s=4.0, is_probed=True), WELL, Observation(late_s=4.0, is_probed=True)),
    )

    assert set(replicas.stall_detector(TICK_S)) == {"a", "peer-0", "peer-2"}


def test_a_few_streams_prove_nothing_but_a_trials_one_does() -> None:
    few, many = [9.0] * (FEWEST - 1), [9.0] * FEWEST

    assert observation(few, few) == Observation(peer_pace_s=9.0)
    assert observation(many, many) == Observation(9.0, 9.0, 9.0)
    assert observation([9.0], [8.0], is_probed=True) == Observation(9.0, 8.0, 8.0, is_probed=True)
    assert observation([9.0, 8.0, 1.0], [0.1, 0.2, 9.0], 0.5) == Observation(1.0, 0.2, 0.2, 0.5)
    assert observation([-1.0] * 3, []).late_s == 0.0


def test_peers_are_a_measure_by_one_stream_or_by_answers_that_come_and_go() -> None:
    assert observation([], [0.3]) == Observation(peer_pace_s=0.3)
    assert observation([], [], ended_s=0.2) == Observation(peer_pace_s=0.0)
    assert observation([], [], ended_s=5.0) == Observation()
    assert set(pool(at_pace(1.5), [observation([], [], ended_s=0.2)]).stall_detector(10.0)) == {"a"}


def cpu_s_of_a_look(observations: dict[ReplicaId, Observation], held: Callable[[ReplicaId], float]) -> float:
    """The least of some rounds."""
    slowness, spent_s = Slowness(), []
    for number in range(5):
        begun_s = time.process_time()
        list(slowness.evaluate(observations, STALL_S, number * TICK_S, held))
        spent_s.append(time.process_time() - begun_s)
    return min(spent_s)


@pytest.mark.parametrize("slow", [Observation(), Observation(late_s=9.0), at_pace(1.5)])
def test_ten_times_the_replicas_are_not_a_hundred_times_the_work(slow: Observation) -> None:
    def pool_of(count: int) -> float:
        few = {ReplicaId(f"a-{number}"): slow for number in range(count // 2 - 1)}
        observations = few | {ReplicaId(f"b-{number}"): WELL for number in range(count // 2 + 1)}
        return cpu_s_of_a_look(observations, lambda name: 1.0 + 9.0 * (name in few))

    assert pool_of(2000) < 40 * pool_of(200)


figures = st.sampled_from([0.0, 0.02, 0.06, 0.4, 0.6, 1.5, 3.0, 3.1, 9.0, 13.0])
seen = st.builds(
    lambda late_s, peer_pace_s, is_told, prefill_s, is_probed: Observation(
        late_s, peer_pace_s if is_told else None, peer_pace_s, prefill_s, is_probed
    ),
    figures,
    st.none() | figures,
    st.booleans(),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),
)


@given(st.lists(st.tuples(seen, st.sampled_from([0.0, 1.0, 1.5, 2.0])), max_size=6))
def test_each_is_judged_by_the_median_of_the_others(members: list[tuple[Observation, float]]) -> None:
    names = [ReplicaId(str(number)) for number in range(len(members))]
    observations, held = {}, {}
    for name, (one, tokens) in zip(names, members, strict=True):
        observations[name], held[name] = one, tokens

    def is_slow(name: ReplicaId) -> bool:
        peers = [peer for peer in names if peer != name and not observations[peer].is_probed]
        paces = [pace_s for peer in peers if (pace_s := observations[peer].peer_pace_s) is not None]
        one = observations[name]
        if peers and paces and one.pace_s is not None:
            trickles = one.pace_s > max(TRICKLE_S, PEERS * median_low(paces)) + one.prefill_s
        else:
            trickles = False
        if not peers or trickles:
            return trickles
        is_fuller = held[name] > FULLER * median_low(held[peer] for peer in peers)
        return (
            one.late_s > max(STALL_S, LATE_PEERS * median_low(observations[peer].late_s for peer in peers))
            and not is_fuller
        )

    slowness, found = Slowness(), set[str]()
    for now_s in (0.0, STALL_S):
        found = {name for name, _ in slowness.evaluate(observations, STALL_S, now_s, lambda name: held[name])}
    assert found == {name for name in names if is_slow(name)}
