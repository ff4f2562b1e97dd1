from __future__ import annotations

import pytest

from routing.balancing.health import FIRST_SHARE, STEPS, HealthRegistry, SlowStarts
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.replicas import GroupReplicas
from routing.schema import ReplicaConfig
from tests.routing.building import names

A, B = names(2)


def test_a_share_grows_from_a_quarter_to_all_in_its_time() -> None:
    health = HealthRegistry()
    starts = SlowStarts(health)
    starts.begin(A, 60.0, 0.0)
    shares = []
    for second in range(0, 70, 5):
        starts.advance(float(second))
        shares.append(health.share(A))
    assert shares == [pytest.approx(min(1.0, FIRST_SHARE + 0.75 * second / 60)) for second in range(0, 70, 5)]
    assert health.epoch == 1 + STEPS
    assert health.share(B) == 1.0


def test_who_starts_again_begins_anew() -> None:
    health = HealthRegistry()
    starts = SlowStarts(health)
    starts.begin(A, 60.0, 0.0)
    starts.advance(59.0)
    starts.begin(A, 60.0, 59.0)
    starts.advance(60.0)
    assert health.share(A) == FIRST_SHARE


def test_without_a_time_the_share_is_whole_at_once() -> None:
    health = HealthRegistry()
    starts = SlowStarts(health)
    starts.begin(A, 60.0, 0.0)
    starts.begin(A, 0.0, 1.0)
    starts.advance(2.0)
    assert health.share(A) == 1.0


def test_who_leaves_takes_its_share_along() -> None:
    health = HealthRegistry()
    starts = SlowStarts(health)
    starts.begin(A, 60.0, 0.0)
    starts.forget_all_but({B})
    assert health.share(A) == 1.0


def test_candidates_have_the_share_of_their_weight() -> None:
    health = HealthRegistry()
    replicas = GroupReplicas([ReplicaConfig(name=name, url="http://a", weight=2.0) for name in (A, B)], LoadTracker())
    assert replicas.candidates(health).weights == {A: 2.0, B: 2.0}
    health.set_share(A, 0.25)
    assert replicas.candidates(health).weights == {A: 0.5, B: 2.0}
