"""Hits of each model of a replay, compared with simple caches, with samples, and across restarts."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.lab import replay as module
from telemetry.lab.breakdown import TERMS, Breakdown, breakdown_from
from telemetry.lab.chains import HASHES, Prompts, coded, depth_error
from telemetry.lab.replay import HORIZON_S, BinSums, Replay, StateError, dump, load
from tests.telemetry.lab.replaying import PlainCache, replayed
from tests.telemetry.lab.traces import HASH_TOKENS, Request, columns, request, sampled, traffic

REPLAYED = TERMS[:-1]
HASH_FACTOR = 0x9E37_79B9_7F4A_7C15


class PlainPlacement:
    """Chooses the replica with at least half of the prompt cached, else the one that was refilled least often."""

    def __init__(self, capacities: Iterable[int]) -> None:
        self.caches = [PlainCache(capacity) for capacity in capacities]
        self.written = [0.0] * len(self.caches)

    def place(self, blocks: list[int]) -> int:
        cached = [cache.match(blocks) for cache in self.caches]
        least, best = self.written.index(min(self.written)), max(cached)
        place = cached.index(best) if best >= len(blocks) / 2 and cached[least] < best else least
        self.caches[place].use(blocks)
        self.written[place] += (len(blocks) - cached[place]) / self.caches[place].capacity
        return best


class PlainUnboundedCache:
    """An unbounded cache that drops a block when two horizons began since its last use."""

    def __init__(self) -> None:
        self.began_s: list[float] = []
        self.used: dict[int, int] = {}

    def match(self, blocks: list[int], at_s: float) -> int:
        if not self.began_s or at_s >= self.began_s[-1] + HORIZON_S:
            self.began_s.append(at_s)
        now = len(self.began_s)
        found = next((at for at, block in enumerate(blocks) if self.used.get(block, -2) < now - 1), len(blocks))
        self.used |= dict.fromkeys(blocks, now)
        return found


def simulate(requests: list[Request], capacities: dict[str, int]) -> list[dict[str, int]]:
    """Cached blocks of each request in each model, one request after the other."""
    unbounded, whole, ideal = (
        PlainUnboundedCache(),
        PlainCache(sum(capacities.values())),
        PlainPlacement(capacities.values()),
    )
    each = {name: PlainCache(capacity) for name, capacity in capacities.items()}
    found = []
    for one in requests:
        cached = {name: cache.match(one.blocks) for name, cache in each.items()}
        terms = (whole.match(one.blocks), ideal.place(one.blocks), max(cached.values()), cached[one.replica])
        terms = (max(unbounded.match(one.blocks, one.at_s), *terms), *terms)
        found.append(dict(zip(REPLAYED, terms, strict=True)))
        for cache in (whole, each[one.replica]):
            cache.use(one.blocks)
    return found


@pytest.mark.parametrize("placed", ["session", "random"])
@pytest.mark.parametrize("capacity", [60, 400, 5000])
def test_every_term_equals_the_hits_of_simple_caches(placed, capacity):
    requests, capacities = traffic(1500, placed=placed), {f"r{number}": capacity for number in range(4)}
    plain = simulate(requests, capacities)
    bin_sums = BinSums()
    replay = Replay({name: HASH_TOKENS * capacity for name, capacity in capacities.items()})
    replay.use(columns([one._replace(block_tokens=HASH_TOKENS, group="") for one in requests]), bin_sums)
    for name in REPLAYED:
        assert getattr(bin_sums.sums[""], name) / HASH_TOKENS == sum(one[name] for one in plain), name


@st.composite
def histories(draw: st.DrawFn) -> list[list[Request]]:
    """Runs of few requests whose short prompts part and come back in every way; some wait for a horizon or more."""
    numbers: dict[tuple[int, ...], int] = {}
    at_s, runs = 0.0, []
    for _ in range(draw(st.integers(1, 3))):
        runs.append([])
        for _ in range(draw(st.integers(0, 12))):
            path = tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=6)))
            blocks = [numbers.setdefault(path[: end + 1], len(numbers)) for end in range(len(path))]
            at_s += draw(st.sampled_from([1, 1, 1, 1, HORIZON_S / 2, 3 * HORIZON_S]))
            replica = draw(st.sampled_from(["r0", "r1", "r2"]))
            runs[-1].append(
                request(
                    at_s, [HASH_FACTOR * block % HASHES for block in blocks], replica=replica, block_tokens=HASH_TOKENS
                )
            )
    return runs


@given(runs=histories(), capacities=st.lists(st.integers(1, 12), min_size=3, max_size=3))
@settings(max_examples=100, deadline=None)
def test_any_requests_have_the_hits_of_simple_caches_also_after_a_restart(runs, capacities):
    capacity = {f"r{number}": blocks for number, blocks in enumerate(capacities)}
    told = {name: HASH_TOKENS * blocks for name, blocks in capacity.items()}
    requests = [one for run in runs for one in run]
    found, replay = [], Replay(told)
    for run in runs:
        bin_sums = BinSums()
        replay.use(columns([one._replace(group=f"{number}") for number, one in enumerate(run)]), bin_sums)
        sums = [bin_sums.sums[f"{number}"] for number in range(len(run))]
        found += [{name: getattr(one, name) / HASH_TOKENS for name in REPLAYED} for one in sums]
        replay, _ = load(dump(replay, bin_sums))
        replay.resize(told)
    assert found == simulate(requests, capacity)


@pytest.mark.parametrize("seed", range(12))
def test_each_term_of_a_breakdown_is_at_most_the_one_above_it(seed):
    requests = traffic(600, seed=seed, replicas=1 + seed % 5, placed=("random", "session")[seed % 2])
    capacities = {f"r{number}": 20 * (1 + seed) ** 2 for number in range(1 + seed % 5)}
    breakdown = breakdown_from(replayed(requests, capacities), sample_ratio=1.0)
    terms = [tokens for name, tokens in breakdown.terms if name != "delivered"]
    assert terms == sorted(terms, reverse=True)
    assert breakdown.prompt_tokens >= terms[0]


@pytest.mark.parametrize("placed", ["session", "random"])
def test_every_term_of_sampled_blocks_is_within_its_standard_error(placed):
    requests = traffic(6000, placed=placed, sessions=600)
    capacities = {f"r{number}": 4000 for number in range(4)}
    whole = breakdown_from(replayed(requests, capacities), sample_ratio=1.0)
    for ratio in (0.5, 0.125, 0.0625):
        part = breakdown_from(replayed(sampled(requests, ratio), capacities), sample_ratio=ratio)
        check_terms(whole, part)


def check_terms(whole: Breakdown, part: Breakdown) -> None:
    for (name, known), (_, told) in zip(whole.terms, part.terms, strict=True):
        assert whole.ratio(told) == pytest.approx(whole.ratio(known), abs=0.025), name
    assert abs(part.predicted - whole.predicted) < 3 * part.standard_error_tokens < 0.15 * whole.prompt_tokens


def test_a_restored_replay_continues_like_the_original():
    requests, capacities = traffic(3000, placed="random"), {f"r{number}": 300 * HASH_TOKENS for number in range(4)}
    one = Replay(capacities)
    replayed(requests[:1500], None, one)
    bin_sums = BinSums()
    bin_sums.add_divergences(coded(["g", "g"]), np.array([5, 5], np.uint64), np.array([1.0, 2.0]))
    other, told = load(dump(one, bin_sums))
    other.resize(capacities)
    assert replayed(requests[1500:], None, one) == replayed(requests[1500:], None, other)
    assert [part.tolist() for part in told.divergences["g"]] == [[5], [3]]
    for bad in (b"", b"\x80", b"\x81\xa4form\x09"):
        with pytest.raises(StateError):
            load(bad)


def test_the_number_of_stored_blocks_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_ENTRIES", 500)
    replay, requests = Replay({f"r{number}": 5000 * HASH_TOKENS for number in range(4)}), traffic(2000, sessions=2000)
    for begin in range(0, 2000, 100):
        replayed(requests[begin : begin + 100], None, replay)
        assert len(replay.recent) + len(replay.previous) <= 500
        assert len(replay.fleet_cache) <= 500
        assert sum(map(len, replay.placed.values())) <= 500
        assert sum(map(len, replay.ideal.values())) <= 500
    assert replay.ratio < 0.1
    assert len(dump(replay, BinSums())) < 4 * 8 * 500 + 1000


def test_a_resized_fleet_keeps_the_blocks_that_still_fit():
    requests = traffic(2000)
    replay = Replay({f"r{number}": 500 * HASH_TOKENS for number in range(4)})
    replayed(requests[:1000], None, replay)
    replay.resize({f"r{number}": 100 * HASH_TOKENS for number in range(3)})
    assert replayed(requests[1000:], None, replay).predicted > 0  # r3 is removed and counts with the median capacity
    assert all(len(blocks) <= 100 for blocks in replay.placed.values())


def test_with_unknown_rooms_only_the_top_and_what_engines_said_are_known():
    breakdown = breakdown_from(replayed(traffic(500), None), sample_ratio=1.0, reason="r1 has not told its cache")
    assert [name for name, tokens in breakdown.terms if tokens is not None] == ["reachable", "delivered"]
    assert [loss.key for loss in breakdown.losses()] == ["workload"]


def test_what_nobody_reported_is_unknown_and_what_some_reported_counts_for_all():
    silent = [one._replace(prompt_tokens=None, cached_tokens=None) for one in traffic(200)]
    assert breakdown_from(replayed(silent, {"r0": 100}), sample_ratio=1).delivered is None
    breakdown = breakdown_from(replayed([*silent, *traffic(200)], {"r0": 100}), sample_ratio=1)
    assert breakdown.reported_ratio == pytest.approx(0.5, abs=0.01)
    assert breakdown.ratio(breakdown.delivered) == pytest.approx(0.5, abs=0.001)


def test_more_delivered_than_replayed_is_a_surplus_and_no_loss():
    breakdown = Breakdown(100.0, 80.0, 70.0, 65.0, 60.0, 50.0, 55.0, 1000, 1.0)
    assert [(loss.key, loss.tokens) for loss in breakdown.losses()] == [
        ("workload", 20),
        ("capacity", 10),
        ("fragmentation", 5),
        ("index", 5),
        ("load", 10),
        ("stale", 0),
    ]
    assert breakdown.surplus_ratio == 0.05


def test_prompts_are_never_hit_whole_and_short_ones_never_at_all():
    blocks = list(range(1, 5))
    sums = replayed([request(0, blocks), request(1, blocks), request(2, []), request(2, [])], {"r0": 100})
    assert sums.predicted == 256  # 276 tokens, of which whole blocks of the router's were compared
    exact = request(0, blocks, estimate_tokens=256, prompt_tokens=256)
    assert replayed([exact, exact], {"r0": 100}).predicted == 240  # 255 // 16 * 16 (H7)


@pytest.mark.parametrize("true_depth", [0, 1, 5, 40, 63, 64])
def test_a_depth_is_right_on_average_wherever_it_is(true_depth):
    chance, ratio, count = random.Random(true_depth), 0.125, 64
    rows = [[at for at in range(count) if chance.random() < ratio] for _ in range(20_000)]
    one = request(0, range(count), sample_ratio=ratio)
    requests = columns([one._replace(blocks=row, positions=row) for row in rows])
    matched = np.array([sum(at < true_depth for at in row) for row in rows])
    found = Prompts.of(requests, requests.estimates, ratio).depth(matched).tolist()
    spread = statistics.stdev(found)
    assert statistics.fmean(found) == pytest.approx(true_depth, abs=4 * spread / 20_000**0.5)
    assert spread < 1.3 * depth_error(ratio)


def test_routers_that_learn_another_number_of_tokens_a_block_change_nothing():
    requests = [
        one._replace(group="", prompt_tokens=None, cached_tokens=None) if number % 3 else one._replace(group="")
        for number, one in enumerate(traffic(400))
    ]
    changed = [one._replace(hash_tokens=96, estimate_tokens=one.estimate_tokens * 96 // 64) for one in requests[200:]]
    found = []
    for later in (requests[200:], changed):
        replay, bin_sums = Replay({f"r{number}": 200 * HASH_TOKENS for number in range(4)}), BinSums()
        for part in (requests[:200], later):
            replay.learn(columns(part), 1.0)
            replay.use(columns(part), bin_sums)
        sums = bin_sums.result(replay.ratio)[""]
        found.append([replay.capacity_blocks(10_000), *(getattr(sums, term) for term in REPLAYED)])

    assert found[1] == pytest.approx(found[0], rel=2e-3)


def mixed_text(count: int = 240) -> list[Request]:
    """Prompts of one pool in English, German and Russian. The router corrected its estimates by what it had learned.

    An eighth of each prompt is new. The estimate of a prompt is right, its block is the mean of all text.
    """
    rows = []
    for number in range(count):
        tokens, opening = ((53, 1), (80, 2), (250, 3))[number % 3]  # tokens of a block of this text
        blocks = [*range(100 * opening, 100 * opening + 35), *range(10_000 + 10 * number, 10_005 + 10 * number)]
        length = tokens * len(blocks)
        rows.append(request(number, blocks, estimate_tokens=length, prompt_tokens=length, hash_tokens=104))
    return rows


def test_reachable_of_texts_with_other_tokens_per_byte_is_that_of_an_unbounded_cache():
    rows = mixed_text()
    cached = sum(one.prompt_tokens * 7 / 8 for one in rows[3:])
    rows = [one._replace(cached_tokens=0) for one in rows]
    breakdown = breakdown_from(replayed(rows, None), sample_ratio=1.0, reason="sizes are unknown")
    assert breakdown.ratio(breakdown.reachable) == pytest.approx(cached / breakdown.prompt_tokens, abs=0.015)


def test_what_engines_delivered_could_be_reached():
    rows = [one._replace(cached_tokens=one.prompt_tokens - 1) for one in mixed_text()]
    sums = replayed(rows, None)
    breakdown = breakdown_from(sums, sample_ratio=1.0, reason="sizes are unknown")
    assert sums.reachable < sums.delivered
    assert breakdown.reachable == pytest.approx(breakdown.delivered)
    assert breakdown.losses()[0].ratio == pytest.approx(0.0, abs=0.001)


def test_a_corrected_estimate_and_its_blocks_give_the_length_of_the_prompt():
    exact = request(0, [1] * 10, estimate_tokens=1050, hash_tokens=100)  # ten and a half blocks
    corrected = exact._replace(estimate_tokens=2600)  # but not its blocks, as routers reported before
    assert columns([exact, corrected]).byte_blocks.tolist() == [10.5, 10.5]
