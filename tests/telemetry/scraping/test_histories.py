"""What readings add up to, whatever a replica goes through between scrapes (R19, S8).

A replica with one to three engines behind one port, two memory tiers, with or without start times (several API servers
have none, H9), is scraped over and over. In between it serves, restarts, stays silent, tears its answer, says NaN or a
negative count, or has its hits under another name for a while. A model keeps the truth, and what must be lost of it.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.metrics.engine import read_replica
from telemetry.metrics.exposition import ExpositionError
from telemetry.metrics.rates import hit_rate_ratio
from telemetry.scraping.merge import ScrapeFailure, ScrapeResult, TargetState, merge_replica

INTERVAL_S = 10.0
BAD = ("silent", "torn", "nan", "negative", "huge")
served = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60)), min_size=3, max_size=3)
happenings = st.lists(
    st.tuples(st.sampled_from(("well", "well", "restart", "renamed", *BAD)), served), min_size=1, max_size=20
)


@dataclass
class Truth:
    """One engine: what it counted since it began, and what of that no reading has."""

    counted: list[int] = field(default_factory=lambda: [0, 0, 0])  # queries, hits, hits of host memory
    asked: int = 0  # queries ever
    unseen: int = 0  # queries since the last good scrape
    lost: int = 0


def text_of(truths, started, *, hits="vllm:prefix_cache_hits"):
    lines = [] if started is None else [f"process_start_time_seconds {started}"]
    for rank, truth in enumerate(truths):
        queries, device, host = truth.counted
        labels = f'engine="{rank}",model_name="tiny"'
        lines += [
            f"vllm:prefix_cache_queries_total{{{labels}}} {queries}",
            f"{hits}_total{{{labels}}} {device}",
            f"vllm:external_prefix_cache_hits_total{{{labels}}} {host}",
            f'vllm:prompt_tokens_cached_by_source_total{{{labels},source="device"}} {device}',
            f'vllm:prompt_tokens_cached_by_source_total{{{labels},source="host"}} {host}',
        ]
    return "\n".join(lines) + "\n"


def spoilt(what, text):
    if what == "torn":
        return text[: max(len(text) * 2 // 3, 1)].rstrip("\n")
    value = {"nan": "NaN", "negative": "-5", "huge": "1e300"}[what]
    return text + f'vllm:num_preemptions_total{{engine="0",model_name="tiny"}} {value}\n'


def answer(what, text, number):
    if what == "silent":
        return ScrapeFailure("nobody answered")
    try:
        return ScrapeResult(INTERVAL_S * number + 0.1, read_replica(text if what not in BAD else spoilt(what, text)))
    except ExpositionError as error:
        return ScrapeFailure(str(error))


def lived(happenings, engines, *, tells_start):
    """(the truth of each engine, its readings) after a first scrape and all that happened."""
    truths, started = [Truth() for _ in range(engines)], 1000.0
    condition, marks, readings = TargetState(), {}, {str(rank): [] for rank in range(engines)}
    for number, (what, work) in enumerate([("well", [(0, 0, 0)] * 3), *happenings]):
        if what == "restart":
            started += 100
            for truth in truths:
                truth.lost, truth.unseen, truth.counted = truth.lost + truth.unseen, 0, [0, 0, 0]
        for truth, (asked, device, host) in zip(truths, work, strict=False):
            local = min(device, asked)
            more = (asked, local, min(host, asked - local))
            truth.counted = [before + added for before, added in zip(truth.counted, more, strict=True)]
            truth.asked, truth.unseen = truth.asked + asked, truth.unseen + asked
        name = "vllm:kv_hits" if what == "renamed" else "vllm:prefix_cache_hits"
        text = text_of(truths, started if tells_start else None, hits=name)
        outcome = answer(what, text, number)
        assert isinstance(outcome, ScrapeFailure) is (what in BAD)
        folded = merge_replica(condition, marks, outcome, due_s=INTERVAL_S * number, interval_s=INTERVAL_S)
        condition, marks = folded.state, folded.raw_counters
        if what not in BAD:
            for truth in truths:
                truth.unseen = 0
        for reading in folded.readings:
            if reading.key.engine:
                readings[reading.key.engine].append(reading)
    return truths, readings


@settings(deadline=None, max_examples=150)
@given(happenings=happenings, engines=st.integers(1, 3))
def test_totals_are_the_truth_but_for_what_a_restart_took_with_it(happenings, engines):
    """R19, H8, H9, H10, H12, H15: refused, silent and torn scrapes cost no token; a restart what it hid."""
    truths, readings = lived(happenings, engines, tells_start=True)

    for rank, truth in enumerate(truths):
        counted = sum(reading.increase.counters.get("queries", 0) for reading in readings[str(rank)])
        assert counted == truth.asked - truth.lost - truth.unseen


@settings(deadline=None, max_examples=150)
@given(happenings=happenings, engines=st.integers(1, 3), tells_start=st.booleans())
def test_whatever_happens_no_count_is_negative_and_no_rate_above_one(happenings, engines, tells_start):
    """R19, H3, H9, H14: also where restarts hide, and while hits have another name they are unknown and not 0."""
    _, readings = lived(happenings, engines, tells_start=tells_start)

    for reading in (reading for of_engine in readings.values() for reading in of_engine):
        counters = reading.increase.counters
        assert all(value >= 0 for value in counters.values())
        if "hits" in (reading.not_reported or ()):
            assert "hits" not in counters
        elif counters and tells_start:
            rate = hit_rate_ratio(counters.get("queries"), counters.get("hits"), counters.get("external_hits"))
            assert rate is None or 0 <= rate <= 1


@settings(deadline=None, max_examples=80)
@given(happenings=happenings)
def test_tiers_add_up_to_the_hits_of_the_same_reading(happenings):
    """H4: device is local, host is external."""
    _, readings = lived(happenings, 1, tells_start=True)

    for reading in readings["0"]:
        counters = reading.increase.counters
        if "hits" in counters:
            assert counters["device_tokens"] == counters["hits"]
        if "external_hits" in counters:
            assert counters["host_tokens"] == counters["external_hits"]
