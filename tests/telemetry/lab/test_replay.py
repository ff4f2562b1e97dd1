"""What each model of a replay hits, against caches written down plainly, against samples, and across restarts."""

from __future__ import annotations

import random
import statistics
from collections import OrderedDict

import pytest

from telemetry.lab import replay as module
from telemetry.lab.chains import Request, depth, error
from telemetry.lab.ladder import Ladder, Sums, ladder_from, settled
from telemetry.lab.replay import Replay
from telemetry.lab.state import StateError, dump, load
from tests.telemetry.lab.traces import HASH_TOKENS, request, sampled, traffic


def replayed(requests: list[Request], rooms: dict[str, int] | None, replay: Replay | None = None) -> Sums:
    """The sums of these requests; ``rooms`` in blocks."""
    told = {name: blocks * HASH_TOKENS for name, blocks in rooms.items()} if rooms else None
    replay, sums = replay or Replay(told), Sums()
    for one in requests:
        replay.add(one, sums)
    return sums


class PlainCache:
    """LRU, one block at a time, tail first."""

    def __init__(self, room: float) -> None:
        self.room, self.held = room, OrderedDict()

    def match(self, blocks: list[int]) -> int:
        return next((at for at, block in enumerate(blocks) if block not in self.held), len(blocks))

    def use(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.held[block] = None
            self.held.move_to_end(block)
        while len(self.held) > self.room:
            self.held.popitem(last=False)


class PlainPlacement:
    """The replica that holds at least half of the prompt, else the one whose room was filled least often."""

    def __init__(self, replicas: int, room: int) -> None:
        self.caches, self.written = [PlainCache(room) for _ in range(replicas)], [0.0] * replicas

    def place(self, blocks: list[int]) -> int:
        held = [cache.match(blocks) for cache in self.caches]
        least, best = self.written.index(min(self.written)), max(held)
        place = held.index(best) if best >= len(blocks) / 2 and held[least] < best else least
        self.caches[place].use(blocks)
        self.written[place] += (len(blocks) - held[place]) / self.caches[place].room
        return best


@pytest.mark.parametrize("placed", ["session", "random"])
@pytest.mark.parametrize("room", [60, 400, 5000])
def test_every_term_is_what_plain_caches_hit(placed, room):
    requests = traffic(1500, placed=placed)
    rooms = {f"r{number}": room for number in range(4)}
    forever, whole = PlainCache(float("inf")), PlainCache(4 * room)
    each = {name: PlainCache(room) for name in rooms}
    ideal = PlainPlacement(4, room)
    blocks = dict.fromkeys(("reachable", "capacity", "split", "best", "predicted"), 0)
    for one in requests:
        held = {name: cache.match(one.blocks) for name, cache in each.items()}
        blocks["reachable"] += forever.match(one.blocks)
        blocks["capacity"] += whole.match(one.blocks)
        blocks["split"] += ideal.place(one.blocks)
        blocks["best"] += max(held.values())
        blocks["predicted"] += held[one.replica]
        for cache in (forever, whole, each[one.replica]):
            cache.use(one.blocks)

    sums = replayed([one._replace(block_tokens=HASH_TOKENS) for one in requests], rooms)

    assert {name: getattr(sums, name) / HASH_TOKENS for name in blocks} == pytest.approx(blocks)


@pytest.mark.parametrize("seed", range(12))
def test_no_step_of_a_ladder_goes_up(seed):
    requests = traffic(600, seed=seed, replicas=1 + seed % 5, placed=("random", "session")[seed % 2])
    rooms = {f"r{number}": 20 * (1 + seed) ** 2 for number in range(1 + seed % 5)}
    ladder = ladder_from(settled(replayed(requests, rooms)), sample_ratio=1.0)
    terms = [tokens for name, tokens in ladder.terms if name != "delivered"]
    assert terms == sorted(terms, reverse=True)
    assert ladder.prompt_tokens >= terms[0]


def test_placement_at_random_loses_what_placement_by_session_keeps():
    rooms = {f"r{number}": 3000 for number in range(4)}
    kept, lost = (
        {loss.key: loss.ratio for loss in ladder_from(settled(replayed(requests, rooms)), sample_ratio=1).losses()}
        for requests in (traffic(4000, placed="session"), traffic(4000, placed="random"))
    )
    assert lost["load"] > 0.2
    assert kept["load"] < 0.05
    assert lost["index"] > kept["index"]
    assert lost["workload"] == pytest.approx(kept["workload"], abs=0.1)


@pytest.mark.parametrize("ratio", [0.5, 0.125, 0.0625])
@pytest.mark.parametrize("placed", ["session", "random"])
def test_a_sample_of_the_blocks_tells_every_term_within_its_doubt(ratio, placed):
    requests = traffic(6000, placed=placed, sessions=600)
    rooms = {f"r{number}": 4000 for number in range(4)}
    whole = ladder_from(settled(replayed(requests, rooms)), sample_ratio=1.0)
    part = ladder_from(settled(replayed(sampled(requests, ratio), rooms), ratio), sample_ratio=ratio)
    for (name, known), (_, told) in zip(whole.terms, part.terms, strict=True):
        assert whole.ratio(told) == pytest.approx(whole.ratio(known), abs=0.025), name
    assert abs(part.predicted - whole.predicted) < 3 * part.doubt_tokens < 0.15 * whole.prompt_tokens


def test_short_openings_count_too_where_few_blocks_of_any_prompt_are_sampled():
    requests = traffic(6000, turn=(1, 4), longest=40, sessions=600)
    whole, part = (
        ladder_from(settled(replayed(one, {f"r{n}": 2000 for n in range(4)})), sample_ratio=1)
        for one in (requests, sampled(requests, 0.0625))
    )
    assert part.ratio(part.reachable) == pytest.approx(whole.ratio(whole.reachable), abs=0.02)


def test_a_replay_goes_on_in_another_worker_as_if_nothing_had_happened():
    requests, rooms = traffic(3000, placed="random"), {f"r{number}": 300 * HASH_TOKENS for number in range(4)}
    one = Replay(rooms)
    replayed(requests[:1500], None, one)
    other = load(dump(one), rooms)
    a, b = replayed(requests[1500:], None, one), replayed(requests[1500:], None, other)
    for name in ("reachable", "capacity", "best", "predicted"):
        assert getattr(a, name) == pytest.approx(getattr(b, name)), name
    assert a.split == pytest.approx(b.split, rel=0.05)  # where its placement stood is not kept
    for bad in (b"", b"\x80", b"\x81\xa4form\x09"):
        with pytest.raises(StateError):
            load(bad, rooms)


def test_what_is_remembered_is_bounded_whatever_comes(monkeypatch):
    monkeypatch.setattr(module, "MAX_ENTRIES", 500)
    replay = Replay({f"r{number}": 5000 * HASH_TOKENS for number in range(4)})
    for one in traffic(2000, sessions=2000):
        replay.add(one, Sums())
        assert len(replay.forever) <= 500
        assert len(replay.whole) <= 500
        assert sum(map(len, replay.placed.caches)) <= 500
        assert sum(map(len, replay.ideal.caches)) <= 500
    assert replay.ratio < 0.1
    assert len(dump(replay)) < (4 * 8 + 3 * 4) * 500 + 1000


def test_a_fleet_that_changes_keeps_what_still_fits():
    requests = traffic(2000)
    replay = Replay({f"r{number}": 500 * HASH_TOKENS for number in range(4)})
    replayed(requests[:1000], None, replay)
    replay.resize({f"r{number}": 100 * HASH_TOKENS for number in range(3)})
    assert all(len(replay.placed.caches[place]) <= 100 for place in range(3))
    assert replayed(requests[1000:], None, replay).predicted > 0  # r3 is gone and counts with a middling room


def test_with_unknown_rooms_only_the_top_and_what_engines_said_are_known():
    ladder = ladder_from(settled(replayed(traffic(500), None)), sample_ratio=1.0, reason="r1 has not told its cache")
    assert [name for name, tokens in ladder.terms if tokens is not None] == ["reachable", "delivered"]
    assert [loss.key for loss in ladder.losses()] == ["workload"]


def test_what_nobody_reported_is_unknown_and_what_some_reported_counts_for_all():
    silent = [one._replace(prompt_tokens=None, cached_tokens=None) for one in traffic(200)]
    assert ladder_from(replayed(silent, {"r0": 100}), sample_ratio=1).delivered is None
    ladder = ladder_from(replayed([*silent, *traffic(200)], {"r0": 100}), sample_ratio=1)
    assert ladder.reported_ratio == pytest.approx(0.5, abs=0.01)
    assert ladder.ratio(ladder.delivered) == pytest.approx(0.5, abs=0.001)


def test_more_delivered_than_replayed_is_a_surplus_and_no_loss():
    ladder = Ladder(100.0, 80.0, 70.0, 65.0, 60.0, 50.0, 55.0, 1000, 1.0)
    assert [(loss.key, loss.tokens) for loss in ladder.losses()] == [
        ("workload", 20),
        ("capacity", 10),
        ("fragmentation", 5),
        ("index", 5),
        ("load", 10),
        ("stale", 0),
    ]
    assert ladder.surplus_ratio == 0.05


def test_prompts_are_never_hit_whole_and_short_ones_never_at_all():
    blocks = list(range(1, 5))
    sums = replayed([request(0, blocks), request(1, blocks), request(2, []), request(2, [])], {"r0": 100})
    assert sums.predicted == 256  # 276 tokens, of which whole blocks of the router's were compared
    exact = request(0, blocks, estimate_tokens=256, prompt_tokens=256)
    assert replayed([exact, exact], {"r0": 100}).predicted == 240  # 255 // 16 * 16 (H7)


@pytest.mark.parametrize("true_depth", [0, 1, 5, 40, 63, 64])
def test_a_depth_is_right_on_average_wherever_it_is(true_depth):
    chance, ratio, count = random.Random(true_depth), 0.125, 64
    found = []
    for _ in range(20_000):
        positions = [at for at in range(count) if chance.random() < ratio]
        matched = sum(at < true_depth for at in positions)
        found.append(depth(positions, matched, count, ratio))
    spread = statistics.stdev(found)
    assert statistics.fmean(found) == pytest.approx(true_depth, abs=4 * spread / 20_000**0.5)
    assert spread < 1.3 * error(ratio)
