"""How many replicas are recommended: for the peak load, with a dead band, and without losing the hit rate."""

from __future__ import annotations

import pytest

from telemetry.lab.scaling import Caching, Demand, Limit, SizeFigures, recommend

NO_CACHE = Caching({}, None, None, 0.0)


def demand(replicas: int = 4, prefill: float | None = 0.5, kv: float | None = None, minutes: int = 60) -> Demand:
    return Demand(replicas, prefill, kv, minutes)


@pytest.mark.parametrize(
    ("load", "replicas", "limit"),
    [
        pytest.param(demand(prefill=0.9), 6, Limit.PREFILL, id="more than the target: scale out"),
        pytest.param(demand(prefill=0.9, kv=1.0), 6, Limit.KV_CACHE, id="the KV cache counts as well"),
        pytest.param(demand(prefill=5.0), 8, Limit.PREFILL, id="at most twice as many at once"),
        pytest.param(demand(prefill=0.9, minutes=2), 6, Limit.PREFILL, id="scaling out needs no complete hour"),
        pytest.param(demand(prefill=0.7), 4, Limit.PREFILL, id="exactly the target"),
        pytest.param(demand(prefill=0.5), 4, Limit.HYSTERESIS, id="three could do, but would be near the target"),
        pytest.param(demand(prefill=0.4), 3, Limit.PREFILL, id="three have room: scale in"),
        pytest.param(demand(prefill=0.4, kv=0.6), 4, Limit.KV_CACHE, id="not if the KV cache is needed"),
        pytest.param(demand(prefill=0.4, minutes=30), 4, Limit.HYSTERESIS, id="not after half an hour"),
        pytest.param(demand(prefill=0.0), 2, Limit.PREFILL, id="at most half at once"),
        pytest.param(demand(1, prefill=0.0), 1, Limit.PREFILL, id="never none"),
    ],
)
def test_the_number_follows_the_peak_load_with_a_dead_band(load: Demand, replicas: int, limit: Limit) -> None:
    found = recommend(load, NO_CACHE)

    assert found is not None
    assert (found.replicas, found.limit) == (replicas, limit)
    assert found.reason


@pytest.mark.parametrize("load", [demand(prefill=None, kv=0.9), demand(0)])
def test_nothing_is_recommended_without_a_known_load_or_a_replica(load: Demand) -> None:
    assert recommend(load, NO_CACHE) is None


SWEEP = {count: SizeFigures(hits, 100.0) for count, hits in ((2, 0.40), (3, 0.59), (4, 0.60), (5, 0.61))}


@pytest.mark.parametrize(
    ("caching", "replicas", "limit"),
    [
        pytest.param(Caching(SWEEP, None, None, 0.6), 3, Limit.PREFIX_CACHE, id="a sweep: two would lose 20 points"),
        pytest.param(Caching({3: SWEEP[3], 4: SWEEP[4]}, None, None, 0.6), 3, Limit.PREFIX_CACHE, id="not below it"),
        pytest.param(
            Caching({**SWEEP, 3: SizeFigures(0.7, 100.0, is_overloaded=True)}, None, None, 0.6),
            *(4, Limit.PREFIX_CACHE),
            id="a sweep: the queues of three would grow until the end",
        ),
        pytest.param(Caching({5: SWEEP[5]}, 100.0, 60.0, 0.6), 2, Limit.PREFILL, id="a sweep of another size"),
        pytest.param(Caching({}, 170.0, 60.0, 0.6), 3, Limit.PREFIX_CACHE, id="the working set needs three caches"),
        pytest.param(Caching({}, 900.0, 60.0, 0.6), 4, Limit.PREFIX_CACHE, id="it does not fit as it is"),
        pytest.param(Caching({}, None, 60.0, 0.6), 4, Limit.PREFIX_CACHE, id="unknown: keep the replicas"),
        pytest.param(Caching({}, None, None, None), 4, Limit.PREFIX_CACHE, id="no traffic was measured"),
        pytest.param(Caching({}, None, None, 0.01), 2, Limit.PREFILL, id="there are no hits to lose"),
    ],
)
def test_scaling_in_keeps_the_hit_rate(caching: Caching, replicas: int, limit: Limit) -> None:
    found = recommend(demand(prefill=0.1), caching)

    assert found is not None
    assert (found.replicas, found.limit) == (replicas, limit)


def test_fewer_caches_have_more_to_compute() -> None:
    """At half the caches each prompt takes twice the prefill: two replicas would have four times the load."""
    sizes = {2: SizeFigures(0.60, 200.0), 3: SizeFigures(0.60, 150.0), 4: SizeFigures(0.60, 100.0)}

    flat = recommend(demand(prefill=0.25), Caching({}, 60.0, 60.0, 0.6))
    steep = recommend(demand(prefill=0.25), Caching(sizes, None, None, 0.6))

    assert (flat and flat.replicas, steep and steep.replicas) == (2, 3)
