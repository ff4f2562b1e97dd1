"""The traffic generator's client-side figures agree with the router's counters."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from routing import schema
from tests.conftest import wait_until
from tests.end_to_end.live_stack import ROOT, free_ports

REQUESTS = 60


@contextmanager
def routing(*arguments: str) -> Iterator[str]:
    """Run ``python -m routing`` for the length of a block; the first URL in its output."""
    command = [sys.executable, "-m", "routing", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        said = next(line for line in process.stdout if "http://" in line)
        yield re.search(r"http://[\w.]+:\d+", said).group()
    finally:
        process.terminate()
        process.stdout.read()
        process.wait(timeout=20)
        process.stdout.close()


def configuration(urls: list[str]) -> bytes:
    policy = schema.PolicyConfig(name="pool", revision=1, settings=schema.PrefixHashSettings())
    replicas = tuple(
        schema.ReplicaConfig(name=f"replica-{index}", url=url, block_tokens=16) for index, url in enumerate(urls)
    )
    groups = ("chat", "coding-assistant", "retrieval", "batch-summaries")
    pool = schema.PoolConfig(
        name="pool",
        policy=policy,
        replicas=replicas,
        groups=tuple(schema.TaskGroupConfig(name=name) for name in groups),
    )
    return schema.dump_snapshot(schema.RouterConfig(hash_secret="0f" * 32, pools=(pool,)), 1).document


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Two stand-in replicas behind a router; its data and admin URLs."""
    data, admin = free_ports(2, spare_after_last=0)
    with ExitStack() as processes:
        urls = [processes.enter_context(routing("replica", "--port", "0", "--prefill-rate", "80000")) for _ in range(2)]
        (tmp_path / "config.json").write_bytes(configuration(urls))
        where = ["--port", str(data), "--admin-port", str(admin), "--state-dir", str(tmp_path / "state")]
        processes.enter_context(routing("serve", "--config", str(tmp_path / "config.json"), *where))
        admin_url = f"http://127.0.0.1:{admin}"
        wait_until(lambda: httpx.get(f"{admin_url}/readyz").status_code == 200, 20, "the router")
        yield f"http://127.0.0.1:{data}", admin_url


def totals(admin_url: str) -> dict[str, float]:
    """The router's counters summed over labels; histogram buckets separately."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{admin_url}/metrics").text):
        for sample in family.samples:
            if "le" not in sample.labels:
                name = sample.name.removeprefix("warmpath_router_")
                sums[name] = sums.get(name, 0) + sample.value
    return sums


def test_the_players_figures_agree_with_the_routers(fleet, tmp_path):
    router, admin = fleet
    report_file = tmp_path / "report.json"
    play = ["play", "--router", router, "--mix", "3", "--rate", "12", "--requests", str(REQUESTS)]
    subprocess.run(
        [sys.executable, "-m", "routing", *play, "--report", str(report_file)], cwd=ROOT, check=True, timeout=90
    )

    player, counted = json.loads(report_file.read_text()), totals(admin)
    assert player["errors"] == {}
    assert counted["requests_total"] == player["requests"] == player["ok"]
    assert counted["usage_reported_total"] == player["usage_reported"]
    assert counted["prompt_tokens_total"] == player["prompt_tokens"]
    assert counted["cached_tokens_total"] == player["cached_tokens"] > 0
    assert counted["ttft_seconds_count"] == player["requests"]
    mean = counted["ttft_seconds_sum"] / counted["ttft_seconds_count"]
    assert mean <= player["ttft_s"]["mean"] * 1.03  # the client waits longer; the player keeps 5 % buckets
