"""Empty and tiny inputs: prompts shorter than a block, no prompts, no caches, caches of one block, idle pools."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.lab.breakdown import TERMS, Sums, breakdown_from, caveats, summary
from telemetry.lab.cache_grid import CacheGrid
from telemetry.lab.caches import Chains, best_of, place_ideally, run_lru, unbounded
from telemetry.lab.chains import HASHES, Requests
from telemetry.lab.prefix_tree import RequestPath, build_tree
from telemetry.lab.replay import HORIZON_S, BinSums, Replay
from telemetry.lint.differences import compare
from telemetry.lint.findings import describe, lint
from telemetry.lint.structure import PromptStructure
from tests.telemetry.lab.traces import HASH_TOKENS, Request, columns, request

NAMES = ("", "a", "b")
BLOCKS = st.integers(0, HASHES - 1)
IN_SAMPLE, OUT_OF_SAMPLE = 3, HASHES - 1
TOKENS = st.one_of(st.none(), st.integers(0, 40))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A request of 0 to 3 known blocks; every reported number may be missing or 0."""
    known = draw(st.lists(st.sampled_from((1, 2, IN_SAMPLE, OUT_OF_SAMPLE)), max_size=3, unique=True))
    beyond = draw(st.integers(0, 2))
    return Request(
        draw(st.sampled_from((0.0, 1.0, HORIZON_S, 5 * HORIZON_S))),
        draw(st.sampled_from(NAMES)),
        draw(st.sampled_from(("r0", "r1", "gone"))),
        known,
        None if not beyond else list(range(len(known))),
        len(known) + beyond,
        draw(st.sampled_from((1.0, 0.5, 2.0**-20))),
        draw(st.integers(1, 64)),
        draw(st.integers(0, 200)),
        draw(TOKENS),
        draw(TOKENS),
        draw(st.one_of(st.none(), st.integers(0, 16))),
    )


def in_order_of_time(some: list[Request]) -> Requests:
    return columns(sorted(some, key=lambda one: one.at_s))


def numbered(prompts: list[list[int]]) -> Chains:
    blocks = np.array([block for prompt in prompts for block in prompt], np.int64)
    return Chains(blocks, np.cumsum([len(prompt) for prompt in prompts], dtype=np.int64))


EMPTY = np.empty(0, np.int64)
CHAINED = ((0,), (0, 1), (0, 1, 2), (0, 3), (4,))  # a block stands for all that comes before it
PROMPTS = st.lists(st.sampled_from(CHAINED).map(lambda prompt: list(reversed(prompt))), max_size=3)


@pytest.mark.parametrize("rooms", [None, {"r0": 640, "r1": 640}], ids=["unknown rooms", "known rooms"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_prompt_shorter_than_a_block_reuses_nothing_and_stops_nothing(rooms, ratio):
    replay, tally = Replay(rooms, ratio), BinSums()
    short = request(0.0, [])

    replay.use(columns([short]), tally)
    replay.use(columns([request(1.0, [1, 2]), short]), tally)
    replay.use(columns([request(2.0, [1, 2])]), tally)

    sums = tally.result(replay.ratio)[""]
    assert sums.requests == 4
    assert sums.reachable == pytest.approx(2 * HASH_TOKENS + 16, abs=HASH_TOKENS)


def assert_breakdown_is_whole(sums: Sums, ratio: float) -> None:
    breakdown = breakdown_from(sums, sample_ratio=ratio)
    assert summary(breakdown)
    assert isinstance(caveats(breakdown), list)
    for loss in breakdown.losses():
        assert 0 <= loss.tokens <= breakdown.prompt_tokens


@given(st.builds(Sums, **dict.fromkeys(("requests", "reported_requests"), st.integers(0, 2)),
                 **dict.fromkeys(("prompt_tokens", "reported_tokens", "sampling_error", *TERMS), st.floats(0, 9))),
       st.sampled_from((1.0, 0.5, 2.0**-20)))  # fmt: skip
def test_a_breakdown_takes_any_sums(sums, ratio):
    assert_breakdown_is_whole(sums, ratio)


def test_an_idle_pool_keeps_its_rate_of_tokens():
    replay = Replay({"r0": 640})
    replay.learn(columns([request(0.0, [1], prompt_tokens=168, estimate_tokens=84)]), 1)
    for _ in range(90):
        replay.learn(columns([]), 24 * 60)
    assert replay.block_tokens == pytest.approx(128.0)
    assert replay.capacity_blocks(1280) == 10


@given(PROMPTS, PROMPTS, st.sampled_from((1, 2, 9)))
def test_caches_take_any_prompts(earlier, prompts, room):
    chains = numbered(prompts)
    matched, before = unbounded((EMPTY, EMPTY), numbered(earlier), np.zeros(len(earlier), np.int64))
    assert len(matched) == len(earlier)
    matched, _ = unbounded(before, chains, np.zeros(len(prompts), np.int64))
    assert ((matched >= 0) & (matched <= chains.lengths)).all()
    one = run_lru(run_lru(EMPTY, numbered(earlier), room).content, chains, room)
    assert len(one.content) <= room
    assert len(best_of([(np.arange(len(prompts)), one)], len(prompts))) == len(prompts)
    placed = place_ideally([one.content, EMPTY], [room, room], [0.0, 0.0], chains)
    assert len(placed.best) == len(prompts)
    assert all(len(blocks) <= room for blocks in placed.contents)


@given(
    st.lists(requests(), max_size=3),
    st.dictionaries(st.sampled_from(("r0", "r1", "r2")), st.sampled_from((1, 64, 10_000))),
    st.sampled_from((0, 1)),
)
def test_a_cache_grid_takes_any_requests(some, rooms, warm):
    grid = CacheGrid(in_order_of_time(some), rooms, warm=warm, most_blocks=100)
    assert all(math.isfinite(point.shared) for point in grid.points())
    assert (grid.placements(), grid.working_set()) == (None, None)


PASSAGES = st.builds(
    RequestPath,
    st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), max_size=3).map(tuple),
    st.sampled_from(NAMES), st.sampled_from(NAMES), st.integers(0, 3), TOKENS, TOKENS,
)  # fmt: skip


@given(st.lists(PASSAGES, max_size=4))
def test_a_prefix_tree_takes_any_prompts(passages):
    root = build_tree(passages)
    assert root.requests == len(passages)
    assert sum(child.requests for child in root.children) <= len(passages)
    assert [node.replica_shares for node in (root, *root.children)]
    assert root.hit_rate_ratio is None or root.hit_rate_ratio >= 0


HASHED = st.sampled_from(("1", "2"))
SMALL = st.integers(0, 3)


def listed(**fields: Any) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(st.fixed_dictionaries(fields), max_size=3)


OPENINGS = st.fixed_dictionaries(
    {
        "bytes": SMALL,
        "messages": SMALL,
        "session": st.none(),
        "tools": st.one_of(st.none(), st.fixed_dictionaries(dict.fromkeys(("names", "definitions", "sent"), HASHED))),
        "segments": listed(
            kind=st.sampled_from(("system", "user")), at=SMALL, bytes=SMALL, hash=HASHED, letters=HASHED
        ),
        "pieces": st.lists(st.tuples(SMALL, SMALL, HASHED), max_size=3),
        "volatile": listed(kind=st.sampled_from(("date", "number", "new")), at=SMALL, bytes=SMALL, hash=HASHED),
    }
)


@given(st.lists(OPENINGS, max_size=4), st.sampled_from((None, 0.0, 1.0)))
@settings(max_examples=80, deadline=None)
def test_lint_takes_any_openings_that_a_router_may_send(documents, rate):
    openings = [opening for document in documents if (opening := PromptStructure.read(document)) is not None]
    assert isinstance(lint(openings, rate), list)
    for one in openings:
        for other in openings:
            difference = compare(one, other)
            assert difference is None or describe(difference)
