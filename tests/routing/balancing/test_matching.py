from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from routing.balancing.request import MAX_UNKNOWN, Models, PlacementRequest, ServedModel, TaskGroupMatcher
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
    PrefixHashSettings,
    TaskGroupConfig,
    Tier1,
    check_config,
)
from routing.types import MatchedBy, UnknownModelError
from tests.routing.building import SECRET, chat, config, pool, replicas, request

HASHER = PrefixHasher(SECRET)
HANDBOOK = chat(("system", "Answer from the handbook. " * 40), ("user", "Hello"))
HANDBOOK_HASH = f"{HASHER.tier1(HANDBOOK, 'llama'):016x}"


def group(name: str, tier1: Tier1 | None = None, **match: Any) -> TaskGroupConfig:
    return TaskGroupConfig(name=name, match=GroupMatch(**match), tier1=tier1)


def matched(groups: list[TaskGroupConfig], query: PlacementRequest, **fields: Any) -> tuple[str, MatchedBy]:
    """The group of a request and the rule that matched, in a pool of one model."""
    configuration = config(replace(pool(models=("llama",), groups=groups), **fields))
    match_, by = TaskGroupMatcher(configuration, HASHER).group(Models(configuration).resolve(query.model), query)
    return match_.name if match_ else "", by


EVERY_RULE = {
    MatchedBy.HEADER: group("by-header"),
    MatchedBy.API_KEY: group("by-key", api_keys=("team-red",)),
    MatchedBy.SESSION: group("by-session", session_prefixes=("agent-",)),
    MatchedBy.TIER1: group("by-tier1", tier1_hashes=(HANDBOOK_HASH,)),
    MatchedBy.MODEL: group("by-model", models=("llama",)),
}


def test_rules_apply_from_the_header_to_the_model():
    query = request(group="by-header", session="agent-7", prompt=HANDBOOK, key="team-red")
    rules = dict(EVERY_RULE)
    while rules:
        rule, first = next(iter(rules.items()))
        assert matched(list(rules.values()), query) == (first.name, rule)
        del rules[rule]

    assert matched([], query) == ("", MatchedBy.UNMATCHED)


def test_a_task_group_is_found_by_name_in_its_pool():
    support = TaskGroupConfig(name="support")
    one = pool(models=("llama",), groups=[support])
    configuration = config(one, pool(models=("mistral",), name="other", members=replicas(0)))
    models, matcher = Models(configuration), TaskGroupMatcher(configuration, HASHER)

    def match_(model: str, name: str | None) -> TaskGroupConfig | None:
        return matcher.group(models.resolve(model), request(model=model, group=name)).group

    assert match_("llama", "support") is support
    assert match_("mistral", "support") is None
    assert match_("llama", "SUPPORT") is None
    assert match_("llama", "") is match_("llama", None) is None


def test_a_header_that_names_no_group_is_ignored():
    assert matched([EVERY_RULE[MatchedBy.MODEL]], request(group="no-such")) == ("by-model", MatchedBy.MODEL)


@pytest.mark.parametrize(("key", "name"), [("red", "exact"), ("red-2", "any-red"), ("redder", "any-red"), ("blue", "")])
def test_an_api_key_is_claimed_by_name_or_by_prefix(key, name):
    groups = [group("exact", api_keys=("red",)), group("any-red", api_key_prefixes=("red",))]

    assert matched(groups, request(key=key))[0] == name


def test_no_other_rule_applies_to_a_key_limited_to_some_groups():
    groups = [TaskGroupConfig(name="coding"), TaskGroupConfig(name="chat"), *EVERY_RULE.values()]
    allowed_groups = ("gone", "chat", "coding")
    query = request(session="agent-7", key="team-red", key_groups=allowed_groups)

    assert matched(groups, query) == ("chat", MatchedBy.API_KEY)
    for requested, match_ in {
        "coding": ("coding", MatchedBy.HEADER),
        "by-header": ("", MatchedBy.UNMATCHED),
    }.items():
        query = request(session="agent-7", key="team-red", key_groups=allowed_groups, group=requested)
        assert matched(groups, query) == match_


@pytest.mark.parametrize("name", ["fast", "llama", "sql"])
def test_a_model_is_claimed_by_the_requested_name(name):
    groups = [group("named", models=(name,))]
    names = {"aliases": (Alias("fast", "llama"),), "adapters": (Adapter("sql", "llama"),)}
    requested = {it: matched(groups, request(model=it), **names)[0] for it in ("fast", "llama", "sql")}

    assert requested[name] == "named"
    assert requested["fast"] == ("named" if name in {"fast", "llama"} else "")  # an alias is the model too
    assert requested["sql"] == ("named" if name == "sql" else "")  # an adapter is not


def test_a_groups_hash_is_computed_at_its_own_boundary():
    rule = Tier1(boundary=Boundary.MARKER, boundary_marker="<q>")
    prompt = chat(("user", "The handbook. <q> What is it?"))
    claim = f"{HASHER.tier1(prompt, 'llama', rule):016x}"

    assert matched([group("here", tier1=rule)], request(prompt=prompt))[0] == ""
    assert matched([group("here", rule, tier1_hashes=(claim,))], request(prompt=prompt)) == (
        "here",
        MatchedBy.TIER1,
    )
    assert matched([group("there", tier1_hashes=(claim,))], request(prompt=prompt))[0] == ""


@pytest.mark.parametrize("where", ["group", "pool", "policy"])
def test_the_tier1_boundary_is_the_groups_else_the_pools_else_the_policys(where):
    query, other = Tier1(boundary=Boundary.MESSAGES, boundary_messages=2), Tier1(boundary=Boundary.SYSTEM)
    policy = PolicyConfig(
        name="own",
        revision=1,
        settings=PrefixHashSettings(boundary=Boundary.MESSAGES, boundary_messages=2)
        if where == "policy"
        else PrefixHashSettings(boundary=Boundary.SYSTEM),
    )
    claim = TaskGroupConfig(
        name="claimed",
        policy=policy,
        tier1=query if where == "group" else None,
        match=GroupMatch(tier1_hashes=(f"{HASHER.tier1(HANDBOOK, 'llama', query):016x}",)),
    )
    of_pool = {"group": other, "pool": query, "policy": None}[where]

    assert matched([claim], request(prompt=HANDBOOK), tier1=of_pool)[0] == "claimed"


def test_the_claiming_hash_is_computed_for_every_group():
    system = Tier1(boundary=Boundary.SYSTEM)
    configuration = config(
        pool(models=("llama",), groups=[group("a"), TaskGroupConfig(name="b", tier1=system), group("c")])
    )
    query = request()
    hashes = TaskGroupMatcher(configuration, HASHER).tier1_hashes(Models(configuration).resolve("llama"), query)

    assert hashes == {
        "a": HASHER.tier1(query.prompt, "llama"),
        "b": None,
        "c": HASHER.tier1(query.prompt, "llama"),
    }


# --- invalid configurations --------------------------------------------------------------------------


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
def test_two_groups_with_the_same_claim_are_rejected_with_both_names(field, value):
    keys = Access(keys=(ApiKey(name="red", digest=hashlib.sha256(b"red").hexdigest()),))
    one, two = (group(name, **{field: (value,)}) for name in ("one", "two"))

    def check(*groups: TaskGroupConfig) -> None:
        check_config(replace(config(pool(models=("llama",), groups=groups)), access=keys))

    check(one)
    check(group("one", **{field: (value, value)}))
    with pytest.raises(ConfigError, match=r"'one'.*'two'") as refused:
        check(one, two)
    assert refused.value.path == f"$.pools[0].groups[1].match.{field}[0]"


@pytest.mark.parametrize(("field", "value"), [("api_keys", "nobody"), ("models", "mistral")])
def test_a_claim_of_an_unknown_key_or_model_is_rejected(field, value):
    with pytest.raises(ConfigError, match=value):
        check_config(config(pool(models=("llama",), groups=[group("one", **{field: (value,)})])))


def test_a_marker_boundary_needs_a_text():
    with pytest.raises(ValueError, match="boundary_marker"):
        Tier1(boundary=Boundary.MARKER)


@given(
    st.sets(st.text("ab", min_size=1, max_size=4), max_size=6), st.text("abA", max_size=6), st.none() | st.just("red")
)
def test_the_longest_session_prefix_wins_whatever_the_order(prefixes, session, key):
    groups = [group(f"g{number}", session_prefixes=(prefix,)) for number, prefix in enumerate(sorted(prefixes))]
    query = request(session=session, key=key)
    longest = max((prefix for prefix in prefixes if session.startswith(prefix)), key=len, default=None)
    expected = f"g{sorted(prefixes).index(longest)}" if longest else ""

    assert {matched(order, query)[0] for order in (groups, groups[::-1])} == {expected}


EMPTY = replicas(0)
LLAMA = replace(
    pool(models=("llama",)),
    aliases=(Alias("gpt-4o", "llama"), Alias("text-to-sql", "sql-v3")),
    adapters=(Adapter("sql-v3", "llama"),),
)
OTHER = pool(models=("mistral",), name="other", members=EMPTY)


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("llama", ("llama", "llama", "")),
        ("gpt-4o", ("llama", "llama", "")),
        ("sql-v3", ("sql-v3", "llama", "sql-v3")),
        ("text-to-sql", ("sql-v3", "llama", "sql-v3")),
        (None, ("llama", "llama", "")),
    ],
)
def test_a_name_stands_for_a_model_and_perhaps_an_adapter(name, served):
    assert Models(config(LLAMA)).resolve(name) == ServedModel(LLAMA, *served)


def test_an_unknown_model_is_rejected_by_name():
    with pytest.raises(UnknownModelError, match="`gpt`") as refused:
        Models(config(LLAMA)).resolve("gpt")

    assert refused.value.model == "gpt"


def test_a_pool_for_any_model_serves_unknown_models():
    models = Models(config(pool(models=("llama",)), pool(name="rest", members=EMPTY)))

    assert models.resolve("llama").pool.name == "chat"
    assert models.resolve("gpt") == ServedModel(models.resolve(None).pool, "gpt", "gpt")
    assert models.resolve(None).pool.name == models.resolve("").pool.name == "rest"


def test_the_cache_of_unknown_names_is_bounded():
    models = Models(config(pool()))
    for number in range(3 * MAX_UNKNOWN):
        assert models.resolve(f"m{number}").model == models.resolve(f"m{number}").name == f"m{number}"
        assert len(models._unknown) <= MAX_UNKNOWN


def test_a_missing_model_is_rejected_if_several_pools_are_possible():
    with pytest.raises(UnknownModelError, match="No model was named"):
        Models(config(LLAMA, OTHER)).resolve(None)
    with pytest.raises(UnknownModelError):
        Models(config(LLAMA, OTHER)).resolve("")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"aliases": (Alias("llama", "llama"),)}, "$.pools[0].aliases[0].name"),
        ({"aliases": (Alias("mistral", "llama"),)}, "$.pools[1].models[0]"),
        ({"aliases": (Alias("a", "no-such"),)}, "$.pools[0].aliases[0].model"),
        ({"aliases": (Alias("a", "llama"), Alias("b", "a"))}, "$.pools[0].aliases[1].model"),
        ({"adapters": (Adapter("sql", "no-such"),)}, "$.pools[0].adapters[0].model"),
        ({"adapters": (Adapter("sql", "llama"), Adapter("sql", "llama"))}, "$.pools[0].adapters[1].name"),
        ({"replicas": replicas(2, adapters=("no-such",))}, "$.pools[0].replicas[0].adapters[0]"),
    ],
)
def test_contradicting_model_names_are_rejected_with_their_path(fields, path):
    with pytest.raises(ConfigError) as refused:
        check_config(config(replace(pool(models=("llama",)), **fields), OTHER))

    assert refused.value.path == path
