"""Every rule: what makes it speak, and what keeps it silent."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from controlplane.services.impact.warnings import RULES, warnings_of
from routing import schema

ACTIVE, DRAINING = schema.ReplicaState.ACTIVE, schema.ReplicaState.DRAINING
PREFIX, LOWEST = schema.PrefixHashSettings, schema.LowestCostSettings


def fleet(settings, *, replicas=4, states=(), weights=(), groups=(), blocks=16, **more):
    """Pool chat with replicas r0, r1, ... of known size."""
    held = tuple(
        schema.ReplicaConfig(
            f"r{number}",
            "http://10.0.0.1:80",
            state=states[number] if states else ACTIVE,
            weight=weights[number] if weights else 1.0,
            block_tokens=blocks,
            capacity_blocks=blocks and 1000,
        )
        for number in range(replicas)
    )
    pool = schema.PoolConfig("chat", schema.PolicyConfig("chat", 1, settings), replicas=held, groups=groups, **more)
    return schema.RouterConfig("0" * 32, (pool,))


def ids(config, group=None):
    return {warning.id for warning in warnings_of(config, "chat", group)}


def group(**fields):
    return (schema.TaskGroupConfig("agents", **fields),)


SPEAKS_AND_IS_SILENT = {
    "no-replica": (fleet(LOWEST(), replicas=0), fleet(LOWEST())),
    "none-active": (
        fleet(LOWEST(), replicas=2, states=(DRAINING, schema.ReplicaState.DISABLED)),
        fleet(LOWEST(), replicas=2, states=(DRAINING, ACTIVE)),
    ),
    "group-stranded": (
        fleet(LOWEST(), replicas=2, states=(DRAINING, ACTIVE), groups=group(replicas=("r0",))),
        fleet(LOWEST(), replicas=2, states=(DRAINING, ACTIVE), groups=group(replicas=("r0", "r1"))),
    ),
    "nothing-to-choose": (fleet(PREFIX(), replicas=1), fleet(schema.RandomSettings(), replicas=1)),
    "weights-ignored": (
        fleet(schema.LeastTtftSettings(), replicas=2, weights=(1.0, 2.0)),
        fleet(LOWEST(), replicas=2, weights=(1.0, 2.0)),
    ),
    "capacity-unknown": (fleet(LOWEST(), blocks=None), fleet(PREFIX(), blocks=None)),
    "no-room": (fleet(PREFIX(load_factor=1.0)), fleet(PREFIX(load_factor=1.25))),
    "never-full": (fleet(PREFIX(load_factor=4.0)), fleet(PREFIX(load_factor=3.9))),
    "never-bound": (
        fleet(PREFIX(min_bound=8), concurrency=schema.ConcurrencyConfig(max_running=8)),
        fleet(PREFIX(min_bound=8), concurrency=schema.ConcurrencyConfig(max_running=80)),
    ),
    "all-share": (fleet(schema.TieredSettings(replicas=4)), fleet(schema.TieredSettings(replicas=3))),
    "more-hot-than-replicas": (
        fleet(schema.AffinityGroupsSettings(hot_ratio=0.2)),
        fleet(schema.AffinityGroupsSettings(hot_ratio=0.25)),
    ),
    "boundary-below-block": (
        fleet(PREFIX(boundary=schema.Boundary.BYTES, boundary_bytes=500), blocks=128),
        fleet(PREFIX(boundary=schema.Boundary.BYTES, boundary_bytes=512), blocks=128),
    ),
    "no-marker": (
        fleet(PREFIX(boundary=schema.Boundary.MARKER)),
        fleet(PREFIX(boundary=schema.Boundary.MARKER, boundary_marker="---")),
    ),
    "boundary-not-asked": (
        fleet(PREFIX(boundary_bytes=2048), tier1=schema.Tier1()),
        fleet(PREFIX(), tier1=schema.Tier1()),
    ),
}


@pytest.mark.parametrize("rule", [rule.id for rule in RULES])
def test_a_rule_speaks_where_it_should_and_only_there(rule):
    wrong, right = SPEAKS_AND_IS_SILENT[rule]

    assert rule in ids(wrong)
    assert rule not in ids(right)


def test_every_warning_says_what_is_still_safe_and_what_to_do():
    for wrong, _ in SPEAKS_AND_IS_SILENT.values():
        for warning in warnings_of(wrong, "chat"):
            for words in (warning.text, warning.still_safe, warning.to_do):
                assert words[0].isupper(), words
                assert words.endswith("."), words
            settings = wrong.pools[0].policy.settings
            assert warning.field in {"", "strategy", *settings.__struct_fields__}


def test_a_sound_policy_is_met_with_silence():
    assert ids(fleet(LOWEST())) == set()
    assert ids(fleet(PREFIX())) == set()


def test_a_pools_policy_is_looked_at_for_the_groups_that_it_places_and_no_others():
    stranded = fleet(LOWEST(), replicas=2, states=(DRAINING, ACTIVE), groups=group(replicas=("r0",)))
    own = replace(stranded.pools[0].groups[0], policy=schema.PolicyConfig("chat.agents", 1, LOWEST()))
    apart = replace(stranded, pools=(replace(stranded.pools[0], groups=(own,)),))

    assert "group-stranded" in ids(stranded)
    assert "group-stranded" not in ids(apart)
    assert "group-stranded" in ids(apart, "agents")


def test_what_is_the_same_for_several_is_said_once():
    groups = (schema.TaskGroupConfig("a"), schema.TaskGroupConfig("b"))

    found = [warning.id for warning in warnings_of(fleet(LOWEST(), blocks=None, groups=groups), "chat")]

    assert found == ["capacity-unknown"]


def test_what_is_alike_for_several_is_told_of_one_and_counted():
    groups = tuple(schema.TaskGroupConfig(f"g{number}", replicas=(f"r{number}",)) for number in range(4))

    (warning,) = warnings_of(fleet(PREFIX(), groups=groups), "chat")

    assert warning.text == (
        "Requests of task group chat.g0 have one active replica, r0: there is nothing to choose. "
        "3 task groups more are like it."
    )
