"""Texts of change impact, and warnings about drafts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from controlplane.services.impact.compare import compare_configs, with_policy
from controlplane.services.impact.effect import Impact, percent
from controlplane.services.impact.warnings import RULES, warnings_of
from routing import schema

ACTIVE, DRAINING, DISABLED = schema.ReplicaState
PREFIX, LOWEST, LEAST_TTFT = schema.PrefixHashSettings, schema.LowestCostSettings, schema.LeastTtftSettings
TIERED, AFFINITY, ROUND = schema.TieredSettings, schema.AffinityGroupsSettings, schema.RoundRobinSettings
BYTES, MESSAGES, MARKER = schema.Boundary.BYTES, schema.Boundary.MESSAGES, schema.Boundary.MARKER
COLD, MOVE, ACCESS, PLACEMENT, NONE = Impact
BOTH, PREFILL, DECODE = schema.ReplicaRole


def fleet(settings=None, *, revision=1, replicas=8, states=(), weights=(), groups=(), blocks=None, **pool_settings):
    """Pool chat with replicas r0, r1, ... and task groups."""
    rows = tuple(
        schema.ReplicaConfig(
            f"r{number}",
            f"http://10.0.0.1:{8000 + number}",
            state=states[number] if states else ACTIVE,
            weight=weights[number] if weights else 1.0,
            block_tokens=blocks,
            capacity_blocks=blocks and 1000,
        )
        for number in range(replicas)
    )
    policy = schema.PolicyConfig("chat", revision, settings or LOWEST())
    pool = schema.PoolConfig("chat", policy, replicas=rows, groups=groups, **pool_settings)
    return schema.RouterConfig("0" * 32, (pool,))


def group(name="agents", **settings):
    return schema.TaskGroupConfig(name, **settings)


def own_policy(name, settings):
    return group(name, policy=schema.PolicyConfig(f"chat.{name}", 1, settings))


def only_effect(before, after):
    (effect,) = compare_configs(before, after)
    return effect


def texts(before, after):
    return [effect.text for effect in compare_configs(before, after)]


# --- policies -------------------------------------------------------------------------------------------


def test_a_strategy_change_is_described_once_for_all_routes_that_it_places():
    groups = (group("a"), group("b"), own_policy("own", ROUND()))

    effect = only_effect(fleet(groups=groups), fleet(PREFIX(), groups=groups))

    assert effect.text == (
        "Requests of pool chat outside its task groups, and of task groups a and b, are placed by prefix_hash instead "
        "of lowest_cost: routers already track the cached blocks of the replicas, so no cache becomes cold."
    )
    assert (effect.impact, effect.moved_ratio) == (PLACEMENT, None)
    assert effect.affected == ("pool chat", "task group chat.a", "task group chat.b")
    assert (effect.before["strategy"], effect.after["strategy"]) == ("lowest_cost", "prefix_hash")


@pytest.mark.parametrize(
    ("before", "after", "impact", "text"),
    [
        (LOWEST(), LEAST_TTFT(), PLACEMENT, "no cache becomes cold"),
        (ROUND(), schema.RandomSettings(), PLACEMENT, "neither strategy keeps a prefix on one replica"),
        (ROUND(), LOWEST(), COLD, "start to estimate the cached blocks"),
        (PREFIX(), ROUND(), COLD, "about once in 8 requests"),
        (PREFIX(), schema.SessionAffinitySettings(), PLACEMENT, "no cache becomes cold"),
        (TIERED(), TIERED(replicas=3), MOVE, "3 replicas instead of 2: 33.3 % of conversations move"),
        (TIERED(replicas=8), TIERED(replicas=9), NONE, "the pool has no more"),
        (LOWEST(), LOWEST(alpha=1), PLACEMENT, "leave the replica that cached their prefix sooner"),
        (PREFIX(), PREFIX(slack_s=0.03), PLACEMENT, "up to 0.03 s of prefill longer than that saves, instead of 0.06"),
        (AFFINITY(), AFFINITY(hot_ratio=0.05), MOVE, "its own replicas from 5 % of the work on, instead of 10 %"),
        (
            PREFIX(),
            PREFIX(boundary=MESSAGES, boundary_messages=2),
            MOVE,
            "end after message 2 instead of after tools and system prompt, or after 1,024 bytes where those are short: "
            "all prefixes get new hashes, and 87.5 % of them another preferred replica",
        ),
        (PREFIX(), PREFIX(boundary_bytes=2048), MOVE, "only prompts whose tools and system prompt are short"),
        (PREFIX(), PREFIX(boundary_messages=3), NONE, "are not used"),
    ],
)
def test_a_policy_change_is_described_with_its_impact(before, after, impact, text):
    effect = only_effect(fleet(before), fleet(after, revision=2))

    assert text in effect.text
    assert effect.impact is impact


def test_cached_blocks_are_known_where_another_policy_of_the_pool_tracks_them():
    groups = (own_policy("own", LOWEST()),)

    effect = only_effect(fleet(PREFIX(), groups=groups), fleet(LOWEST(), groups=groups))

    assert "already track the cached blocks" in effect.text


def test_a_canary_is_described_from_start_to_end():
    def with_canary(canary, revision=1, settings=None):
        policy = schema.PolicyConfig("chat", revision, settings or LOWEST(), canary)
        return with_policy(fleet(settings), policy, pool="chat", group=None)

    tenth, half = (schema.Canary(2, PREFIX(), share=share, routers=("router-1",)) for share in (0.1, 0.5))

    assert texts(with_canary(None), with_canary(tenth)) == [
        "Revision 2 (prefix_hash) of policy chat is a canary for 10 % of prefixes on router router-1."
    ]
    assert "50 % of prefixes on router router-1, previously for 10 %" in texts(with_canary(tenth), with_canary(half))[0]
    assert "Revision 2 of policy chat is no longer a canary" in texts(with_canary(half), with_canary(None))[0]
    promoted = texts(with_canary(half), with_canary(None, 2, PREFIX()))
    assert "Revision 2 of policy chat becomes active for all requests." in promoted


def test_a_policy_change_of_a_pool_named_canary_is_no_change_of_a_canary():
    before, after = (
        replace(config, pools=(replace(config.pools[0], name="canary"),)) for config in (fleet(), fleet(PREFIX()))
    )

    assert "Requests of pool canary are placed by prefix_hash" in only_effect(before, after).text


def test_a_revision_with_the_same_settings_moves_nothing():
    before = fleet()
    after = with_policy(before, schema.PolicyConfig("chat", 7, LOWEST()), pool="chat", group=None)
    assert texts(before, after) == [
        "Revision 7 of policy chat has the same settings as before: no request is placed differently."
    ]

    before = fleet(groups=(group("a"),))
    own = with_policy(before, schema.PolicyConfig("chat.a", 1, LOWEST()), pool="chat", group="a")
    assert "the same settings as policy chat: no request is placed differently" in only_effect(before, own).text
    assert "the pool's policy has the same settings, so no prefix moves" in only_effect(own, before).text


# --- the fleet ------------------------------------------------------------------------------------------


def test_a_smaller_subset_of_replicas_keeps_what_is_cached_there():
    effect = only_effect(fleet(PREFIX(), groups=(group(),)), fleet(PREFIX(), groups=(group(replicas=("r0", "r1")),)))

    assert effect.text == (
        "Task group agents of pool chat may use 2 replicas (r0 and r1) instead of all 8 replicas: 75 % of its prefixes "
        "move."
    )
    assert effect.moved_ratio == pytest.approx(3 / 4)


def test_replicas_that_join_and_leave_move_their_share():
    left = only_effect(fleet(PREFIX()), fleet(PREFIX(), replicas=7))
    assert left.text == ("Replica r7 leaves the ring: 12.5 % of prefixes move to the next replica in ring order.")
    assert (left.kind, left.moved_ratio) == ("replica_left", pytest.approx(1 / 8))
    joined = only_effect(fleet(PREFIX(), replicas=0), fleet(PREFIX(), replicas=1))
    assert joined.text.startswith("Replica r0 joins the ring: 100 % of prefixes move to it")
    draining = fleet(PREFIX(), replicas=2, states=(ACTIVE, DRAINING))
    assert only_effect(draining, fleet(PREFIX(), replicas=1)).text == "Inactive replica r1 is removed: no prefix moves."


@pytest.mark.parametrize(
    ("changes", "impact", "text"),
    [
        ({"state": DRAINING}, MOVE, "25 % of prefixes move to the next replica in ring order until it is active again"),
        ({"weight": 3.0}, MOVE, "is 3 instead of 1: it gets 50 % of prefixes, previously 25 %"),
        ({"url": "http://10.0.0.9:8000"}, PLACEMENT, "The replica keeps its ring position; its cache may be cold."),
        ({"capacity_blocks": 1000}, PLACEMENT, "Replica r0 of pool chat: capacity_blocks is 1,000 instead of none"),
        ({"api_key": "secret-of-gpu"}, ACCESS, "Replica r0 of pool chat: api_key is *** instead of none"),
        ({"data_parallel_size": 2}, MOVE, "ranks of replica r0 is 2 instead of 1"),
        ({"role": PREFILL}, MOVE, "it only prefills long prompts, and 25 % of prefixes move to other replicas."),
        (
            {"role": DECODE},
            PLACEMENT,
            "Replica r0 has the role decode instead of both: it gets the same requests as before.",
        ),
    ],
)
def test_a_replica_change_is_described_with_its_impact(changes, impact, text):
    before = fleet(PREFIX(), replicas=4)
    pool = before.pools[0]
    after = replace(before, pools=(replace(pool, replicas=(replace(pool.replicas[0], **changes), *pool.replicas[1:])),))

    effect = only_effect(before, after)

    assert text in effect.text
    assert effect.impact is impact


def test_kv_events_are_described_by_what_routers_know_then():
    def following(events, settings=None):
        before = fleet(settings, replicas=1)
        pool = before.pools[0]
        return replace(before, pools=(replace(pool, replicas=(replace(pool.replicas[0], kv_events=events),)),))

    events = schema.KvEvents("tcp://gpu-1:5557")
    moved = replace(events, endpoint="tcp://gpu-2:5557")
    start = only_effect(following(None), following(events))
    assert start.text.startswith(
        "Routers follow the KV events of replica r0 at tcp://gpu-1:5557: its cached blocks are known"
    )
    assert (start.kind, start.impact, start.moved_ratio) == ("replica_kv_events", PLACEMENT, 0.0)
    assert "at tcp://gpu-2:5557" in only_effect(following(events), following(moved)).text
    end = only_effect(following(events), following(None))
    assert end.text == "Routers no longer follow the KV events of replica r0: its cached blocks are estimated."
    unused = only_effect(following(None, ROUND()), following(events, ROUND()))
    assert unused.impact is NONE
    assert unused.text.startswith("No policy of pool chat compares cached prefixes")


def with_roles(*roles, **options):
    """Pool chat with replicas of these roles."""
    whole = fleet(PREFIX(), replicas=len(roles), **options)
    (pool,) = whole.pools
    members = tuple(replace(replica, role=role) for replica, role in zip(pool.replicas, roles, strict=True))
    return replace(whole, pools=(replace(pool, replicas=members),))


def test_changes_of_prefill_replicas_move_no_prefixes():
    two = with_roles(DECODE, PREFILL)
    assert texts(with_roles(DECODE), two) == ["Prefill replica r1 joins: it prefills long prompts of the pool."]
    assert texts(two, with_roles(DECODE)) == [
        "Prefill replica r1 leaves: it no longer prefills long prompts of the pool."
    ]
    drained = only_effect(two, with_roles(DECODE, PREFILL, states=(ACTIVE, DRAINING)))
    assert drained.text == "Prefill replica r1 is draining: it no longer prefills long prompts of the pool."
    assert (drained.impact, drained.moved_ratio) == (PLACEMENT, 0.0)
    returned = only_effect(two, with_roles(DECODE, BOTH))
    assert returned.text == (
        "Replica r1 has the role both instead of prefill: it no longer prefills prompts for other replicas, and "
        "50 % of prefixes move to it."
    )
    assert returned.impact is MOVE


def test_a_pool_whose_active_replicas_only_prefill_serves_nothing():
    config = with_roles(DECODE, PREFILL, states=(DRAINING, ACTIVE))
    assert "no-active-replica" in warning_ids(config)


def test_access_is_described_without_the_secret():
    def with_keys(*names, digest="1"):
        keys = tuple(schema.ApiKey(name, digest * 63 + str(number)) for number, name in enumerate(names))
        return replace(fleet(), access=schema.Access(keys))

    assert texts(fleet(), with_keys("ci")) == ["Requests need an API key (1 configured); others are rejected with 401."]
    assert texts(with_keys("ci"), with_keys("ci", "web")) == ["API key web is now accepted."]
    assert "API key web is no longer accepted" in texts(with_keys("ci", "web"), with_keys("ci"))[0]
    assert "API key ci has a new secret" in texts(with_keys("ci"), with_keys("ci", digest="2"))[0]


def test_models_are_described_by_name():
    before, after = fleet(models=("llama", "qwen")), fleet(models=("llama", "mistral"))

    effect = only_effect(before, after)

    assert effect.text.startswith("Pool chat: models is llama and mistral instead of llama and qwen.")
    assert effect.impact is ACCESS


def test_a_new_hash_secret_makes_every_cache_cold():
    effect = only_effect(fleet(), replace(fleet(), hash_secret="1" * 32))

    assert effect.impact is COLD
    assert effect.text.endswith("every cache starts cold. Prefix hashes in earlier records no longer match.")
    assert "1111" not in effect.text


def test_the_most_severe_effect_is_first():
    after = replace(fleet(PREFIX(), replicas=9), limits=schema.Limits(retries=3))

    assert [effect.impact for effect in compare_configs(fleet(ROUND()), after)] == [COLD, MOVE, PLACEMENT]


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.125, "12.5 %"), (1 / 3, "33.3 %"), (0.004, "less than 1 %"), (1.0, "100 %"), (0.0, "0 %")]
)
def test_percentages(ratio, text):
    assert percent(ratio) == text


# --- warnings -------------------------------------------------------------------------------------------


def fleet_to_check(settings=None, *, replicas=4, blocks=16, **pool_settings):
    return fleet(settings, replicas=replicas, blocks=blocks, **pool_settings)


def warning_ids(config, task_group=None):
    return {warning.id for warning in warnings_of(config, "chat", task_group)}


CASES = {  # rule: a configuration with the mistake, and one without it
    "no-replica": (fleet_to_check(replicas=0), fleet_to_check()),
    "no-active-replica": (
        fleet_to_check(replicas=2, states=(DRAINING, DISABLED)),
        fleet_to_check(replicas=2, states=(DRAINING, ACTIVE)),
    ),
    "no-active-group-replica": (
        fleet_to_check(replicas=2, states=(DRAINING, ACTIVE), groups=(group(replicas=("r0",)),)),
        fleet_to_check(replicas=2, states=(DRAINING, ACTIVE), groups=(group(replicas=("r0", "r1")),)),
    ),
    "only-one-replica": (fleet_to_check(PREFIX(), replicas=1), fleet_to_check(schema.RandomSettings(), replicas=1)),
    "weights-ignored": (
        fleet_to_check(LEAST_TTFT(), replicas=2, weights=(1.0, 2.0)),
        fleet_to_check(LOWEST(), replicas=2, weights=(1.0, 2.0)),
    ),
    "capacity-unknown": (fleet_to_check(blocks=None), fleet_to_check(ROUND(), blocks=None)),
    "prefixes-on-all-replicas": (fleet_to_check(TIERED(replicas=4)), fleet_to_check(TIERED(replicas=3))),
    "hot-ratio-too-low": (fleet_to_check(AFFINITY(hot_ratio=0.2)), fleet_to_check(AFFINITY(hot_ratio=0.25))),
    "prefix-shorter-than-block": (
        fleet_to_check(PREFIX(boundary=BYTES, boundary_bytes=500), blocks=128),
        fleet_to_check(PREFIX(boundary=BYTES, boundary_bytes=512), blocks=128),
    ),
    "boundary-marker-missing": (
        fleet_to_check(PREFIX(boundary=MARKER)),
        fleet_to_check(PREFIX(boundary=MARKER, boundary_marker="---")),
    ),
    "boundary-overridden": (
        fleet_to_check(PREFIX(boundary_bytes=2048), tier1=schema.Tier1()),
        fleet_to_check(PREFIX(), tier1=schema.Tier1()),
    ),
}


@pytest.mark.parametrize("rule", [rule.id for rule in RULES])
def test_a_rule_warns_only_where_it_should(rule):
    wrong, right = CASES[rule]

    (warning,) = (warning for warning in warnings_of(wrong, "chat") if warning.id == rule)
    assert rule not in warning_ids(right)
    for text in (warning.text, warning.unaffected, warning.to_do):
        assert text[0].isupper(), text
        assert text.endswith("."), text
    assert warning.field in {"", "strategy", *wrong.pools[0].policy.settings.__struct_fields__}


@pytest.mark.parametrize("settings", [LOWEST(), PREFIX()])
def test_a_good_policy_has_no_warnings(settings):
    assert warning_ids(fleet_to_check(settings)) == set()


def test_a_pools_policy_is_checked_for_the_groups_that_it_places():
    stranded = fleet_to_check(replicas=2, states=(DRAINING, ACTIVE), groups=(group(replicas=("r0",)),))
    own_group = replace(stranded.pools[0].groups[0], policy=schema.PolicyConfig("chat.agents", 1, LOWEST()))
    with_own_policy = replace(stranded, pools=(replace(stranded.pools[0], groups=(own_group,)),))

    assert "no-active-group-replica" in warning_ids(stranded)
    assert "no-active-group-replica" not in warning_ids(with_own_policy)
    assert "no-active-group-replica" in warning_ids(with_own_policy, "agents")


def test_similar_warnings_of_several_groups_are_merged():
    groups = tuple(group(f"g{number}", replicas=(f"r{number}",)) for number in range(4))

    (warning,) = warnings_of(fleet_to_check(PREFIX(), groups=groups), "chat")

    assert warning.text == (
        "Requests of task group chat.g0 have only one active replica, r0. The same applies to 3 other task groups."
    )
    same = fleet_to_check(LOWEST(), blocks=None, groups=(group("a"), group("b")))
    assert [warning.id for warning in warnings_of(same, "chat")] == ["capacity-unknown"]
