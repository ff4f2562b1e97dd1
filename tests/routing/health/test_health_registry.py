"""The health registry that placement reads, and slow starts."""

import pytest

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.replicas import FIRST_SHARE, STEPS, GroupReplicas, HealthRegistry, SlowStarts
from routing.schema import ReplicaConfig
from tests.routing.building import names

A, B = names(2)


def test_only_a_change_of_health_begins_a_new_epoch():
    health = HealthRegistry()
    assert health.is_up(A), "an unknown replica may get requests"
    assert health.mark(A, up=True) is False
    assert health.epoch == 0
    assert health.mark(A, up=False) is True
    assert health.mark(A, up=False) is False
    assert (health.epoch, health.is_up(A), health.is_up(B)) == (1, False, True)
    assert health.mark(A, up=True) is True
    assert (health.epoch, health.is_up(A)) == (2, True)


def test_a_share_grows_from_a_quarter_to_all():
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


def test_a_slow_start_begins_anew_ends_at_once_without_a_duration_and_is_dropped_with_its_replica():
    health = HealthRegistry()
    starts = SlowStarts(health)
    starts.begin(A, 60.0, 0.0)
    starts.advance(59.0)
    starts.begin(A, 60.0, 59.0)
    starts.advance(60.0)
    assert health.share(A) == FIRST_SHARE
    starts.begin(A, 0.0, 61.0)
    starts.advance(62.0)
    assert health.share(A) == 1.0
    starts.begin(A, 60.0, 63.0)
    starts.forget_all_but({B})
    assert health.share(A) == 1.0


def test_the_weight_of_a_candidate_is_scaled_by_its_share():
    health = HealthRegistry()
    replicas = GroupReplicas([ReplicaConfig(name=name, url="http://a", weight=2.0) for name in (A, B)], LoadTracker())
    assert replicas.candidates(health).weights == {A: 2.0, B: 2.0}
    health.set_share(A, 0.25)
    assert replicas.candidates(health).weights == {A: 0.5, B: 2.0}
