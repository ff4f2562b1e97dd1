"""Routers that ask for API keys, and requests that carry one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from routing.schema import Access, ApiKey, RouterConfig, TaskGroupConfig
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import config

KEY, OTHER = "sk-" + "a1" * 32, "sk-" + "b2" * 32
MODELS = ("tiny", "large")


def api_key(name: str = "team", secret: str = KEY, **fields: Any) -> ApiKey:
    return ApiKey(name=name, digest=hashlib.sha256(secret.encode()).hexdigest(), **fields)


def guarded(replicas: Sequence[FakeReplica], *keys: ApiKey, **fields: Any) -> RouterConfig:
    groups = tuple(TaskGroupConfig(name=name) for name in ("coding", "chatting"))
    open_to_all = config(replicas, models=MODELS, groups=groups, **fields)
    return msgspec.structs.replace(open_to_all, access=Access(keys=keys))


def bearer(secret: str = KEY) -> bytes:
    return b"Authorization: Bearer " + secret.encode()


def asking(model: str = "tiny", text: str = "Say something.", **fields: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], **fields}).encode()
