"""Tree of shared prefixes: nodes and their figures, filters and limits."""

from datetime import timedelta

import pytest

from controlplane.services.fleet.pools import create_pool
from telemetry.metrics.windows import Window
from telemetry.services.figures.overview import Subject
from telemetry.services.lab import decisions
from telemetry.services.lab.decisions import hottest_prefixes
from tests.telemetry.conftest import T0
from tests.telemetry.stored_decisions import a_router, decided

pytestmark = pytest.mark.django_db
HOUR = Window(T0 - timedelta(hours=1), T0 + timedelta(hours=1), 60)


def prompts(*chains, **changes):
    """A decision for each chain of blocks, one a second."""
    router = a_router()
    for seq, chain in enumerate(chains):
        decided(router, T0 + timedelta(seconds=seq), seq, blocks=list(chain), positions=None, **changes)


def shape(node):
    """(depth in blocks of 64 tokens, requests, children) of each child."""
    return [(child.depth_tokens // 64, child.requests, shape(child)) for child in node.children]


def test_shared_blocks_are_one_node_and_each_continuation_is_a_child():
    prompts((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4), (1, 2, 9), (1, 2, 9, 10), (7, 8))

    root = hottest_prefixes(Subject(), HOUR).root

    assert root.requests == 6
    assert shape(root) == [(2, 5, [(3, 3, [(4, 2, [])]), (3, 2, [])])]


def test_a_node_has_tokens_hit_rate_task_groups_and_replicas():
    router = a_router()
    for seq, (replica, group, cached) in enumerate([("a", "x", 900), ("a", "x", 500), ("b", "y", None)]):
        decided(
            router, T0 + timedelta(seconds=seq), seq, blocks=[1], positions=None, replica=replica, group=group,
            cached_tokens=cached,
        )  # fmt: skip

    (node,) = hottest_prefixes(Subject(), HOUR).root.children

    assert (node.tokens, node.reported_tokens, node.cached_tokens) == (3000, 2000, 1400)
    assert node.hit_rate_ratio == 0.7
    assert node.replica_shares == [("a", pytest.approx(2 / 3)), ("b", pytest.approx(1 / 3))]
    assert node.groups["y"] == 1


def test_the_tree_can_be_limited_to_a_subject_and_to_a_block():
    create_pool("chat")
    prompts((1, 2), (1, 2), (1, 3), (1, 3))
    other = a_router("router-2")
    decided(other, T0, 99, pool="other", blocks=[1, 2], positions=None)
    pool = create_pool("third", models=["third"])

    assert hottest_prefixes(Subject.of_pool(pool), HOUR).root.requests == 0
    below = hottest_prefixes(Subject(), HOUR, below=f"{2:016x}")
    assert below.root.requests == 3
    assert shape(below.root) == [(2, 3, [])]


def test_a_prompt_without_sampled_blocks_is_at_its_tier_1_prefix():
    prompts((), (), (), prefix=5)

    (node,) = hottest_prefixes(Subject(), HOUR).root.children

    assert (node.hash, node.requests, node.depth_tokens) == (f"{5:016x}", 3, 0)


def test_a_tree_is_built_from_a_bounded_evenly_spaced_number_of_requests(monkeypatch):
    monkeypatch.setattr(decisions, "MAX_TREE_REQUESTS", 10)
    prompts(*[(1, number) for number in range(2, 37)])

    tree = hottest_prefixes(Subject(), HOUR)

    assert tree.every == 4
    assert tree.root.requests == 9
