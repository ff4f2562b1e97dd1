"""Damaged configurations: each is rejected with a reason, or accepted and usable."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Placement
from routing.http.auth import AccessControl
from routing.proxy.admission import Admission
from routing.schema import ConfigError, RouterConfig, dump_snapshot, load_settings, load_snapshot
from routing.upstream.pool import Address
from tests.routing.schema.damage import CONFIG, damage, encrypted

ROUNDS = 150  # for each seed
REASON_CHARS = 400


def read(document: bytes) -> bool:
    """Whether a document is accepted; if so, it is usable; if not, the reason is short."""
    try:
        loaded = load_snapshot(document)
    except ConfigError as error:
        rejection = error
    else:
        return can_be_run(loaded.config)
    assert rejection.path.startswith("$")
    assert 0 < len(str(rejection)) <= REASON_CHARS
    return False


def can_be_run(config: RouterConfig) -> bool:
    assert load_snapshot(dump_snapshot(config, 1).document).config == config
    placement = Placement(config, LoadTracker(), seed=1)
    Admission(config, placement.models, placement.matcher)
    AccessControl(config)
    for pool in config.pools:
        for replica in pool.replicas:
            assert Address(replica.url).host
    return True


def test_the_undamaged_configuration_is_accepted():
    assert read(encrypted(CONFIG))


@pytest.mark.parametrize("seed", range(8))
def test_changed_values_are_accepted_or_rejected_with_a_reason(seed):
    chance = random.Random(seed)
    accepted = 0
    for _ in range(ROUNDS):
        tree = json.loads(json.dumps(CONFIG))
        for _ in range(chance.randrange(1, 4)):
            damage(tree, chance)
        accepted += read(encrypted(tree))
    assert 0 < accepted < ROUNDS


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_are_accepted_or_rejected_with_a_reason(seed):
    chance = random.Random(seed)
    valid = encrypted(CONFIG)
    for _ in range(ROUNDS):
        at = chance.randrange(len(valid))
        inserted = chance.choice((b"", b"{", b"]", b'"', b"\\", b"\0", b"\xff", b"1e999", b"null", chance.randbytes(3)))
        read(valid[:at] + inserted + valid[at + chance.randrange(3) :])
        read(valid[:at])


@settings(max_examples=300)
@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_rejected(document):
    assert not read(document)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=300)
@given(json_values, json_values, json_values, json_values)
def test_arbitrary_json_is_rejected(schema, revision, sha256, config):
    assert not read(encrypted(config, schema=schema, revision=revision, sha256=sha256))
    assert not read(encrypted(config))
    with pytest.raises(ConfigError):
        load_settings(json.dumps(config).encode())


@pytest.mark.parametrize("prefix", [b"[", b'{"a":', b'{"schema":1,"revision":1,"config":[', b'{"config":{"pools":['])
def test_deep_nesting_is_rejected(prefix):
    assert not read(prefix * 100_000)


@pytest.mark.parametrize(
    "keys",
    [
        ("hash_secret",),
        ("access", "keys", 0, "digest"),
        ("access", "keys", 1, "tenant"),
        ("pools", 0, "name"),
        ("pools", 0, "health", "path"),
        ("pools", 0, "caps", "media_hosts", 0),
        ("pools", 0, "replicas", 0, "api_key"),
        ("pools", 0, "replicas", 1, "name"),
        ("pools", 0, "groups", 0, "match", "api_key_prefixes", 0),
        ("pools", 0, "groups", 1, "match", "tier1_hashes", 0),
    ],
    ids=str,
)
def test_patterns_allow_no_trailing_newline(keys):
    tree = json.loads(json.dumps(CONFIG))
    pool = tree["pools"][0]
    pool |= {"health": {"path": "/health"}, "caps": {"media_hosts": ["media.example"]}}
    pool["replicas"][0]["api_key"] = "secret"
    assert read(encrypted(tree))

    *parents, last = keys
    part = tree
    for key in parents:
        part = part[key]
    part[last] += "\n"
    with pytest.raises(ConfigError, match="matching regex"):
        load_snapshot(encrypted(tree))
