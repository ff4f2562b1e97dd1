"""The sum of all readings, whatever happens to a replica between scrapes.

A replica with one to three engines, two cache tiers, with or without start times (H9), is scraped repeatedly. In
between it serves requests, restarts, fails, sends torn, NaN, negative or huge counts, or reports its hits under another
name. A model knows the true totals, and what a restart must lose of them.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.metrics.engine import read_replica
from telemetry.metrics.exposition import ExpositionError
from telemetry.metrics.rates import hit_rate_ratio
from telemetry.scraping.merge import ScrapeFailure, ScrapeResult, TargetState, merge_replica

INTERVAL_S = 10.0
BAD = ("failed", "torn", "nan", "negative", "huge")
work = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60)), min_size=3, max_size=3)
histories = st.lists(
    st.tuples(st.sampled_from(("ok", "ok", "restart", "renamed", *BAD)), work), min_size=1, max_size=20
)


@dataclass
class Engine:
    """The true counts of one engine, and what no reading contains of them."""

    counted: list[int] = field(default_factory=lambda: [0, 0, 0])  # queries, hits, hits in host memory
    queries: int = 0  # ever
    unseen: int = 0  # queries since the last good scrape
    lost: int = 0


def exposition(engines, started, *, hits):
    lines = [] if started is None else [f"process_start_time_seconds {started}"]
    for rank, engine in enumerate(engines):
        queries, device, host = engine.counted
        labels = f'engine="{rank}",model_name="tiny"'
        lines += [
            f"vllm:prefix_cache_queries_total{{{labels}}} {queries}",
            f"{hits}_total{{{labels}}} {device}",
            f"vllm:external_prefix_cache_hits_total{{{labels}}} {host}",
            f'vllm:prompt_tokens_cached_by_source_total{{{labels},source="device"}} {device}',
            f'vllm:prompt_tokens_cached_by_source_total{{{labels},source="host"}} {host}',
        ]
    return "\n".join(lines) + "\n"


def outcome_of(kind, text, number):
    if kind == "failed":
        return ScrapeFailure("connection refused")
    if kind == "torn":
        text = text[: max(len(text) * 2 // 3, 1)].rstrip("\n")
    elif kind in BAD:
        value = {"nan": "NaN", "negative": "-5", "huge": "1e300"}[kind]
        text += f'vllm:num_preemptions_total{{engine="0",model_name="tiny"}} {value}\n'
    try:
        return ScrapeResult(INTERVAL_S * number + 0.1, read_replica(text))
    except ExpositionError as error:
        return ScrapeFailure(str(error))


def play(history, count, *, has_start):
    """(engines, readings by rank) after a first scrape and the whole history."""
    engines, started = [Engine() for _ in range(count)], 1000.0
    state, raw_counters, readings = TargetState(), {}, [[] for _ in range(count)]
    for number, (kind, amounts) in enumerate([("ok", [(0, 0, 0)] * 3), *history]):
        if kind == "restart":
            started += 100
            for engine in engines:
                engine.lost, engine.unseen, engine.counted = engine.lost + engine.unseen, 0, [0, 0, 0]
        for engine, (queries, device, host) in zip(engines, amounts, strict=False):
            local = min(device, queries)
            added = (queries, local, min(host, queries - local))
            engine.counted = [before + more for before, more in zip(engine.counted, added, strict=True)]
            engine.queries, engine.unseen = engine.queries + queries, engine.unseen + queries
        hits = "vllm:kv_hits" if kind == "renamed" else "vllm:prefix_cache_hits"
        outcome = outcome_of(kind, exposition(engines, started if has_start else None, hits=hits), number)
        assert isinstance(outcome, ScrapeFailure) is (kind in BAD)
        merged = merge_replica(state, raw_counters, outcome, due_s=INTERVAL_S * number, interval_s=INTERVAL_S)
        state, raw_counters = merged.state, merged.raw_counters
        if kind not in BAD:
            for engine in engines:
                engine.unseen = 0
        for reading in merged.readings:
            if reading.key.engine:
                readings[int(reading.key.engine)].append(reading)
    return engines, readings


@settings(deadline=None, max_examples=60)
@given(history=histories, count=st.integers(1, 3))
def test_totals_are_exact_except_for_what_a_restart_loses(history, count):
    """H4, H8, H9, H10, H12, H15: rejected and failed scrapes lose no token, and tiers add up to the hits."""
    engines, readings = play(history, count, has_start=True)

    for engine, of_engine in zip(engines, readings, strict=True):
        counters = [reading.increase.counters for reading in of_engine]
        assert sum(counts.get("queries", 0) for counts in counters) == engine.queries - engine.lost - engine.unseen
        assert all(counts["device_tokens"] == counts["hits"] for counts in counters if "hits" in counts)
        assert all(counts["host_tokens"] == counts["external_hits"] for counts in counters if "external_hits" in counts)


@settings(deadline=None, max_examples=60)
@given(history=histories, count=st.integers(1, 3), has_start=st.booleans())
def test_no_count_is_negative_and_no_rate_above_one(history, count, has_start):
    """H3, H9, H14: also where restarts are hidden; hits under another name are unknown, not 0."""
    _, readings = play(history, count, has_start=has_start)

    for reading in (reading for of_engine in readings for reading in of_engine):
        counters = reading.increase.counters
        assert all(value >= 0 for value in counters.values())
        if "hits" in (reading.not_reported or ()):
            assert "hits" not in counters
        elif counters and has_start:
            rate = hit_rate_ratio(counters.get("queries"), counters.get("hits"), counters.get("external_hits"))
            assert rate is None or 0 <= rate <= 1
