from __future__ import annotations

from routing.balancing.health import HealthRegistry
from tests.routing.building import names

A, B = names(2)


def test_a_replica_nobody_knows_may_be_tried() -> None:
    assert HealthRegistry().is_up(A)


def test_only_news_begins_an_epoch() -> None:
    health = HealthRegistry()
    assert health.mark(A, up=True) is False
    assert health.epoch == 0

    assert health.mark(A, up=False) is True
    assert health.mark(A, up=False) is False
    assert (health.epoch, health.is_up(A), health.is_up(B)) == (1, False, True)

    assert health.mark(A, up=True) is True
    assert (health.epoch, health.is_up(A)) == (2, True)
