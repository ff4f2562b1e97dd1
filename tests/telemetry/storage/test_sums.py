"""What is asked of readings while more of them come in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connection

from controlplane.services.fleet.replicas import add_replica
from telemetry.metrics.windows import Window
from telemetry.storage.rule_sums import LatencyKind, revision_latencies
from telemetry.storage.sums import engine_ttft, router_ttft
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading, route_reading
from tests.telemetry.stored_decisions import a_router

pytestmark = pytest.mark.django_db
WINDOW = Window(T0, T0 + timedelta(seconds=60), 60.0)
AT = T0 + timedelta(seconds=5)


@contextmanager
def stored_meanwhile(store: Callable[[], None]) -> Iterator[None]:
    """Store something after all that is asked before histograms are, and right before those."""
    waiting = [store]

    def before(execute, sql, params, many, context):
        if "unnest(" in sql and waiting:
            waiting.pop()()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(before):
        yield
    assert not waiting


def test_the_first_reading_with_edges_of_its_own_may_come_while_an_engine_s_are_asked_for(pool):
    r1 = add_replica(pool, name="r1", url="http://127.0.0.1:9101")
    with stored_meanwhile(lambda: engine_reading(r1, AT, ttft={1: 3}, edges=(0.25, 7.0))):
        found = engine_ttft([r1.pk], WINDOW)
    assert [(merged.buckets.edges, merged.buckets.counts) for merged in found.values()] == [((0.25, 7.0), {1: 3})]


@pytest.mark.parametrize("by", [None, "group", "replica"])
def test_the_first_reading_ever_may_come_while_routers_are_asked_for(pool, by):
    router = a_router()
    with stored_meanwhile(lambda: route_reading(router, AT, group="coding", ttft={4: 2})):
        found = router_ttft(None, WINDOW, by=by)
    assert [merged.buckets.counts for merged in found.values()] == [{4: 2}]


def test_the_first_reading_ever_may_come_while_a_trial_is_judged(pool):
    router = a_router()
    with stored_meanwhile(lambda: route_reading(router, AT, ttft={4: 2}, revision=7)):
        (found,) = revision_latencies("chat", "chat", WINDOW, LatencyKind.TTFT)
    assert (found.revision, found.waits.counts) == (7, {4: 2})
