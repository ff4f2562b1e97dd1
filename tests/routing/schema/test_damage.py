"""Damaged configurations (R3): each is read or refused with a reason, and whatever is read can be run."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.core.load import LoadBook
from routing.placement.placement import Placement
from routing.proxy.clients.access import AccessControl
from routing.proxy.clients.admission import Admission
from routing.proxy.replicas.link import Address
from routing.schema import ConfigError, RouterConfig, load_settings, load_snapshot

ROUNDS = 150  # for each seed
REASON_CHARS = 400

CONFIG: dict[str, Any] = {
    "hash_secret": "ab" * 16,
    "limits": {"max_body_bytes": 4096, "retries": 1, "header_timeout_s": 2.5},
    "access": {
        "keys": [
            {"name": "team", "digest": "0f" * 32, "models": ["tiny"], "groups": ["coding"], "tokens_per_min": 9000},
            {"name": "batch-1", "digest": "1e" * 32, "tenant": "red", "requests_per_s": 0.5, "burst": 2},
            {"name": "guest", "digest": "2d" * 32, "expires_at": 1_900_000_000},
        ]
    },
    "pools": [
        {
            "name": "chat",
            "models": ["tiny"],
            "aliases": [{"name": "gpt", "model": "tiny"}],
            "adapters": [{"name": "sql", "model": "tiny"}],
            "tier1": {"boundary": "messages", "boundary_messages": 2},
            "policy": {
                "name": "everyday",
                "revision": 3,
                "settings": {"strategy": "prefix_hash", "boundary": "bytes"},
                "trial": {"revision": 4, "settings": {"strategy": "tiered"}, "share": 0.1, "groups": ["batch"]},
            },
            "replicas": [
                {"name": "a", "url": "http://127.0.0.1:8000", "weight": 2.0, "state": "active", "adapters": ["sql"]},
                {
                    "name": "b",
                    "url": "https://b.example/base",
                    "state": "draining",
                    "capacity_blocks": None,
                    "data_parallel_size": 2,
                },
            ],
            "groups": [
                {
                    "name": "batch",
                    "auto_replicas": {"reserved": 1, "max": 2},
                    "match": {"api_keys": ["guest"], "api_key_prefixes": ["batch-"]},
                    "caps": {"max_tokens": 9},
                    "concurrency": {"max_running": 2},
                    "priority": 9,
                },
                {
                    "name": "coding",
                    "replicas": ["a"],
                    "match": {"session_prefixes": ["agent-"], "tier1_hashes": ["0123456789abcdef"], "models": ["sql"]},
                    "tier1": {"boundary": "marker", "boundary_marker": "<q>"},
                    "policy": {"name": "hot", "revision": 1, "settings": {"strategy": "session_affinity"}},
                },
            ],
            "share_half_life": 200,
            "caps": {"n": None, "max_tokens": 100, "media_hosts": ["media.example"]},
            "concurrency": {"max_running": 8, "max_waiting": 0, "max_wait_s": 0.5},
            "breaker": {"failures": 2, "stall_s": None},
            "warm_up": {"max_tokens": 50_000},
            "health": {"path": "/health", "interval_s": 1.0, "failures": 3},
        },
        {
            "name": "any",
            "policy": {"name": "turns", "revision": 1, "settings": {"strategy": "round_robin"}},
            "replicas": [{"name": "c", "url": "http://[::1]:9"}],
        },
    ],
}
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 1 << 63, 1e308, -1e308, 0.5, "", "a", "A", "a" * 5000, "\0", "\n", "é", "\ud800", [], [[]]),
    *("http://", "http://a:99999", "http://a:0", "http://[", "http://[::1", "http://a b", "http://u:p@a", "http://a?b"),
    *("file:///etc/passwd", "http://" + "a" * 300, "http://a..b", "http://a/%", "//a", "http://a\u2100", "http://:80"),
    *("http://\uff11.0.0.1", {"strategy": "none"}, {"strategy": []}, ["a", "a"], {"a": {"b": {}}}, {}, "a - at `b`"),
)


def sealed(config: Any, **envelope: Any) -> bytes:
    return json.dumps({"schema": 1, "revision": 1, "config": config, **envelope}).encode("utf-8", "surrogatepass")


def read(document: bytes) -> bool:
    """Whether a document is a configuration; if so, it can be run; if not, the reason is short."""
    try:
        loaded = load_snapshot(document)
    except ConfigError as error:
        refusal = error
    else:
        return can_be_run(loaded.config)
    assert refusal.path.startswith("$")
    assert 0 < len(str(refusal)) <= REASON_CHARS
    return False


def can_be_run(config: RouterConfig) -> bool:
    placement = Placement(config, LoadBook(), seed=1)
    Admission(config, placement.models, placement.matcher)
    AccessControl(config)
    for pool in config.pools:
        for replica in pool.replicas:
            assert Address(replica.url).host
    return True


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree of JSON."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [place for key in keys for place in ((tree, key), *places(tree[key]))]


def damage(tree: Any, chance: random.Random) -> None:
    """Change one place: another value, no value, a field that nobody knows, or a part of elsewhere."""
    container, key = chance.choice(places(tree))
    what = chance.randrange(5)
    if what == 0:
        container[key] = json.loads(json.dumps(chance.choice(places(tree))[0]))
    elif what == 1:
        del container[key]
    elif what == 2 and isinstance(container, dict):
        container[chance.choice(["", "a - at `b`", "strategy", "name", "\0", "a" * 3000])] = deepcopy(
            chance.choice(ODD)
        )
    else:
        container[key] = deepcopy(chance.choice(ODD))


def test_the_sound_one_is_read() -> None:
    assert read(sealed(CONFIG))


@pytest.mark.parametrize("seed", range(8))
def test_a_configuration_with_changed_values_is_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    read_ones = 0
    for _ in range(ROUNDS):
        tree = json.loads(json.dumps(CONFIG))
        for _ in range(chance.randrange(1, 4)):
            damage(tree, chance)
        read_ones += read(sealed(tree))
    assert 0 < read_ones < ROUNDS


@pytest.mark.parametrize("seed", range(4))
def test_a_configuration_with_changed_bytes_is_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    sound = sealed(CONFIG)
    for _ in range(ROUNDS):
        at = chance.randrange(len(sound))
        put = chance.choice((b"", b"{", b"]", b'"', b"\\", b"\0", b"\xff", b"1e999", b"null", chance.randbytes(3)))
        read(sound[:at] + put + sound[at + chance.randrange(3) :])
        read(sound[:at])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=100))
def test_any_bytes_are_refused(document: bytes) -> None:
    assert not read(document)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(json_values, json_values, json_values, json_values)
def test_any_json_is_refused(schema: Any, revision: Any, sha256: Any, config: Any) -> None:
    assert not read(sealed(config, schema=schema, revision=revision, sha256=sha256))
    assert not read(sealed(config))
    with pytest.raises(ConfigError):
        load_settings(json.dumps(config).encode())


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"schema":1,"revision":1,"config":[', b'{"config":{"pools":['])
def test_nesting_without_end_is_refused(opening: bytes) -> None:
    assert not read(opening * 100_000)
