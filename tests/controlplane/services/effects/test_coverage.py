"""Whatever differs is told, and nothing is told where nothing differs; over every field that the schema has."""

from __future__ import annotations

import json

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.services.impact.compare import compare_configs, plain_effects
from controlplane.services.impact.effect import differing, explained, leaves_of
from routing import schema
from routing.schema.fields import SECRET_FIELDS
from tests.controlplane.services.effects.configurations import configs

many = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@many
@given(config=configs)
def test_equal_configurations_have_no_effects(config: schema.RouterConfig) -> None:
    again = msgspec.json.decode(msgspec.json.encode(config), type=schema.RouterConfig)

    assert compare_configs(config, again) == []


@many
@given(before=st.none() | configs, after=configs)
def test_every_leaf_that_differs_is_in_a_sentence(
    before: schema.RouterConfig | None, after: schema.RouterConfig
) -> None:
    effects = compare_configs(before, after)

    told = [path for effect in effects for path in effect.paths]
    unsaid = [path for path in differing(leaves_of(before), leaves_of(after)) if not explained(path, told)]
    assert unsaid == []
    assert all(effect.text.endswith((".", "?", ")")) for effect in effects), [effect.text for effect in effects]
    assert all(effect.moved_ratio is None or 0 <= effect.moved_ratio <= 1 for effect in effects)


def places(tree, path=()):
    """Every value of a configuration as JSON: where it stands."""
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield from places(inner, (*path, name))
    elif isinstance(tree, list):
        for at, inner in enumerate(tree):
            yield from places(inner, (*path, at))
    else:
        yield path


@many
@given(config=configs, other=configs, data=st.data())
def test_one_value_that_differs_is_told_and_is_the_only_thing_told(config, other, data) -> None:
    tree = msgspec.to_builtins(config)
    path = data.draw(st.sampled_from(sorted(places(tree), key=str)))
    changed = json.loads(json.dumps(tree))
    _put(changed, path, data.draw(st.sampled_from([0, 1, 2, 7, 0.5, "b", "zz", "0" * 64, None, True])))
    try:
        after = msgspec.convert(changed, schema.RouterConfig, strict=True)
    except (msgspec.ValidationError, ValueError):
        return  # no such value there
    left = differing(leaves_of(config), leaves_of(after))

    effects = compare_configs(config, after)

    assert bool(effects) == bool(left)
    assert {path[:2] for effect in effects for path in effect.paths} <= {path[:2] for path in left} | {
        path[:1] for path in left
    }


@many
@given(before=configs, after=configs)
def test_no_sentence_holds_a_secret(before: schema.RouterConfig, after: schema.RouterConfig) -> None:
    def secrets(tree):
        if isinstance(tree, dict):
            for name, inner in tree.items():
                if name in SECRET_FIELDS and isinstance(inner, str):
                    yield inner
                yield from secrets(inner)
        elif isinstance(tree, list):
            for inner in tree:
                yield from secrets(inner)

    hidden = {one for config in (before, after) for one in secrets(msgspec.to_builtins(config))}
    said = json.dumps([msgspec.to_builtins(effect) for effect in compare_configs(before, after)], default=str)

    assert not [secret for secret in hidden if secret in said]


def _put(tree, path, value):
    for step in path[:-1]:
        tree = tree[step]
    tree[path[-1]] = value


def test_a_field_that_nobody_has_put_into_words_has_the_schemas() -> None:
    before = schema.RouterConfig(hash_secret="0" * 32, pools=())
    after = msgspec.structs.replace(before, limits=schema.Limits(max_in_flight=10))

    (effect,) = compare_configs(before, after)

    assert effect.text == (
        "Every router: limits max in flight is 10 instead of 8,192 requests. "
        "Requests in this router at once; more are rejected with 503."
    )


def test_a_secret_that_no_rule_foresees_is_hidden() -> None:
    alone, within = plain_effects(
        {
            ("pools", "a", "replicas", "r", "api_key"): (None, "s3cret"),
            ("pools", "a", "vault"): (None, {"keys.k.digest": "s3cret", "size": 3}),
        }
    )

    assert "s3cret" not in f"{alone} {within}"
    assert (alone.after, within.after["size"]) == ("***", 3)
