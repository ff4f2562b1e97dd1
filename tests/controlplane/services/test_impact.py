"""What a change is said to do, and warnings about drafts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from controlplane.services.impact import Impact, compare_configs, warnings_of, with_policy
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


def test_a_strategy_change_names_all_routes_that_it_places():
    groups = (group("a"), group("b"), own_policy("own", ROUND()))

    effect = only_effect(fleet(groups=groups), fleet(PREFIX(), groups=groups, revision=2))

    assert effect.text == "Requests of pool chat are placed by prefix_hash instead of lowest_cost."
    assert (effect.impact, effect.moved_ratio) == (PLACEMENT, None)
    assert effect.affected == ("pool chat", "task group chat.a", "task group chat.b")
    assert (effect.before["strategy"], effect.after["strategy"]) == ("lowest_cost", "prefix_hash")


@pytest.mark.parametrize(
    ("before", "after", "impact", "moved", "text"),
    [
        (LOWEST(), LEAST_TTFT(), PLACEMENT, None, "least_ttft instead of lowest_cost"),
        (ROUND(), schema.RandomSettings(), PLACEMENT, None, "random instead of round_robin"),
        (ROUND(), LOWEST(), COLD, None, "lowest_cost instead of round_robin"),
        (PREFIX(), ROUND(), COLD, 7 / 8, "round_robin instead of prefix_hash"),
        (TIERED(), TIERED(replicas=3), MOVE, 1 / 3, "replicas is 3 instead of 2"),
        (TIERED(replicas=8), TIERED(replicas=9), NONE, 0.0, "replicas is 9 instead of 8"),
        (LOWEST(), LOWEST(alpha=1), PLACEMENT, None, "alpha is 1 instead of"),
        (PREFIX(), PREFIX(slack_s=0.03), PLACEMENT, None, "slack_s is 0.03 instead of 0.06 seconds."),
        (AFFINITY(), AFFINITY(hot_ratio=0.05), MOVE, None, "hot_ratio is 0.05 instead of 0.1"),
        (PREFIX(), PREFIX(boundary=BYTES), MOVE, 7 / 8, "boundary is bytes instead of auto"),
        (PREFIX(), PREFIX(boundary_bytes=2048), MOVE, None, "boundary_bytes is 2,048 instead of 1,024 bytes."),
        (PREFIX(), PREFIX(boundary_messages=3), NONE, 0.0, "It is not used."),
    ],
)
def test_a_policy_change_has_an_impact_and_a_share_that_moves(before, after, impact, moved, text):
    effect = only_effect(fleet(before), fleet(after, revision=2))

    assert text in effect.text
    assert (effect.impact, effect.moved_ratio) == (impact, moved if moved is None else pytest.approx(moved))


def test_caches_stay_warm_where_another_policy_of_the_pool_compares_them():
    groups = (own_policy("own", LOWEST()),)

    assert only_effect(fleet(ROUND(), groups=groups), fleet(LOWEST(), groups=groups)).impact is PLACEMENT


def test_a_canary_is_described_from_start_to_end():
    def with_canary(canary, revision=1, settings=None):
        policy = schema.PolicyConfig("chat", revision, settings or LOWEST(), canary)
        return with_policy(fleet(settings), policy, pool="chat", group=None)

    tenth, half = (schema.Canary(2, PREFIX(), share=share, routers=("router-1",)) for share in (0.1, 0.5))

    assert texts(with_canary(None), with_canary(tenth)) == [
        "Revision 2 (prefix_hash) of policy chat is a canary for 10 % of prefixes on router router-1."
    ]
    assert "50 % of prefixes on router router-1" in only_effect(with_canary(tenth), with_canary(half)).text
    ended = only_effect(with_canary(half), with_canary(None))
    assert (ended.text, ended.impact) == ("The canary ends; revision 1 of policy chat places all requests.", NONE)
    promoted = compare_configs(with_canary(half), with_canary(None, 2, PREFIX()))
    assert [(effect.kind, effect.impact) for effect in promoted] == [("canary", MOVE), ("strategy", PLACEMENT)]


@pytest.mark.parametrize("name", ["canary", "policy", "keys", "replicas"])
def test_names_of_objects_are_no_names_of_fields(name):
    before, after = (
        replace(config, pools=(replace(config.pools[0], name=name, session_keys=keys),))
        for config, keys in ((fleet(), None), (fleet(PREFIX(), revision=2), ("user",)))
    )

    moved, placed = compare_configs(before, after)

    assert moved.text.startswith(f"Pool {name}: session_keys is user instead of the default.")
    assert placed.text == f"Requests of pool {name} are placed by prefix_hash instead of lowest_cost."


def test_a_revision_with_the_same_settings_moves_nothing():
    before = fleet()
    after = with_policy(before, schema.PolicyConfig("chat", 7, LOWEST()), pool="chat", group=None)
    assert only_effect(before, after).text.startswith("Pool chat: policy.revision is 7 instead of 1.")

    before = fleet(groups=(group("a"),))
    own = with_policy(before, schema.PolicyConfig("chat.a", 1, LOWEST()), pool="chat", group="a")
    for effect, verb in ((only_effect(before, own), "gets"), (only_effect(own, before), "loses")):
        assert effect.text == f"Task group a of pool chat {verb} a policy of its own with the same settings."
        assert (effect.impact, effect.moved_ratio) == (NONE, 0.0)


# --- the fleet ------------------------------------------------------------------------------------------


def test_a_smaller_subset_of_replicas_keeps_what_is_cached_there():
    effect = only_effect(fleet(PREFIX(), groups=(group(),)), fleet(PREFIX(), groups=(group(replicas=("r0", "r1")),)))

    assert effect.text.startswith("Task group agents of pool chat: replicas is r0 and r1 instead of all replicas.")
    assert (effect.impact, effect.moved_ratio) == (MOVE, pytest.approx(3 / 4))


def test_pools_and_task_groups_that_are_new_or_gone():
    empty, two = schema.RouterConfig("0" * 32, ()), fleet(groups=(group(),))
    assert [(e.kind, e.text) for e in compare_configs(empty, two)] == [("pool_added", "Pool chat is added.")]
    gone = only_effect(two, empty)
    assert (gone.kind, gone.impact, gone.before, gone.after) == ("pool_removed", ACCESS, "chat", None)
    assert gone.affected == ("pool chat",)
    assert only_effect(fleet(), two).kind == "group_added"


def test_replicas_that_join_and_leave_move_their_share():
    left = only_effect(fleet(PREFIX()), fleet(PREFIX(), replicas=7))
    assert (left.kind, left.text) == ("replica_left", "Replica r7 of pool chat is removed.")
    assert (left.impact, left.moved_ratio) == (MOVE, pytest.approx(1 / 8))
    joined = only_effect(fleet(PREFIX(), replicas=0), fleet(PREFIX(), replicas=1))
    assert (joined.text, joined.moved_ratio) == ("Replica r0 of pool chat is added.", 1.0)


def test_only_active_replicas_that_decode_move_prefixes():
    draining = fleet(PREFIX(), replicas=2, states=(ACTIVE, DRAINING))
    gone = only_effect(draining, fleet(PREFIX(), replicas=1))
    assert gone.moved_ratio == 0.0
    prefills = only_effect(with_roles(DECODE), with_roles(DECODE, PREFILL))
    assert (prefills.impact, prefills.moved_ratio) == (PLACEMENT, 0.0)
    returned = only_effect(with_roles(DECODE, PREFILL), with_roles(DECODE, BOTH))
    assert (returned.impact, returned.moved_ratio) == (MOVE, pytest.approx(1 / 2))


@pytest.mark.parametrize(
    ("changes", "impact", "moved", "text"),
    [
        ({"state": DRAINING}, MOVE, 1 / 4, "state is draining instead of active."),
        ({"weight": 3.0}, MOVE, 1 / 4, "weight is 3 instead of 1."),
        ({"url": "http://10.0.0.9:8000"}, PLACEMENT, None, "The replica keeps its ring position; its cache may be"),
        ({"capacity_blocks": 1000}, PLACEMENT, None, "capacity_blocks is 1,000 instead of none"),
        ({"api_key": "secret-of-gpu"}, ACCESS, None, "api_key is *** instead of none"),
        ({"data_parallel_size": 2}, MOVE, 2 / 5, "data_parallel_size is 2 instead of 1"),
        ({"role": PREFILL}, MOVE, 1 / 4, "role is prefill instead of both"),
        ({"role": DECODE}, PLACEMENT, 0.0, "role is decode instead of both"),
        ({"kv_events": schema.KvEvents("tcp://gpu-1:5557")}, PLACEMENT, None, "tcp://gpu-1:5557"),
    ],
)
def test_a_replica_change_has_an_impact_and_a_share_that_moves(changes, impact, moved, text):
    before = fleet(PREFIX(), replicas=4)
    pool = before.pools[0]
    after = replace(before, pools=(replace(pool, replicas=(replace(pool.replicas[0], **changes), *pool.replicas[1:])),))

    effect = only_effect(before, after)

    assert effect.text.startswith("Replica r0 of pool chat: ")
    assert text in effect.text
    assert (effect.impact, effect.moved_ratio) == (impact, moved if moved is None else pytest.approx(moved))
    assert "secret-of-gpu" not in f"{effect}"


def with_roles(*roles, **options):
    """Pool chat with replicas of these roles."""
    whole = fleet(PREFIX(), replicas=len(roles), **options)
    (pool,) = whole.pools
    members = tuple(replace(replica, role=role) for replica, role in zip(pool.replicas, roles, strict=True))
    return replace(whole, pools=(replace(pool, replicas=members),))


def test_access_is_described_without_the_secret():
    def with_keys(*names, digest="1"):
        keys = tuple(schema.ApiKey(name, digest * 63 + str(number)) for number, name in enumerate(names))
        return replace(fleet(), access=schema.Access(keys))

    assert texts(fleet(), with_keys("ci")) == ["Requests without an API key are rejected with 401."]
    assert texts(with_keys("ci"), with_keys("ci", "web")) == ["API key web is added."]
    assert texts(with_keys("ci", "web"), with_keys("ci")) == ["API key web is removed."]
    changed = only_effect(with_keys("ci"), with_keys("ci", digest="2"))
    assert changed.text.startswith("API key ci: digest is *** instead of ***.")
    assert (changed.impact, changed.affected) == (ACCESS, ("API key ci",))


def test_models_are_described_by_name():
    before, after = fleet(models=("llama", "qwen")), fleet(models=("llama", "mistral"))

    effect = only_effect(before, after)

    assert effect.text.startswith("Pool chat: models is llama and mistral instead of llama and qwen.")
    assert effect.impact is ACCESS


def test_a_new_hash_secret_makes_every_cache_cold():
    effect = only_effect(fleet(), replace(fleet(), hash_secret="1" * 32))

    assert effect.impact is COLD
    assert "every cache starts cold" in effect.text
    assert "1111" not in f"{effect}"


def test_the_most_severe_effect_is_first():
    after = replace(fleet(PREFIX(), replicas=9), limits=schema.Limits(retries=3))

    assert [effect.impact for effect in compare_configs(fleet(ROUND()), after)] == [COLD, MOVE, PLACEMENT]


# --- warnings -------------------------------------------------------------------------------------------


def fleet_to_check(settings=None, *, replicas=4, blocks=16, **pool_settings):
    return fleet(settings, replicas=replicas, blocks=blocks, **pool_settings)


def warning_ids(config, task_group=None):
    return {warning.id for warning in warnings_of(config, "chat", task_group)}


CASES = {  # rule: configurations with the mistake, and one without it
    "no-active-replica": (
        (
            fleet_to_check(replicas=0),
            fleet_to_check(replicas=2, states=(DRAINING, DISABLED)),
            fleet_to_check(replicas=2, states=(DRAINING, ACTIVE), groups=(group(replicas=("r0",)),)),
            with_roles(DECODE, PREFILL, states=(DRAINING, ACTIVE)),
        ),
        fleet_to_check(replicas=2, states=(DRAINING, ACTIVE), groups=(group(replicas=("r0", "r1")),)),
    ),
    "prefixes-on-all-replicas": ((fleet_to_check(TIERED(replicas=4)),), fleet_to_check(TIERED(replicas=3))),
    "prefix-shorter-than-block": (
        (fleet_to_check(PREFIX(boundary=BYTES, boundary_bytes=500), blocks=128),),
        fleet_to_check(PREFIX(boundary=BYTES, boundary_bytes=512), blocks=128),
    ),
    "boundary-overridden": (
        (fleet_to_check(PREFIX(boundary_bytes=2048), tier1=schema.Tier1()),),
        fleet_to_check(PREFIX(), tier1=schema.Tier1()),
    ),
}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_warns_only_where_it_should(rule):
    mistakes, right = CASES[rule]

    assert rule not in warning_ids(right)
    for wrong in mistakes:
        (warning,) = (warning for warning in warnings_of(wrong, "chat") if warning.id == rule)
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

    (warning,) = warnings_of(stranded, "chat")
    assert warning.text == "Task group chat.agents has no active replica."
    assert warning_ids(with_own_policy) == set()
    assert warning_ids(with_own_policy, "agents") == {"no-active-replica"}


@pytest.mark.parametrize(
    ("pools", "groups", "impact", "moved", "setting"),
    [
        (PREFIX(), PREFIX(slack_s=0.03), PLACEMENT, None, "slack_s"),
        (PREFIX(), PREFIX(boundary=BYTES), MOVE, 7 / 8, "boundary"),
        (TIERED(), TIERED(replicas=3), MOVE, 1 / 3, "replicas"),
    ],
)
def test_a_task_groups_policy_with_the_pools_strategy_is_described_by_its_other_settings(
    pools, groups, impact, moved, setting
):
    shared, own = fleet(pools, groups=(group(),)), fleet(pools, groups=(own_policy("agents", groups),))

    for before, after, verb in ((shared, own, "gets"), (own, shared, "loses")):
        change, policy = compare_configs(before, after)
        assert (policy.text, policy.impact) == (f"Task group agents of pool chat {verb} a policy of its own.", NONE)
        assert f"Task group agents of pool chat: {setting} is " in change.text
        assert (change.impact, change.moved_ratio) == (impact, moved if moved is None else pytest.approx(moved))
