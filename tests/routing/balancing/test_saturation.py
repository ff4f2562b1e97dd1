"""The saturation of a pool: offered work by prefill rate, the part of one process, and when it is unknown."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.replicas import HealthRegistry
from routing.balancing.saturation import WINDOW_S, Saturation, SaturationMeter
from routing.schema import ReplicaRole, ReplicaState
from tests.routing.balancing.test_load_tracker import Clock
from tests.routing.building import names, pool, replicas

A, B = names(2)
RATE = 1000.0  # tokens/s of each replica


class World:
    """Two replicas that prefill 1,000 tokens/s, and one process that reads its saturation."""

    def __init__(self, *, is_measured: bool = True) -> None:
        self.clock = Clock()
        self.loads = LoadTracker(self.clock)
        self.health = HealthRegistry()
        self.pool = pool(members=replicas(2))
        self.meter = SaturationMeter(self.loads, self.health)
        if is_measured:
            for name in (A, B):
                for _ in range(400):
                    self.loads.load(name).prefill.learn(1000, 1.0)

    def read(self, queued: int = 0) -> Saturation:
        return self.meter.read(self.pool, queued)

    def run(self, seconds: int, tokens_per_s: int, *, responds: bool = True) -> Saturation:
        """Send requests of this many tokens a second to both replicas in turn, reading each second."""
        for second in range(seconds):
            ticket = self.loads.dispatch((A, B)[second % 2], tokens_per_s)
            if responds:
                ticket.record_first_byte()
                ticket.end()
            self.clock.now_s += 1.0
            self.read()
        return self.read()


@pytest.mark.parametrize(("tokens_per_s", "expected"), [(0, 0.0), (500, 0.25), (1500, 0.75), (9000, 1.0)])
def test_saturation_is_the_traffics_share_of_the_replicas_prefill_rate(tokens_per_s, expected):
    world = World()
    world.read()

    found = world.run(40, tokens_per_s)

    assert found.ratio == pytest.approx(expected, rel=0.01)
    assert found.waiting_s == 0.0
    assert found.tokens_per_s == pytest.approx(2 * RATE)


def test_it_follows_the_traffic_of_the_window():
    world = World()
    world.run(60, 4000)

    assert world.run(int(WINDOW_S), 500).ratio == pytest.approx(0.25, rel=0.05)
    assert world.run(int(WINDOW_S), 0).ratio == 0.0


def test_it_stays_at_1_while_a_queue_remains():
    world = World()
    world.read()
    tickets = [world.loads.dispatch((A, B)[number % 2], 1000) for number in range(200)]  # 100 s of work
    world.run(60, 0)
    assert world.read().ratio == 1.0

    for ticket in tickets:
        ticket.record_first_byte()
    world.run(int(WINDOW_S) + 1, 0)
    assert world.read().ratio == 0.0


def test_a_reading_after_a_long_pause_is_of_the_whole_pause():
    world = World()
    world.read()
    ticket = world.loads.dispatch(A, 120_000)
    ticket.record_first_byte()
    ticket.end()
    world.clock.now_s += 120.0

    assert world.read().ratio == pytest.approx(0.5, rel=0.01)


def test_waiting_work_is_what_the_replicas_have_to_prefill_and_what_waits_in_the_router():
    world = World()
    world.read()
    found = world.run(4, 1000, responds=False)

    # The oldest request of each replica is prefilled, at most up to 95 %.
    assert found.waiting_s == pytest.approx((4000 - 2 * 950) / (2 * RATE), rel=0.01)
    queued = world.read(queued=6)
    assert found.waiting_s is not None
    assert queued.waiting_s == pytest.approx(found.waiting_s + 6 * 1000 / (2 * RATE), rel=0.01)


def test_a_replica_that_serves_nothing_adds_no_rate():
    world = World()
    world.read()
    world.run(40, 500)
    world.health.mark(B, up=False)
    assert world.read().ratio == pytest.approx(0.5, rel=0.01)

    world.health.mark(B, up=True)
    draining = replace(world.pool.replicas[1], state=ReplicaState.DRAINING)
    world.pool = replace(world.pool, replicas=(world.pool.replicas[0], draining))
    assert world.read().ratio == pytest.approx(0.5, rel=0.01)


def test_figures_of_several_processes_add_up():
    one, other = World(), World()
    for world in (one, other):
        world.read()
    parts = [one.run(40, 500), other.run(40, 900)]
    for world in (one, other):  # each knows the waiting tokens of the other, which do not count twice
        world.loads.set_remote_load(A, 1, 5000)

    assert sum(part.ratio or 0.0 for part in parts) == pytest.approx(0.7, rel=0.01)
    assert [one.read().waiting_s, other.read().waiting_s] == [0.0, 0.0]


def test_it_is_unknown_without_a_measured_rate_a_serving_replica_or_a_few_seconds():
    unmeasured = World(is_measured=False)
    unmeasured.read()
    assert (unmeasured.read().ratio, unmeasured.read().waiting_s) == (0.0, 0.0)  # it has sent nothing
    found = unmeasured.run(10, 100)
    assert (found.ratio, found.waiting_s, found.tokens_per_s) == (None, None, None)

    young = World()
    young.read()
    assert young.run(3, 500).ratio is None
    assert young.run(3, 500).ratio == pytest.approx(0.25, rel=0.01)

    down = World()
    down.run(10, 500)
    for name in (A, B):
        down.health.mark(name, up=False)
    assert (down.read().ratio, down.read().tokens_per_s) == (None, None)


def test_a_pool_with_prefill_replicas_is_as_full_as_its_fuller_side():
    world = World()
    prefill = replace(world.pool.replicas[0], role=ReplicaRole.PREFILL)
    world.pool = replace(world.pool, replicas=(prefill, world.pool.replicas[1]))
    world.read()
    for _ in range(40):
        for name, tokens in ((A, 800), (B, 100)):
            ticket = world.loads.dispatch(name, tokens)
            ticket.record_first_byte()
            ticket.end()
        world.clock.now_s += 1.0
        world.read()

    assert world.read().ratio == pytest.approx(0.8, rel=0.01)


def test_what_was_sent_to_a_replica_that_left_is_counted_once():
    world = World()
    world.read()
    world.run(20, 1000)
    both = world.pool
    world.pool = replace(both, replicas=both.replicas[:1])
    world.loads.forget_all_but([A])
    world.read()
    world.pool = both  # it returns with a new load, which counts from 0
    for _ in range(400):
        world.loads.load(B).prefill.learn(1000, 1.0)

    assert world.run(20, 1000).ratio == pytest.approx(0.5, rel=0.05)
