from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from routing.balancing.matching import Models, TaskGroupMatcher
from routing.balancing.request import PlacementRequest
from routing.prompt.hashing import PrefixHasher
from routing.schema import (
    Access,
    Adapter,
    Alias,
    ApiKey,
    Boundary,
    ConfigError,
    GroupMatch,
    PolicyConfig,
    PoolConfig,
    PrefixHashSettings,
    TaskGroupConfig,
    Tier1,
    check_config,
)
from routing.types import MatchedBy
from tests.routing.building import SECRET, chat, config, pool, replicas, request

HASHER = PrefixHasher(SECRET)
HANDBOOK = chat(("system", "Answer from the handbook. " * 40), ("user", "Hello"))
HANDBOOK_HASH = f"{HASHER.tier1(HANDBOOK, 'llama'):016x}"


def group(name: str, tier1: Tier1 | None = None, **match: Any) -> TaskGroupConfig:
    return TaskGroupConfig(name=name, match=GroupMatch(**match), tier1=tier1)


def matched(groups: list[TaskGroupConfig], wanted: PlacementRequest, **fields: Any) -> tuple[str, MatchedBy]:
    """The group of a request and the rule that says so, in a pool of one model."""
    whole = config(replace(pool(models=("llama",), groups=groups), **fields))
    found, by = TaskGroupMatcher(whole, HASHER).group(Models(whole).resolve(wanted.model), wanted)
    return found.name if found else "", by


EVERY_RULE = {
    MatchedBy.HEADER: group("by-header"),
    MatchedBy.API_KEY: group("by-key", api_keys=("team-red",)),
    MatchedBy.SESSION: group("by-session", session_prefixes=("agent-",)),
    MatchedBy.TIER1: group("by-tier1", tier1_hashes=(HANDBOOK_HASH,)),
    MatchedBy.MODEL: group("by-model", models=("llama",)),
}


def test_rules_are_asked_from_the_header_down_to_the_model() -> None:
    wanted = request(group="by-header", session="agent-7", prompt=HANDBOOK, key="team-red")
    rules = dict(EVERY_RULE)
    while rules:
        rule, first = next(iter(rules.items()))
        assert matched(list(rules.values()), wanted) == (first.name, rule)
        del rules[rule]

    assert matched([], wanted) == ("", MatchedBy.UNMATCHED)


def test_the_order_of_the_groups_decides_nothing_between_rules() -> None:
    wanted = request(session="agent-7", prompt=HANDBOOK, key="team-red")

    assert matched(list(reversed(EVERY_RULE.values())), wanted) == ("by-key", MatchedBy.API_KEY)


def test_a_task_group_is_known_by_name_within_its_pool() -> None:
    support = TaskGroupConfig(name="support")
    one = pool(models=("llama",), groups=[support])
    whole = config(one, pool(models=("mistral",), name="other", members=replicas(0)))
    models, matcher = Models(whole), TaskGroupMatcher(whole, HASHER)

    def found(model: str, name: str | None) -> TaskGroupConfig | None:
        return matcher.group(models.resolve(model), request(model=model, group=name)).group

    assert found("llama", "support") is support
    assert found("mistral", "support") is None
    assert found("llama", "SUPPORT") is None
    assert found("llama", "") is found("llama", None) is None


def test_a_header_that_names_no_group_leaves_it_to_the_other_rules() -> None:
    assert matched([EVERY_RULE[MatchedBy.MODEL]], request(group="no-such")) == ("by-model", MatchedBy.MODEL)


@pytest.mark.parametrize(
    ("session", "name"),
    [("agent-", "agents"), ("agent-7", "agents"), ("agent-code-7", "coding"), ("Agent-7", ""), ("x-agent-7", "")],
)
def test_the_longest_beginning_of_a_session_key_decides(session: str, name: str) -> None:
    groups = [group("agents", session_prefixes=("agent-",)), group("coding", session_prefixes=("agent-code-",))]

    assert matched(groups, request(session=session))[0] == name


@pytest.mark.parametrize(("key", "name"), [("red", "exact"), ("red-2", "any-red"), ("redder", "any-red"), ("blue", "")])
def test_a_key_is_claimed_by_its_name_or_by_how_that_begins(key: str, name: str) -> None:
    groups = [group("exact", api_keys=("red",)), group("any-red", api_key_prefixes=("red",))]

    assert matched(groups, request(key=key))[0] == name


def test_a_key_for_some_groups_is_asked_by_no_other_rule() -> None:
    groups = [TaskGroupConfig(name="coding"), TaskGroupConfig(name="chat"), *EVERY_RULE.values()]
    good_for = ("gone", "chat", "coding")
    wanted = request(session="agent-7", key="team-red", key_groups=good_for)

    assert matched(groups, wanted) == ("chat", MatchedBy.API_KEY)
    for asked, found in {"coding": ("coding", MatchedBy.HEADER), "by-header": ("", MatchedBy.UNMATCHED)}.items():
        wanted = request(session="agent-7", key="team-red", key_groups=good_for, group=asked)
        assert matched(groups, wanted) == found


@pytest.mark.parametrize("name", ["fast", "llama", "sql"])
def test_a_model_is_claimed_under_the_name_that_it_was_asked_for(name: str) -> None:
    groups = [group("named", models=(name,))]
    names = {"aliases": (Alias("fast", "llama"),), "adapters": (Adapter("sql", "llama"),)}
    asked = {it: matched(groups, request(model=it), **names)[0] for it in ("fast", "llama", "sql")}

    assert asked[name] == "named"
    assert asked["fast"] == ("named" if name in {"fast", "llama"} else "")  # an alias is the model too
    assert asked["sql"] == ("named" if name == "sql" else "")  # an adapter is not


def test_a_groups_hash_is_taken_at_its_own_boundary() -> None:
    rule = Tier1(boundary=Boundary.MARKER, boundary_marker="<q>")
    prompt = chat(("user", "The handbook. <q> What is it?"))
    claimed = f"{HASHER.tier1(prompt, 'llama', rule):016x}"

    assert matched([group("here", tier1=rule)], request(prompt=prompt))[0] == ""
    assert matched([group("here", rule, tier1_hashes=(claimed,))], request(prompt=prompt)) == ("here", MatchedBy.TIER1)
    assert matched([group("there", tier1_hashes=(claimed,))], request(prompt=prompt))[0] == ""


@pytest.mark.parametrize("where", ["group", "pool", "policy"])
def test_tier_1_ends_where_the_group_says_else_the_pool_else_the_policy(where: str) -> None:
    wanted, other = Tier1(boundary=Boundary.MESSAGES, boundary_messages=2), Tier1(boundary=Boundary.SYSTEM)
    policy = PolicyConfig(
        name="own",
        revision=1,
        settings=PrefixHashSettings(boundary=Boundary.MESSAGES, boundary_messages=2)
        if where == "policy"
        else PrefixHashSettings(boundary=Boundary.SYSTEM),
    )
    claimed = TaskGroupConfig(
        name="claimed",
        policy=policy,
        tier1=wanted if where == "group" else None,
        match=GroupMatch(tier1_hashes=(f"{HASHER.tier1(HANDBOOK, 'llama', wanted):016x}",)),
    )
    of_pool = {"group": other, "pool": wanted, "policy": None}[where]

    assert matched([claimed], request(prompt=HANDBOOK), tier1=of_pool)[0] == "claimed"


def test_the_hash_that_would_claim_a_request_is_told_for_every_group() -> None:
    system = Tier1(boundary=Boundary.SYSTEM)
    whole = config(pool(models=("llama",), groups=[group("a"), TaskGroupConfig(name="b", tier1=system), group("c")]))
    wanted = request()
    told = TaskGroupMatcher(whole, HASHER).tier1_hashes(Models(whole).resolve("llama"), wanted)

    assert told == {"a": HASHER.tier1(wanted.prompt, "llama"), "b": None, "c": HASHER.tier1(wanted.prompt, "llama")}


# --- what a configuration may not say ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("api_keys", "red"),
        ("api_key_prefixes", "re"),
        ("session_prefixes", "agent-"),
        ("tier1_hashes", HANDBOOK_HASH),
        ("models", "llama"),
    ],
)
def test_what_two_groups_claim_is_refused_with_both_names(field: str, value: str) -> None:
    keys = Access(keys=(ApiKey(name="red", digest=hashlib.sha256(b"red").hexdigest()),))
    one, two = (group(name, **{field: (value,)}) for name in ("one", "two"))

    def check(*groups: TaskGroupConfig) -> None:
        check_config(replace(config(pool(models=("llama",), groups=groups)), access=keys))

    check(one)
    check(group("one", **{field: (value, value)}))
    with pytest.raises(ConfigError, match=r"'one'.*'two'") as refused:
        check(one, two)
    assert refused.value.path == f"$.pools[0].groups[1].match.{field}[0]"


def test_two_pools_may_claim_the_same() -> None:
    groups = [group("agents", session_prefixes=("agent-",))]
    check_config(config(pool(models=("llama",), groups=groups), other_pool(groups)))


def other_pool(groups: list[TaskGroupConfig]) -> PoolConfig:
    return pool(models=("mistral",), name="other", members=replicas(0), groups=groups)


@pytest.mark.parametrize(("field", "value"), [("api_keys", "nobody"), ("models", "mistral")])
def test_a_claim_to_what_is_not_there_is_refused(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=value):
        check_config(config(pool(models=("llama",), groups=[group("one", **{field: (value,)})])))


def test_a_marker_must_be_said() -> None:
    with pytest.raises(ValueError, match="boundary_marker"):
        Tier1(boundary=Boundary.MARKER)


@given(
    st.sets(st.text("ab", min_size=1, max_size=4), max_size=6), st.text("abc", max_size=6), st.none() | st.just("red")
)
def test_a_request_is_of_one_group_at_most_and_routers_agree(prefixes: set[str], session: str, key: str | None) -> None:
    groups = [group(f"g{number}", session_prefixes=(prefix,)) for number, prefix in enumerate(sorted(prefixes))]
    wanted = request(session=session, key=key)
    longest = max((prefix for prefix in prefixes if session.startswith(prefix)), key=len, default=None)
    expected = f"g{sorted(prefixes).index(longest)}" if longest else ""

    assert {matched(order, wanted)[0] for order in (groups, groups[::-1])} == {expected}
