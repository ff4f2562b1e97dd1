"""Limits of silence, and replicas that are slower than their peers or only seem to be."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.health.slowness import (
    FULLER_RATIO,
    LATE_PEER_RATIO,
    MIN_STREAMS,
    SILENCE_HALF_LIFE_S,
    TRICKLE_PEER_RATIO,
    TRICKLE_S,
    Observation,
    Slowness,
    TypicalSilence,
    observe_streams,
)
from routing.types import ReplicaId

STALL_S = 3.0
TICK_S = 0.25


@pytest.mark.parametrize(("tokens", "allowed_s"), [(80, 3.03), (128_000, 51.0)])
def test_a_prompt_is_allowed_three_times_its_prefill_on_top_of_stall_s(tokens, allowed_s):
    assert TypicalSilence().allowed_s(3.0, tokens, 8000.0, 0.0) == pytest.approx(allowed_s)


def test_three_times_the_typical_silence_is_allowed_and_it_halves_over_time():
    typical = TypicalSilence()
    typical.record(4.0, 0.0)
    for halvings, allowed_s in ((0, 12.0), (1, 6.0), (10, 3.0)):
        assert typical.allowed_s(3.0, 0, 8000.0, halvings * SILENCE_HALF_LIFE_S) == pytest.approx(allowed_s)
    typical.record(1.0, 1.0)
    assert typical.longest_s(1.0) == pytest.approx(4.0, rel=0.01), "a shorter one does not replace it"
    typical.record(3.0, 2 * SILENCE_HALF_LIFE_S)
    assert typical.longest_s(2 * SILENCE_HALF_LIFE_S) == 3.0


def at_pace(seconds: float, late_s: float = 0.0, prefill_s: float = 0.0) -> Observation:
    return Observation(late_s, seconds, seconds, prefill_s)


HEALTHY = at_pace(0.02)


@dataclass
class Pool:
    """Replicas that keep their observations until the test changes them."""

    observations: dict[str, Observation]
    fullness: dict[str, float] = field(default_factory=dict)
    slowness: Slowness = field(default_factory=Slowness)
    now_s: float = 0.0

    def detected(self, seconds: float) -> Mapping[str, float]:
        """The replicas found slow within this time, and after how many seconds."""
        detected: dict[str, float] = {}
        started_at = self.now_s
        while self.now_s < started_at + seconds:
            self.now_s += TICK_S
            observations = {ReplicaId(name): observation for name, observation in self.observations.items()}
            for name, _ in self.slowness.evaluate(
                observations, STALL_S, self.now_s, lambda name: self.fullness.get(name, 0.0)
            ):
                detected.setdefault(name, self.now_s - started_at)
        return detected


def pool(first: Observation, others: Iterable[Observation] = (HEALTHY, HEALTHY, HEALTHY)) -> Pool:
    return Pool({"a": first} | {f"peer-{number}": observation for number, observation in enumerate(others)})


def test_a_replica_whose_streams_rarely_get_a_byte_trickles():
    assert pool(at_pace(1.5)).detected(10.0) == {"a": pytest.approx(STALL_S + TICK_S)}


def test_a_replica_that_starts_to_trickle_is_detected_within_five_seconds():
    replicas = pool(HEALTHY)
    assert replicas.detected(10.0) == {}
    seconds = 0.0
    while not (detected := replicas.detected(TICK_S)):
        seconds += TICK_S
        replicas.observations["a"] = at_pace(min(seconds, 2.0))  # streams fall silent, and then get a byte in 4 s
        assert seconds <= 5.0
    assert set(detected) == {"a"}


@pytest.mark.parametrize(
    ("observation", "others"),
    [
        pytest.param(at_pace(0.4), (HEALTHY, HEALTHY), id="an event in 0.8 s"),
        pytest.param(at_pace(1.5), (at_pace(0.2), at_pace(0.2)), id="all are slow"),
        pytest.param(at_pace(1.5), (Observation(), Observation()), id="idle peers"),
        pytest.param(at_pace(1.5), (), id="no peers"),
        pytest.param(at_pace(1.5, prefill_s=2.0), (HEALTHY, HEALTHY), id="the engine prefills"),
        pytest.param(Observation(peer_pace_s=1.5), (HEALTHY, HEALTHY), id="one or two streams"),
        pytest.param(Observation(late_s=2.9), (HEALTHY, HEALTHY), id="less late than stall_s"),
        pytest.param(Observation(late_s=9.0), (Observation(late_s=3.0), Observation(late_s=2.5)), id="all are late"),
        pytest.param(Observation(late_s=9.0), (), id="late without peers"),
    ],
)
def test_no_replica_is_slow_if(observation, others):
    assert pool(observation, others).detected(20.0) == {}


def test_a_short_trickle_is_not_slowness():
    replicas = pool(HEALTHY)
    for _ in range(10):
        replicas.observations["a"] = at_pace(2.0)
        assert replicas.detected(2.5) == {}
        replicas.observations["a"] = HEALTHY
        assert replicas.detected(1.5) == {}


def test_peers_that_have_just_caught_up_still_count_as_late():
    replicas = pool(Observation(late_s=5.0), (Observation(late_s=4.0), Observation(late_s=4.0)))
    assert replicas.detected(2.0) == {}
    replicas.observations |= {"peer-0": HEALTHY, "peer-1": HEALTHY}
    assert replicas.detected(5.0) == {}
    assert set(replicas.detected(60.0)) == {"a"}


def test_observations_need_several_streams_unless_the_replica_is_probed():
    too_few, enough = [9.0] * (MIN_STREAMS - 1), [9.0] * MIN_STREAMS
    assert observe_streams(too_few, too_few) == Observation(peer_pace_s=9.0)
    assert observe_streams(enough, enough) == Observation(9.0, 9.0, 9.0)
    assert observe_streams([9.0], [8.0], is_probed=True) == Observation(9.0, 8.0, 8.0, is_probed=True)
    assert observe_streams([9.0, 8.0, 1.0], [0.1, 0.2, 9.0], 0.5) == Observation(1.0, 0.2, 0.2, 0.5)
    assert observe_streams([-1.0] * 3, []).late_s == 0.0
    assert observe_streams([], [0.3]) == Observation(peer_pace_s=0.3)
    assert observe_streams([], [], ended_s=0.2) == Observation(peer_pace_s=0.0)
    assert observe_streams([], [], ended_s=5.0) == Observation()
    assert set(pool(at_pace(1.5), [observe_streams([], [], ended_s=0.2)]).detected(10.0)) == {"a"}


@pytest.mark.parametrize("slow", [Observation(), Observation(late_s=9.0), at_pace(1.5)])
def test_an_evaluation_is_not_quadratic_in_the_number_of_replicas(slow):
    def cpu_s(count: int) -> float:
        """The minimum of five evaluations, of a pool of which almost half is slow."""
        slow_replicas = {ReplicaId(f"a-{number}"): slow for number in range(count // 2 - 1)}
        observations = slow_replicas | {ReplicaId(f"b-{number}"): HEALTHY for number in range(count // 2 + 1)}
        slowness, durations_s = Slowness(), []
        for number in range(5):
            started_s = time.process_time()
            list(
                slowness.evaluate(
                    observations, STALL_S, number * TICK_S, lambda name: 1.0 + 9.0 * (name in slow_replicas)
                )
            )
            durations_s.append(time.process_time() - started_s)
        return min(durations_s)

    assert cpu_s(2000) < 40 * cpu_s(200)


seconds = st.sampled_from([0.0, 0.02, 0.06, 0.4, 0.6, 1.5, 3.0, 3.1, 9.0, 13.0])
observed = st.builds(
    lambda late_s, pace_s, has_enough, prefill_s, is_probed: Observation(
        late_s, pace_s if has_enough else None, pace_s, prefill_s, is_probed
    ),
    seconds,
    st.none() | seconds,
    st.booleans(),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),
)


@given(st.lists(st.tuples(observed, st.sampled_from([0.0, 1.0, 1.5, 2.0])), max_size=6))
def test_each_replica_is_compared_with_the_median_of_the_others(members):
    names = [ReplicaId(str(number)) for number in range(len(members))]
    observations = {name: observation for name, (observation, _) in zip(names, members, strict=True)}
    fullness = {name: tokens for name, (_, tokens) in zip(names, members, strict=True)}

    def is_slow(name: ReplicaId) -> bool:
        peers = [peer for peer in names if peer != name and not observations[peer].is_probed]
        if not peers:
            return False
        own = observations[name]
        paces = [pace_s for peer in peers if (pace_s := observations[peer].peer_pace_s) is not None]
        if (
            paces
            and own.pace_s is not None
            and own.pace_s > max(TRICKLE_S, TRICKLE_PEER_RATIO * median_low(paces)) + own.prefill_s
        ):
            return True
        is_fuller = fullness[name] > FULLER_RATIO * median_low(fullness[peer] for peer in peers)
        peer_lateness = median_low(observations[peer].late_s for peer in peers)
        return own.late_s > max(STALL_S, LATE_PEER_RATIO * peer_lateness) and not is_fuller

    slowness, detected = Slowness(), set[str]()
    for now_s in (0.0, STALL_S):
        detected = {it for it, _ in slowness.evaluate(observations, STALL_S, now_s, lambda name: fullness[name])}
    assert detected == {name for name in names if is_slow(name)}
