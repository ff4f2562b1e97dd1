"""What a response cache would bring, from requests that a real router placed and telemetry collected."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from random import Random
from typing import Any

import pytest

from controlplane.models import TaskGroup
from controlplane.services.fleet.pools import update_pool
from routing.schema import TaskGroupConfig
from telemetry.lab.breakdown import BIN
from telemetry.lab.costs import PrefillRate
from telemetry.metrics.windows import Window
from telemetry.models import DecisionCursor
from telemetry.scraping.decision_records import Progress, read_page, record_page
from telemetry.services.lab import sizing
from telemetry.services.lab.sizing import ResponseCacheEstimate, estimate_response_cache
from telemetry.storage import decisions
from telemetry.storage.partitions import ensure_days
from tests.fakes.replica import answering, fake_replicas
from tests.routing.proxy.harness import config, routed
from tests.telemetry.breakdown_bins import breakdown_bin
from tests.telemetry.conftest import T0
from tests.telemetry.services.lab.test_sizing import COSTS
from tests.telemetry.stored_decisions import a_router, decided

pytestmark = pytest.mark.django_db
USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 40}}
ANSWER = json.dumps({"choices": [{"finish_reason": "stop", "message": {"content": "x"}}], "usage": USAGE}).encode()
RATE = PrefillRate(60.0, "measured")
STEP = timedelta(seconds=60)


async def routed_stream(stream: list[tuple[str, int, float]]) -> dict[str, Any]:
    """The page of decisions of a router that got (task group, question, temperature), one after the other."""
    groups = tuple(TaskGroupConfig(name=name) for name in ("faq", "chat"))
    async with fake_replicas(1, answering(ANSWER)) as replicas, routed(config(replicas, groups=groups)) as harness:
        for group, question, temperature in stream:
            messages = [{"role": "user", "content": f"Question {question}?"}]
            body = {"model": "tiny", "messages": messages, "temperature": temperature}
            response = await harness.chat(json.dumps(body).encode(), [b"X-Task-Group: " + group.encode()])
            assert response.status == 200
        await harness.at_rest()
        _, page = await harness.admin("GET", "/admin/decisions", params={"limit": str(len(stream))})
    assert len(page["decisions"]) == len(stream)
    return page


def capture(stream: list[tuple[str, int, float]]) -> Window:
    """Store the decisions of this stream as if a request had come each minute; the window that contains them."""
    page = asyncio.run(routed_stream(stream))
    start = T0 - STEP * len(stream)
    ensure_days([start.date(), T0.date()])
    for number, record in enumerate(page["decisions"]):
        record |= {"at": (start + number * STEP).isoformat(), "latency_s": 1.0}
    router = a_router()
    cursor = DecisionCursor.objects.create(router=router, boot=page["boot"])
    record_page(Progress(router, cursor, 10_000, 0), read_page(json.dumps(page).encode()), ratio=1.0, now=T0)
    return Window(start, T0, 60)


def repeats_in(stream: list[tuple[str, int, float]], group: str, ttl_min: int) -> tuple[int, int]:
    """(cacheable requests, those within ``ttl_min`` of the request that was sent) of a group, one per minute."""
    sent: dict[int, int] = {}
    cacheable = repeats = 0
    for minute, (name, question, temperature) in enumerate(stream):
        if name != group or temperature:
            continue
        cacheable += 1
        if minute - sent.get(question, -10_000) <= ttl_min:
            repeats += 1
        else:
            sent[question] = minute
    return cacheable, repeats


def a_stream(count: int, seed: int = 3) -> list[tuple[str, int, float]]:
    random = Random(seed)
    return [
        (random.choice(("faq", "faq", "chat")), random.randrange(12), random.choice((0, 0, 0, 1))) for _ in range(count)
    ]


def effects(found: ResponseCacheEstimate | None, group: str) -> dict[int, tuple[float, float]]:
    assert found is not None
    (row,) = [row for row in found.groups if row.group == group]
    return {effect.ttl_s: (effect.cacheable_requests, effect.hits) for effect in row.effects}


def test_the_repeats_of_a_routed_stream_are_found_exactly(pool):
    pool = update_pool(pool, costs=COSTS)
    stream = a_stream(150)
    window = capture(stream)

    found = estimate_response_cache(pool, window, RATE)

    assert found is not None
    for group in ("faq", "chat"):
        assert effects(found, group) == {300: repeats_in(stream, group, 5), 3600: repeats_in(stream, group, 60)}
    assert (found.total.requests, found.sample_ratio) == (150, 1)
    cacheable, hits = map(sum, zip(*(repeats_in(stream, group, 60) for group in ("faq", "chat")), strict=True))
    hour = found.total.effects[1]
    assert (hour.cacheable_requests, hour.hits, hour.followers) == (cacheable, hits, 0)
    assert (hour.prompt_tokens, hour.generated_tokens) == (100 * hits, 7 * hits)
    assert hour.prefill.replica_seconds == pytest.approx(hits)  # 60 uncached tokens each
    assert hour.prefill.money == pytest.approx(0.002 * hits)


def test_at_most_a_bounded_number_of_rows_is_read(pool, monkeypatch):
    monkeypatch.setattr(decisions, "MAX_DIGESTS", 40)
    window = capture([("faq", number % 80, 0) for number in range(160)])
    coverage = decisions.digest_coverage("chat", window.start, window.end)

    assert coverage is not None
    assert coverage.requests == {"faq": 160}
    assert 0 < len(decisions.digested_between("chat", window.start, window.end, coverage.level)) <= 40


def test_of_a_long_range_only_the_newest_requests_are_examined(pool, monkeypatch):
    monkeypatch.setattr(sizing, "MAX_EXAMINED", 100)
    window = capture([("faq", number % 4, 0) for number in range(120)])
    for number in range(24):
        breakdown_bin(pool, window.start + number * BIN, requests=5, reachable=0.5)

    found = estimate_response_cache(pool, window, RATE)

    assert found is not None
    assert (found.total.requests, found.start) == (100, T0 - timedelta(minutes=100))
    assert found.notes[0] == "Only about the newest 100 requests of the range were examined."


def test_a_group_with_a_response_cache_gets_no_estimate(pool):
    window = capture(a_stream(60))
    TaskGroup.objects.create(pool=pool, name="faq", response_cache={})

    found = estimate_response_cache(pool, window, PrefillRate(None, "The prefill rate is unknown."))

    assert found is not None
    faq = next(row for row in found.groups if row.group == "faq")
    assert (faq.has_response_cache, faq.cacheable_requests, faq.effects) == (True, None, [])
    assert found.total.requests == sum(row.requests for row in found.groups if row.group == "chat")
    assert found.total.effects[0].prefill.replica_seconds is None
    assert found.notes == [
        "The prefill rate is unknown.",
        "No price is set in the pool's settings, so no money is shown.",
    ]


def test_without_digests_there_is_no_estimate_and_a_short_time_has_no_effects(pool):
    router = a_router()
    decided(router, T0 - timedelta(minutes=1), 1)  # by a router that computes none
    window = Window(T0 - timedelta(hours=1), T0, 60)
    assert estimate_response_cache(pool, window, RATE) is None

    decided(router, T0 - timedelta(minutes=1), 2, digest_ratio=1.0)
    found = estimate_response_cache(pool, window, RATE)
    assert found is not None
    assert (found.total.requests, found.total.cacheable_requests, found.total.effects) == (1, 0, [])
    assert found.notes[0].startswith("There are less than five minutes of traffic")
