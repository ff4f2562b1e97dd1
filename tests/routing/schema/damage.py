"""A configuration with every field as JSON, and random damage to it."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

CONFIG: dict[str, Any] = {
    "hash_secret": "ab" * 16,
    "limits": {
        "max_body_bytes": 4096,
        "retries": 1,
        "header_timeout_s": 2.5,
        "retry_on": ["connect"],
        "response_timeout_s": 60.0,
    },
    "replica_networks": {"allowed": ["127.0.0.0/8", "::1/128"], "forbidden": ["127.1.0.0/16"]},
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
                "canary": {
                    "revision": 2,
                    "settings": {"strategy": "tiered"},
                    "share": 0.1,
                    "groups": ["batch"],
                    "routers": ["router-1", "router-2"],
                },
            },
            "replicas": [
                {"name": "a", "url": "http://127.0.0.1:8000", "weight": 2.0, "state": "active", "adapters": ["sql"]},
                {
                    "name": "b",
                    "url": "https://b.example/base",
                    "state": "draining",
                    "capacity_blocks": None,
                    "data_parallel_size": 2,
                    "kv_events": {"endpoint": "tcp://b:5557", "replay_endpoint": "tcp://[::1]:5657", "topic": "kv@"},
                    "role": "decode",
                },
            ],
            "groups": [
                {
                    "name": "batch",
                    "replicas": ["b"],
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
            "adapter_replicas": 2,
            "stream_usage": "as_sent",
            "keep_alive_s": 5.0,
            "session_keys": ["header:X-Conversation", "body:metadata.user_id"],
            "paths": ["/v1/chat/completions", "/v1/responses"],
            "allowed_origins": ["https://chat.example", "http://[::1]:3000"],
            "caps": {"n": None, "max_tokens": 100, "media_hosts": ["media.example"]},
            "concurrency": {"max_running": 8, "max_waiting": 0, "max_wait_s": 0.5},
            "breaker": {"failures": 2, "stall_s": None},
            "warm_up": {"max_tokens": 50_000},
            "disaggregation": {"min_uncached_tokens": 100},
            "health": {"path": "/health", "interval_s": 1.0, "failures": 3},
        },
        {
            "name": "any",
            "policy": {"name": "turns", "revision": 1, "settings": {"strategy": "round_robin"}},
            "replicas": [{"name": "c", "url": "http://[::1]:9"}],
        },
    ],
}


ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 1 << 63, 1e308, -1e308, 0.5, "", "a", "A", "a" * 5000, "\0", "\n", "é", "\ud800", [], [[]]),
    *("http://", "http://a:99999", "http://a:0", "http://[", "http://[::1", "http://a b", "http://u:p@a", "http://a?b"),
    *("file:///etc/passwd", "http://" + "a" * 300, "http://a..b", "http://a/%", "//a", "http://a\u2100", "http://:80"),
    *("http://\uff11.0.0.1", {"strategy": "none"}, {"strategy": []}, ["a", "a"], {"a": {"b": {}}}, {}, "a - at `b`"),
)


def encrypted(config: Any, **envelope: Any) -> bytes:
    return json.dumps({"schema": 1, "revision": 1, "config": config, **envelope}).encode("utf-8", "surrogatepass")


def locations(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [location for key in keys for location in ((tree, key), *locations(tree[key]))]


def damage(tree: Any, chance: random.Random) -> None:
    """Change one value: replace it, remove it, add an unknown field, or copy another part there."""
    container, key = chance.choice(locations(tree))
    kind = chance.randrange(5)
    if kind == 0:
        container[key] = json.loads(json.dumps(chance.choice(locations(tree))[0]))
    elif kind == 1:
        del container[key]
    elif kind == 2 and isinstance(container, dict):
        container[chance.choice(["", "a - at `b`", "strategy", "name", "\0", "a" * 3000])] = deepcopy(
            chance.choice(ODD_VALUES)
        )
    else:
        container[key] = deepcopy(chance.choice(ODD_VALUES))
