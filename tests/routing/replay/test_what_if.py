"""What-if jobs: placement, several routers, task groups, and jobs that cannot be replayed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from array import array
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from routing.replay.job import EngineModel, Job, Scenario, encode
from routing.replay.what_if import replay_job
from routing.schema import (
    LowestCostSettings,
    PolicyConfig,
    PoolConfig,
    PrefixHashSettings,
    ReplicaConfig,
    RoundRobinSettings,
    SessionAffinitySettings,
    Settings,
    TaskGroupConfig,
    TieredSettings,
)

BLOCK = 64
NAMES = ("gpu-1", "gpu-2", "gpu-3", "gpu-4")


def job(*scenarios: Scenario, requests: int = 400, prompts: int = 8) -> Job:
    """Requests at 5/s: ``prompts`` shared prefixes of 20 blocks, each followed by 4 blocks of its own."""
    ids, starts, tier1 = array("Q"), array("q", [0]), array("Q")
    for number in range(requests):
        prompt = number * 7 % prompts
        ids.extend(range(1000 * (prompt + 1), 1000 * (prompt + 1) + 20))
        ids.extend(range(10**6 + 4 * number, 10**6 + 4 * number + 4))
        starts.append(len(ids))
        tier1.append((prompt + 1) * 0x9E3779B97F4A7C15 % 2**64)
    return Job(
        block_tokens=BLOCK,
        groups=["", "batch"],
        at_s=array("d", [number / 5 for number in range(requests)]).tobytes(),
        prompt_tokens=array("q", [24 * BLOCK] * requests).tobytes(),
        output_tokens=array("q", [20] * requests).tobytes(),
        starts=starts.tobytes(),
        ids=ids.tobytes(),
        tier1=tier1.tobytes(),
        session=array("Q", [(number % 40 + 1) * 0x9E3779B97F4A7C15 % 2**64 for number in range(requests)]).tobytes(),
        group=array("q", [number % 2 for number in range(requests)]).tobytes(),
        router=array("q", [number % 3 for number in range(requests)]).tobytes(),
        scenarios=list(scenarios),
    )


def scenario(name: str, settings: Settings, *, blocks: int = 1000, routers: int = 1, **pool: object) -> Scenario:
    replicas = tuple(
        ReplicaConfig(name, "http://replica", block_tokens=BLOCK, capacity_blocks=blocks) for name in NAMES
    )
    engines = [EngineModel(name, blocks, 8000.0, 0.01, 0.0002) for name in NAMES]
    config = PoolConfig("default", PolicyConfig("default", 1, settings), replicas=replicas)
    return Scenario(name, engines, msgspec.structs.replace(config, **pool), routers)


def hit_rate(result: object) -> float:
    cached = array("q", result.cached_tokens)
    return sum(cached) / (24 * BLOCK * len(cached))


def test_affinity_has_more_hits_than_round_robin_on_the_same_requests():
    results = replay_job(
        job(
            scenario("a", RoundRobinSettings(), blocks=600),
            scenario("b", LowestCostSettings(), blocks=600),
            scenario("c", PrefixHashSettings(), blocks=600),
            prompts=61,
        ),
        lambda _done, _of: None,
    )
    rates = {result.name: hit_rate(result) for result in results}
    assert rates["b"] > rates["a"]
    assert rates["c"] > rates["a"]
    assert results[0].reasons == {"round_robin": 400}
    assert results[2].reasons.keys() <= {"affinity", "hit", "spill"}


def test_sessions_stay_on_one_engine():
    (result,) = replay_job(job(scenario("s", SessionAffinitySettings(slack_s=60.0))), lambda _done, _of: None)
    engines: dict[int, Counter[int]] = {}
    for number, engine in enumerate(array("q", result.engine)):
        engines.setdefault(number % 40, Counter())[engine] += 1
    assert all(max(counts.values()) == sum(counts.values()) for counts in engines.values())


@pytest.mark.parametrize("routers", [1, 2])
def test_session_affinity_keeps_what_an_unbounded_hash_of_the_session_keeps(routers):
    """Sessions of twelve turns, which begin with one of three prefixes and grow by 4 to 29 blocks a turn."""
    rng, turns, ids, starts = random.Random(1), [], array("Q"), array("q", [0])
    for session in range(120):
        at, blocks = rng.uniform(0, 800), list(range(1000 * (session % 3 + 1), 1000 * (session % 3 + 1) + 20))
        for _ in range(12):
            blocks = blocks + [10**6 + 10**4 * session + len(blocks) + new for new in range(rng.randrange(4, 30))]
            turns.append((at, session, blocks))
            at += rng.expovariate(1 / 40)
    for _, _, blocks in sorted(turns):
        ids.extend(blocks)
        starts.append(len(ids))
    settings = (SessionAffinitySettings(), SessionAffinitySettings(slack_s=60.0))
    scenarios = [scenario(str(it.slack_s), it, blocks=6000, routers=routers) for it in settings]
    requests, lengths = len(turns), [BLOCK * len(blocks) for _, _, blocks in sorted(turns)]
    growing = msgspec.structs.replace(
        job(*scenarios, requests=requests),
        at_s=array("d", [at for at, _, _ in sorted(turns)]).tobytes(),
        prompt_tokens=array("q", lengths).tobytes(),
        starts=starts.tobytes(),
        ids=ids.tobytes(),
        session=array("Q", [(it + 1) * 0x9E3779B97F4A7C15 % 2**64 for _, it, _ in sorted(turns)]).tobytes(),
        router=array("q", [rng.randrange(routers) for _ in turns]).tobytes(),
    )
    bounded, unbounded = (
        sum(array("q", result.cached_tokens)) / sum(lengths) for result in replay_job(growing, lambda _done, _of: None)
    )

    assert unbounded > 0.8
    assert bounded > unbounded - 0.005


def test_tiered_uses_a_few_engines_for_each_prefix():
    (result,) = replay_job(job(scenario("t", TieredSettings(replicas=2))), lambda _done, _of: None)
    engines: dict[int, set[int]] = {}
    for number, engine in enumerate(array("q", result.engine)):
        engines.setdefault(number * 7 % 8, set()).add(engine)
    assert {len(found) for found in engines.values()} <= {1, 2}


def test_separate_routers_know_only_their_own_requests():
    one, three = replay_job(
        job(scenario("one", LowestCostSettings()), scenario("three", LowestCostSettings(), routers=3), prompts=150),
        lambda _done, _of: None,
    )
    assert hit_rate(one) > hit_rate(three)


def test_a_task_group_uses_its_own_policy_and_replicas():
    group = TaskGroupConfig("batch", policy=PolicyConfig("batch", 1, RoundRobinSettings()), replicas=("gpu-1", "gpu-2"))
    (result,) = replay_job(job(scenario("g", LowestCostSettings(), groups=(group,))), lambda _done, _of: None)
    engines = array("q", result.engine)
    assert set(engines[1::2]) == {0, 1}
    assert result.reasons["round_robin"] == 200


def test_a_cache_that_is_smaller_than_a_prompt_is_a_reason_and_the_others_are_replayed():
    small, large = replay_job(
        job(scenario("small", LowestCostSettings(), blocks=10), scenario("large", LowestCostSettings())),
        lambda _done, _of: None,
    )
    assert "too small" in small.reason
    assert small.ttft_s == b""
    assert len(array("d", large.ttft_s)) == 400


def test_the_process_writes_results_and_reports_progress(tmp_path):
    document = job(scenario("a", RoundRobinSettings()), scenario("b", LowestCostSettings()))
    (tmp_path / "job").write_bytes(encode(document))

    done = _run(tmp_path, stdin=None)

    assert done.returncode == 0, done.stderr
    results = msgspec.msgpack.decode((tmp_path / "result").read_bytes())
    direct = replay_job(document, lambda _done, _of: None)
    assert [result["cached_tokens"] for result in results] == [result.cached_tokens for result in direct]
    assert json.loads(done.stdout.splitlines()[-1]) == {"done": 800, "of": 800}


def test_anything_else_than_a_job_is_one_line_and_status_2(tmp_path):
    (tmp_path / "job").write_bytes(b"garbage")
    done = _run(tmp_path, stdin=None)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "result").exists()


def test_the_process_stops_when_its_parent_closes_the_input(tmp_path):
    (tmp_path / "job").write_bytes(encode(job(scenario("a", RoundRobinSettings()))))
    assert _run(tmp_path, stdin=subprocess.DEVNULL).returncode == 3
    assert not (tmp_path / "result").exists()


def _run(folder: Path, *, stdin: int | None) -> subprocess.CompletedProcess[str]:
    """Run the command; without ``stdin``, on a pipe that stays open, as from a living parent."""
    with subprocess.Popen(
        [sys.executable, "-m", "routing", "what-if", str(folder / "job"), str(folder / "result")],
        stdin=subprocess.PIPE if stdin is None else stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output, errors = process.stdout.read(), process.stderr.read()
        return subprocess.CompletedProcess([], process.wait(60), output, errors)
