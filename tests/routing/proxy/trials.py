"""A pool whose policy has a trial, and prompts for it."""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from routing.schema import Canary, LeastLoadSettings, PrefixHashSettings, RouterConfig
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import config

HISTOGRAM = "warmpath_router_policy_ttft_seconds"


def trying(replicas: list[FakeReplica], share: float = 0.5, **trial: Any) -> RouterConfig:
    whole = config(replicas, settings=PrefixHashSettings())
    tried = Canary(revision=2, settings=LeastLoadSettings(), share=share, **trial)
    pool = whole.pools[0]
    return replace(whole, pools=(replace(pool, policy=replace(pool.policy, trial=tried)),))


def body(number: int) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": f"Prompt {number}."}]}).encode()
