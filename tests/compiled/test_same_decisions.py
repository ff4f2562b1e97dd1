"""A compiled and a plain router make the same decisions."""

import json
import os
import random
import subprocess
import sys
from itertools import chain

import pytest

from routing.balancing.strategies.registry import STRATEGIES
from routing.schema import (
    CacheAwareSettings,
    LowestCostSettings,
    PolicyConfig,
    PoolConfig,
    PrefixHashSettings,
    ReplicaConfig,
    SessionAffinitySettings,
    TieredSettings,
)
from tests.compiled.package import ROOT, environment
from tests.fakes.replica import answering, fake_replicas
from tests.routing.building import config
from tests.routing.workers.harness import serving

pytestmark = [pytest.mark.usefixtures("compiled"), pytest.mark.timeout(400)]
# Strategies that break ties by ring order, which is the same on all routers, and not by random numbers.
DETERMINISTIC_STRATEGIES = (
    CacheAwareSettings,
    LowestCostSettings,
    PrefixHashSettings,
    SessionAffinitySettings,
    TieredSettings,
)
USAGE = b'{"usage":{"prompt_tokens":900,"prompt_tokens_details":{"cached_tokens":448}}}'


def pool(strategy, replicas) -> PoolConfig:
    """A pool whose model has the name of its strategy."""
    members = tuple(
        ReplicaConfig(name=f"{strategy.name}-{replica.name}", url=replica.url, block_tokens=16) for replica in replicas
    )
    return PoolConfig(
        name=strategy.name,
        policy=PolicyConfig(name=strategy.name, revision=1, settings=strategy()),
        models=(strategy.name,),
        replicas=members,
    )


def conversations(model: str) -> list[bytes]:
    """Requests of twelve conversations that share three system prompts, turn by turn."""
    rng = random.Random(7)
    messages = {
        number: [{"role": "system", "content": f"You are assistant {number % 3}. " * 60}] for number in range(12)
    }
    bodies = []
    for _ in range(60):
        number = rng.randrange(12)
        messages[number].append({"role": "user", "content": "".join(rng.choices("abcdef ", k=400))})
        bodies.append(json.dumps({"model": model, "messages": messages[number], "user": f"user-{number}"}).encode())
    return bodies


async def test_the_same_requests_get_the_same_replicas_for_the_same_reasons(tmp_path):
    decisions = {}
    async with fake_replicas(4, answering(USAGE)) as replicas:
        snapshot = config(*(pool(strategy, replicas) for strategy in DETERMINISTIC_STRATEGIES))
        for name, environ in (("plain", None), ("compiled", environment())):
            (tmp_path / name).mkdir()
            async with serving(tmp_path / name, snapshot, environment=environ) as router:
                await router.line(f"compiled={str(environ is not None).lower()}")
                for body in chain(*(conversations(strategy.name) for strategy in DETERMINISTIC_STRATEGIES)):
                    assert (await router.chat(body)).status == 200
                _, page = await router.admin("GET", "/admin/decisions")
            decisions[name] = [without_time(decision) for decision in page["decisions"]]

    assert decisions["compiled"] == decisions["plain"]
    assert len({(decision["pool"], decision["replica"]) for decision in decisions["plain"]}) > 2 * len(
        DETERMINISTIC_STRATEGIES
    )


def without_time(decision):
    """Decisions without fields that depend on time."""
    volatile = {"request_id", "at", "ttft_s", "latency_s", "prompt_structure", "candidates"}
    return {name: value for name, value in decision.items() if name not in volatile}


def test_a_replay_has_the_same_results(tmp_path):
    rng, at = random.Random(5), 0.0
    with (tmp_path / "trace.jsonl").open("w") as trace:
        for _ in range(800):
            at += rng.expovariate(3) * 1000
            first = 1000 * rng.randrange(1, 41)
            ids = [0, *range(first, first + rng.randrange(1, 12))]
            row = {"timestamp": at, "input_length": 512 * len(ids), "output_length": 40, "hash_ids": ids}
            trace.write(json.dumps(row) + "\n")
    policies = []
    for strategy in STRATEGIES:
        (tmp_path / strategy.name).write_text(json.dumps({"strategy": strategy.name}))
        policies += ["--policy", strategy.name]
    options = ["--trace", "trace.jsonl", "--replicas", "4", "--blocks", "300", "--json", *policies]
    command = [sys.executable, "-m", "routing", "simulate", *options]
    plain, compiled = (
        json.loads(subprocess.run(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, check=True).stdout)
        for environ in (os.environ | {"PYTHONPATH": str(ROOT)}, environment())
    )

    assert compiled == plain
    assert len({json.dumps(result["ttft_s"]) for result in plain}) > len(STRATEGIES) / 2
