"""Valid and invalid canaries in a configuration."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from routing.schema import (
    Canary,
    ConfigError,
    LowestCostSettings,
    PolicyConfig,
    RandomSettings,
    RouterConfig,
    TaskGroupConfig,
    dump_snapshot,
    load_snapshot,
)
from tests.routing.building import config, pool

OWN = PolicyConfig(name="own", revision=2, settings=RandomSettings())
GROUPS = (TaskGroupConfig(name="coding"), TaskGroupConfig(name="batch", policy=OWN))


def canary(**fields: Any) -> Canary:
    return Canary(**{"revision": 9, "settings": LowestCostSettings(), **fields})


def in_pool(tested: Canary) -> RouterConfig:
    whole = pool(groups=GROUPS)
    return config(replace(whole, policy=replace(whole.policy, canary=tested)))


def in_group(tested: Canary) -> RouterConfig:
    return config(pool(groups=(GROUPS[0], replace(GROUPS[1], policy=replace(OWN, canary=tested)))))


@pytest.mark.parametrize(
    "tested",
    [
        canary(),
        canary(revision=1),  # an earlier revision may be a canary
        canary(share=0.001),
        canary(routers=("router-1", "router-2")),
        canary(groups=("coding",)),
    ],
    ids=repr,
)
def test_a_canary_round_trips(tested: Canary) -> None:
    written = dump_snapshot(in_pool(tested), 1)

    assert load_snapshot(written.document).config.pools[0].policy.canary == tested


@pytest.mark.parametrize(
    ("snapshot", "path", "reason"),
    [
        (in_pool(canary(revision=3)), "$.pools[0].policy.canary.revision", "revision 3 is active"),
        (in_group(canary(revision=2)), "$.pools[0].groups[1].policy.canary.revision", "revision 2 is active"),
        (in_pool(canary(revision=0)), "$.pools[0].policy.canary.revision", ">= 1"),
        (in_pool(canary(share=0.0)), "$.pools[0].policy.canary.share", "> 0"),
        (in_pool(canary(share=1.01)), "$.pools[0].policy.canary.share", "<= 1"),
        (in_pool(canary(routers=())), "$.pools[0].policy.canary.routers", "null for all"),
        (in_pool(canary(routers=("Router 1",))), "$.pools[0].policy.canary.routers[0]", "regex"),
        (in_pool(canary(groups=())), "$.pools[0].policy.canary.groups", "null for all"),
        (in_pool(canary(groups=("coding", "nobody"))), "$.pools[0].policy.canary.groups[1]", "'nobody'"),
        (in_pool(canary(groups=("batch",))), "$.pools[0].policy.canary.groups[0]", "its own policy"),
        (in_group(canary(groups=("batch",))), "$.pools[0].groups[1].policy.canary.groups", "only a pool's policy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_canary_is_rejected_with_its_path(snapshot: RouterConfig, path: str, reason: str) -> None:
    with pytest.raises(ConfigError) as rejection:
        dump_snapshot(snapshot, 1)

    assert rejection.value.path.replace("[...]", "[0]") == path
    assert reason in rejection.value.reason
