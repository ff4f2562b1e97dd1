"""Every difference between two configurations is reported, and nothing else; over all fields of the schema."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from controlplane.services.impact import Impact, compare_configs, find_differences
from routing import schema
from routing.schema import SECRET_FIELDS

NAMES = ("a", "b", "c")
VALUES_BY_FIELD = {  # fields whose patterns random text would never match
    "digest": st.sampled_from(["0" * 64, "1" * 64]),
    "hash_secret": st.sampled_from(["0" * 32, "1" * 32]),
    "api_key": st.sampled_from(["secret-key-1", "secret-key-2"]),
    "url": st.sampled_from(["http://10.0.0.1:8000", "http://10.0.0.2:8000"]),
    "path": st.sampled_from(["/health", "/ping"]),
    "endpoint": st.sampled_from(["tcp://10.0.0.1:5557", "tcp://10.0.0.2:5557"]),
    "replay_endpoint": st.none() | st.sampled_from(["tcp://10.0.0.1:5558", "tcp://10.0.0.2:5558"]),
    "tier1_hashes": st.lists(st.sampled_from(["0" * 16, "1" * 16]), max_size=2, unique=True).map(tuple),
    "retry_on": st.lists(st.sampled_from(schema.RETRY_CAUSES), min_size=1, max_size=2, unique=True).map(tuple),
    "session_keys": st.none() | st.lists(st.sampled_from(schema.DEFAULT_SESSION_KEYS), max_size=2).map(tuple),
    "allowed_origins": st.lists(st.sampled_from(["*", "https://a", "https://b"]), max_size=2, unique=True).map(tuple),
    "media_hosts": st.none() | st.lists(st.sampled_from(NAMES), max_size=2, unique=True).map(tuple),
}


def values_of(kind: Any, field: str) -> st.SearchStrategy[Any]:  # noqa: C901, PLR0912 - a table of types
    """Values of a type of the schema."""
    if field in VALUES_BY_FIELD:
        return VALUES_BY_FIELD[field]
    low = getattr(kind, "ge", None)
    if low is None:
        low = kind.gt + 0.25 if getattr(kind, "gt", None) is not None else 0
    match kind:
        case inspect.Metadata():
            return values_of(kind.type, field)
        case inspect.UnionType():
            return st.one_of([values_of(member, field) for member in kind.types])
        case inspect.StructType():
            fields = {item.name: values_of(item.type, item.encode_name) for item in kind.fields}
            return st.fixed_dictionaries(fields).map(lambda values: build(kind.cls, values))
        case inspect.VarTupleType():
            item = kind.item_type.type if isinstance(kind.item_type, inspect.Metadata) else kind.item_type
            if isinstance(item, inspect.StructType) and any(inner.name == "name" for inner in item.fields):
                return st.lists(values_of(item, ""), max_size=3, unique_by=lambda value: value.name).map(tuple)
            return st.lists(values_of(item, ""), max_size=2, unique=True).map(tuple)
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.sampled_from([int(low), int(low) + 1, int(low) + 5])
        case inspect.FloatType():
            high = kind.le if kind.le is not None else low + 3
            return st.sampled_from([low + (high - low) / 4, low + (high - low) / 2, float(high)])
        case inspect.StrType():
            return st.sampled_from(NAMES)
    raise TypeError(f"{field}: add {kind} to the table of types")


def build(cls: type[Any], values: dict[str, Any]) -> Any:
    """The struct; with fewer fields where two of them exclude each other."""
    try:
        return cls(**values)
    except ValueError:
        return cls(**{name: value for name, value in values.items() if name in {"boundary_bytes", "reserved"}})


configs = values_of(inspect.type_info(schema.RouterConfig), "")
many_examples = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@many_examples
@given(before=configs, after=configs)
def test_every_difference_is_the_path_of_an_effect(before, after):
    effects = compare_configs(before, after)

    paths = {effect.path for effect in effects}
    missing = [path for path in differing(before, after) if path not in paths and path[-1] not in {"revision", "name"}]
    assert missing == []
    assert all(effect.text.endswith(".") for effect in effects), [effect.text for effect in effects]
    assert all(effect.moved_ratio is None or 0 <= effect.moved_ratio <= 1 for effect in effects)
    same = msgspec.json.decode(msgspec.json.encode(after), type=schema.RouterConfig)
    assert compare_configs(after, same) == []


@many_examples
@given(config=configs, data=st.data())
def test_one_changed_value_is_reported_and_nothing_else(config, data):
    tree = json.loads(msgspec.json.encode(config))
    path = data.draw(st.sampled_from(sorted(paths_of(tree), key=str)))
    parent = tree
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = data.draw(st.sampled_from([0, 1, 2, 7, 0.5, "b", "zz", "0" * 64, None, True]))
    try:
        after = msgspec.convert(tree, schema.RouterConfig, strict=True)
    except (msgspec.ValidationError, ValueError):
        return  # not a valid value of this field

    assert {effect.path for effect in compare_configs(config, after)} == differing(config, after)


def differing(before, after):
    return {path for path, _ in find_differences(msgspec.to_builtins(before), msgspec.to_builtins(after))}


def paths_of(tree, path=()):
    """The path of every leaf of a JSON document."""
    if not isinstance(tree, dict | list):
        yield path
    else:
        for step, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from paths_of(inner, (*path, step))


@many_examples
@given(before=configs, after=configs)
def test_effects_contain_no_secret(before, after):
    def secrets(tree):
        for name, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if name in SECRET_FIELDS and isinstance(inner, str):
                yield inner
            elif isinstance(inner, dict | list):
                yield from secrets(inner)

    all_secrets = {secret for config in (before, after) for secret in secrets(json.loads(msgspec.json.encode(config)))}
    text = json.dumps([msgspec.to_builtins(effect) for effect in compare_configs(before, after)], default=str)

    assert not [secret for secret in all_secrets if secret in text]


def test_a_field_without_a_rule_is_described_with_the_schemas_text():
    before = schema.RouterConfig(hash_secret="0" * 32, pools=())
    after = msgspec.structs.replace(before, limits=schema.Limits(max_in_flight=10))

    (effect,) = compare_configs(before, after)

    assert effect.text == (
        "Every router: limits.max_in_flight is 10 instead of 8,192 requests. "
        "Requests in this router at once; more are rejected with 503."
    )


def test_other_session_keys_move_conversations_and_other_paths_reject_requests():
    pool = schema.PoolConfig("chat", schema.PolicyConfig("chat", 1, schema.LowestCostSettings()))
    keys, paths = ("header:X-Conversation",), (schema.DataPath.CHAT_COMPLETIONS,)
    before = schema.RouterConfig("0" * 32, (pool,))
    after = schema.RouterConfig("0" * 32, (msgspec.structs.replace(pool, session_keys=keys, paths=paths),))
    sessions, served = compare_configs(before, after)

    assert (sessions.impact, served.impact) == (Impact.MOVE, Impact.ACCESS)
    assert sessions.text.startswith(
        "Pool chat: session_keys is header:X-Conversation instead of the default. Where requests name their session"
    )
    assert served.text == (
        "Pool chat: paths is /v1/chat/completions instead of all. The paths that the pool serves. "
        "Requests for other paths get 404."
    )
