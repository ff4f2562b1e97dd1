"""What a change means, said for the people who decide on it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from controlplane.services.impact.compare import compare_configs, with_settings
from controlplane.services.impact.effect import Impact, part
from routing import schema

LOWEST, PREFIX = schema.LowestCostSettings(), schema.PrefixHashSettings()
ROUND = schema.RoundRobinSettings()


def fleet(settings=LOWEST, *, replicas=8, groups=(), **more):
    """Pool chat with replicas r0, r1, ..., and task groups."""
    names = replicas if isinstance(replicas, tuple) else tuple(f"r{number}" for number in range(replicas))
    held = tuple(schema.ReplicaConfig(name, f"http://10.0.0.1:{8000 + at}") for at, name in enumerate(names))
    pool = schema.PoolConfig("chat", schema.PolicyConfig("chat", 1, settings), replicas=held, groups=groups, **more)
    return schema.RouterConfig("0" * 32, (pool,))


def changed(before, after):
    """The one effect of a change."""
    (effect,) = compare_configs(before, after)
    return effect


def said(before, after):
    return [effect.text for effect in compare_configs(before, after)]


GROUPS = (
    schema.TaskGroupConfig("a"),
    schema.TaskGroupConfig("b"),
    schema.TaskGroupConfig("own", policy=schema.PolicyConfig("chat.own", 1, ROUND)),
)


def test_a_strategy_is_told_for_everybody_whom_it_places_and_nobody_else():
    effect = changed(fleet(groups=GROUPS), fleet(PREFIX, groups=GROUPS))

    assert effect.text == (
        "Requests of pool chat outside its task groups, and of task groups a and b, are placed by prefix_hash instead "
        "of lowest_cost: homes are found anew, from openings: 7/8 of what is warm gets another replica and is cold "
        "there."
    )
    assert (effect.impact, effect.resets, effect.moved_ratio) == (Impact.RESET, True, pytest.approx(7 / 8))
    assert effect.who == ("pool chat", "task group chat.a", "task group chat.b")
    assert (effect.before["strategy"], effect.after["strategy"]) == ("lowest_cost", "prefix_hash")


@pytest.mark.parametrize(
    ("before", "after", "impact", "words"),
    [
        (LOWEST, schema.LeastTtftSettings(), Impact.STEER, "nothing becomes cold"),
        (ROUND, schema.RandomSettings(), Impact.STEER, "neither keeps prompts together"),
        (PREFIX, LOWEST, Impact.RESET, "learnt anew"),
        (PREFIX, ROUND, Impact.RESET, "meets that replica about once in 8 times"),
        (PREFIX, schema.SessionAffinitySettings(), Impact.RESET, "from sessions: 7/8 of what is warm"),
        (PREFIX, schema.TieredSettings(replicas=4), Impact.MOVE, "keep their first home, and 3/4 of the conversations"),
        (schema.TieredSettings(replicas=2), PREFIX, Impact.MOVE, "keep their first home, and 1/2 of the conversations"),
        (schema.TieredSettings(), schema.TieredSettings(replicas=3), Impact.MOVE, "3 replicas instead of 2: 1/3 of"),
        (schema.TieredSettings(replicas=8), schema.TieredSettings(replicas=9), Impact.QUIET, "there are no more"),
        (LOWEST, schema.LowestCostSettings(alpha=1), Impact.STEER, "leave their warm replica sooner"),
        (
            PREFIX,
            schema.PrefixHashSettings(load_factor=1.25),
            Impact.STEER,
            "1.25 times its share of the requests before",
        ),
        (PREFIX, schema.PrefixHashSettings(min_bound=8), Impact.STEER, "up to 8 requests however small its share"),
        (
            PREFIX,
            schema.PrefixHashSettings(boundary=schema.Boundary.MESSAGES, boundary_messages=2),
            Impact.RESET,
            "openings end after message 2 instead of after tools and system prompt, or after 1,024 bytes where those "
            "are short: keys are hashed anew, and 7/8 of the openings get another home",
        ),
        (PREFIX, schema.PrefixHashSettings(boundary_bytes=2048), Impact.MOVE, "only prompts where tools and system"),
        (PREFIX, schema.PrefixHashSettings(boundary_messages=3), Impact.QUIET, "is not used"),
    ],
)
def test_what_a_policys_change_does(before, after, impact, words):
    effect = changed(fleet(before), fleet(after))

    assert words in effect.text
    assert effect.impact is impact


def test_what_replicas_hold_need_not_be_learnt_where_another_policy_of_the_pool_asked():
    groups = (schema.TaskGroupConfig("own", policy=schema.PolicyConfig("chat.own", 1, LOWEST)),)

    effect = changed(fleet(PREFIX, groups=groups), fleet(LOWEST, groups=groups))

    assert "know already what the replicas hold" in effect.text


def test_a_group_that_may_use_fewer_replicas_keeps_what_is_warm_on_those():
    before, after = schema.TaskGroupConfig("a"), schema.TaskGroupConfig("a", replicas=("r0", "r1"))

    effect = changed(fleet(PREFIX, groups=(before,)), fleet(PREFIX, groups=(after,)))

    assert effect.text == (
        "Task group a of pool chat may use 2 replicas (r0 and r1) instead of all 8 replicas: 3/4 of its warm "
        "prefixes move."
    )
    assert effect.moved_ratio == pytest.approx(3 / 4)


def test_a_replica_that_leaves_takes_its_share_along_and_nothing_else():
    effect = changed(fleet(PREFIX), fleet(PREFIX, replicas=tuple(f"r{number}" for number in range(7))))

    assert effect.text == (
        "Replica r7 leaves the ring: 1/8 of the openings that were its own move, each to its next home; "
        "nothing else moves."
    )
    assert (effect.kind, effect.moved_ratio) == ("replica_left", pytest.approx(1 / 8))


def test_the_first_replica_of_a_pool_is_one_sentence():
    assert changed(fleet(PREFIX, replicas=0), fleet(PREFIX, replicas=1)).text.startswith(
        "Replica r0 joins the ring: all"
    )


def with_replica(config, **changes):
    pool = config.pools[0]
    replicas = (replace(pool.replicas[0], **changes), *pool.replicas[1:])
    return replace(config, pools=(replace(pool, replicas=replicas),))


@pytest.mark.parametrize(
    ("changes", "impact", "words"),
    [
        ({"state": schema.ReplicaState.DRAINING}, Impact.MOVE, "1/4 of the openings go to their next homes until"),
        (
            {"weight": 3.0},
            Impact.MOVE,
            "weighs 3 instead of 1: 1/2 of the openings have their home there, until now 1/4",
        ),
        ({"url": "http://10.0.0.9:8000"}, Impact.STEER, "another address. It keeps its name, and so every home"),
        ({"block_tokens": 16, "capacity_blocks": 1000}, Impact.STEER, "room for 16,000 tokens, until now an unknown"),
        ({"api_key": "secret-of-gpu"}, Impact.REFUSE, "Routers send a key to replica r0."),
        ({"data_parallel_size": 2}, Impact.MOVE, "ranks: 2 instead of 1"),
    ],
)
def test_what_a_replicas_change_does(changes, impact, words):
    before = fleet(PREFIX, replicas=4)

    effect = changed(before, with_replica(before, **changes))

    assert words in effect.text
    assert effect.impact is impact


def test_a_replica_that_takes_nothing_moves_nothing_when_it_goes():
    drained = with_replica(fleet(PREFIX, replicas=("r0", "r1")), state=schema.ReplicaState.DRAINING)

    pool = drained.pools[0]
    effect = changed(drained, replace(drained, pools=(replace(pool, replicas=pool.replicas[1:]),)))

    assert "took no requests any more" in effect.text


def test_a_trial_is_told_from_its_beginning_to_its_end():
    def tried(trial, revision=1, settings=LOWEST):
        config = fleet(settings)
        policy = schema.PolicyConfig("chat", revision, settings, trial)
        return with_settings(config, policy, pool="chat", group=None)

    tenth, half = (schema.Canary(2, PREFIX, share=share, routers=("router-1",)) for share in (0.1, 0.5))

    assert said(tried(None), tried(tenth)) == [
        "Revision 2 (prefix_hash) of policy chat is tried on 1/10 of the prefix space and on routers router-1."
    ]
    assert "1/2 of the prefix space and on routers router-1, until now on 1/10" in said(tried(tenth), tried(half))[0]
    assert "Revision 2 of policy chat is tried no more" in said(tried(half), tried(None))[0]
    assert "Revision 2 of policy chat is in force for all" in " ".join(said(tried(half), tried(None, 2, PREFIX)))


def test_another_number_for_the_same_settings_changes_nothing():
    before = fleet()

    effect = changed(before, with_settings(before, schema.PolicyConfig("chat", 7, LOWEST), pool="chat", group=None))

    assert effect.text == "Revision 7 of policy chat says the same as before: nothing is placed differently."


def test_a_policy_of_its_own_that_says_the_same_moves_nothing():
    before = fleet(groups=(schema.TaskGroupConfig("a"),))
    own = with_settings(before, schema.PolicyConfig("chat.a", 1, LOWEST), pool="chat", group="a")

    assert "says the same as chat did: nothing is placed differently." in changed(before, own).text
    assert "its pool's says the same" in changed(own, before).text


def test_who_is_let_in_is_told_without_the_secret():
    def open_to(*names, digest="1"):
        keys = tuple(schema.ApiKey(name, digest * 63 + str(at)) for at, name in enumerate(names))
        return replace(fleet(), access=schema.Access(keys))

    assert said(fleet(), open_to("ci")) == ["Requests are let in with one of 1 API key; all others get 401."]
    assert said(open_to("ci"), open_to("ci", "web")) == ["API key web is let in."]
    assert "API key web is let in no more" in said(open_to("ci", "web"), open_to("ci"))[0]
    assert "API key ci has another secret" in said(open_to("ci"), open_to("ci", digest="2"))[0]


def test_models_are_told_by_name():
    before, after = fleet(models=("llama", "qwen")), fleet(models=("llama", "mistral"))

    assert said(before, after) == ["Pool chat takes mistral, takes qwen no more."]


def test_another_hash_secret_makes_everything_cold():
    effect = changed(fleet(), replace(fleet(), hash_secret="1" * 32))

    assert effect.impact is Impact.RESET
    assert "1111" not in effect.text


def test_the_gravest_comes_first():
    after = replace(fleet(PREFIX, replicas=9), limits=schema.Limits(retries=3))

    assert [effect.impact for effect in compare_configs(fleet(), after)] == [Impact.RESET, Impact.MOVE, Impact.STEER]


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (0.125, "1/8"),
        (0.7501, "about 3/4"),
        (0.37, "about 37 %"),
        (0.004, "less than 1 %"),
        (1.0, "all"),
        (0.0, "none"),
    ],
)
def test_parts_are_said_as_people_say_them(ratio, words):
    assert part(ratio) == words
