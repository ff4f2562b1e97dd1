"""One admin port for all workers: a configuration is active in all or in none, and state covers all of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from routing.admin.events import FILE as HAPPENINGS
from routing.observability.decision_log import MAX_SHOWN_BLOCKS
from routing.proxy.config_store import CURRENT, PREVIOUS
from routing.schema import LowestCostSettings, WarmUp
from tests.fakes.replica import answering
from tests.routing.proxy.harness import config, samples
from tests.routing.proxy.warm_ups import PREFIXES, body, prefix_text, sent_to_warm, system_prompts, with_warm_up
from tests.routing.workers.harness import EXPLAIN, Process, loaded, serving, worker_of

USAGE = b'{"usage":{"prompt_tokens":431,"prompt_tokens_details":{"cached_tokens":416}}}'


async def replicas_by_worker(router: Process, requests: int = 24) -> dict[str, set[str]]:
    """Where each worker sends the same prompt."""
    chosen: dict[str, set[str]] = {}
    for _ in range(requests):
        answer = await router.chat()
        chosen.setdefault(worker_of(answer), set()).add(answer.replica)
    return chosen


def written(tmp_path: Path) -> set[str]:
    """The configurations in the router's state directory; what happened to it stands there too."""
    return {path.name for path in (tmp_path / "tested").iterdir()} - {HAPPENINGS}


async def test_a_configuration_is_activated_in_all_workers_their_successors_and_after_a_restart(four, tmp_path):
    async with serving(tmp_path, None, "--workers=2") as router:
        assert (await router.admin("GET", "/readyz"))[0] == 503
        assert (await router.chat()).status == 503
        status, ack = await router.push(config(four[:1]), 4)
        assert (status, ack["status"], ack["revision"]) == (200, "ack", 4)
        assert written(tmp_path) == {CURRENT}
        assert set(map(tuple, (await replicas_by_worker(router)).values())) == {("replica-0",)}

        os.kill(router.workers[0], signal.SIGKILL)
        await router.line("worker_died")
        status, _ = await router.push(config(four[1:2]), 5)
        assert status == 200
        await router.line("worker_started", 3)
        chosen = await replicas_by_worker(router, 48)
        assert set(map(tuple, chosen.values())) == {("replica-1",)}
        assert written(tmp_path) == {CURRENT, PREVIOUS}
        _, before = await router.admin("GET", "/admin/config")
        assert (before["revision"], before["source"], before["config"]["hash_secret"]) == (5, "push", "***")
        await router.end(signal.SIGKILL)
    async with serving(tmp_path, None, "--workers=2") as router:
        assert (await router.chat()).replica == "replica-1"
        _, after = await router.admin("GET", "/admin/config")
        assert (after["revision"], after["source"]) == (5, "last_known_good")
        assert after["boot"] != before["boot"]


async def test_no_request_fails_while_configurations_and_workers_change(four, tmp_path):
    async with serving(tmp_path, config(four), "--workers=2") as router, loaded(router) as load:
        router.process.send_signal(signal.SIGHUP)
        for revision in range(2, 12):
            status, _ = await router.push(config(four[revision % 3 :]), revision)
            assert status == 200
            await load.more(20)
        await router.line("workers_replaced")
        await load.more(20)
        assert set(load.outcomes) == {"200"}


async def test_metrics_and_decisions_cover_all_workers_and_the_boot_id_is_the_parents(replica, tmp_path):
    replica.script = answering(USAGE)
    long = json.dumps({"messages": [{"role": "user", "content": "A long story. " * 40_000}]}).encode()
    async with serving(tmp_path, config([replica], settings=LowestCostSettings()), "--workers=2") as router:
        workers = {worker_of(await router.chat()) for _ in range(24)}
        assert len(workers) == 2
        _, text = await router.admin("GET", "/metrics")
        values = {
            (sample.name, sample.labels.get("replica")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert values["warmpath_router_requests_total", "replica-0"] == 24
        assert values["warmpath_router_latency_seconds_count", "replica-0"] == 24
        assert values["warmpath_router_prompt_tokens_total", "replica-0"] == 24 * 431
        assert values["warmpath_router_workers", None] == 2
        assert text.count("warmpath_router_info{") == 1
        _, shown = await router.admin("GET", "/admin/decisions")
        assert f'boot="{shown["boot"]}"' in text
        assert shown["boot"] not in workers

        _, first = await router.admin("GET", "/admin/decisions", params={"limit": "10"})
        _, rest = await router.admin("GET", "/admin/decisions", params={"after": str(first["next"])})
        assert [one["seq"] for one in first["decisions"] + rest["decisions"]] == list(range(1, 25))
        assert len({one["request_id"] for one in first["decisions"] + rest["decisions"]}) == 24
        assert (first["next"], rest["next"], rest["dropped"]) == (10, 24, 0)
        _, none = await router.admin("GET", "/admin/decisions", params={"after": "24"})
        assert (none["decisions"], none["next"], none["dropped"]) == ([], 24, 0)
        status, explained = await router.admin("POST", "/admin/explain", json=EXPLAIN)
        assert (status, explained["replica"]) == (200, "replica-0")
        assert (await router.admin("POST", "/admin/explain", json={}))[0] == 422

        for _ in range(20):
            await router.chat(long)
        _, shown = await router.admin("GET", "/admin/decisions", params={"after": "24"})
    assert [one["seq"] for one in shown["decisions"]] == list(range(25, 45))
    assert sum(len(one["blocks"]) for one in shown["decisions"]) > 2 * MAX_SHOWN_BLOCKS  # a worker has several pages
    assert (shown["next"], shown["dropped"]) == (44, 0)


# --- A warm-up is divided, each prefix once ---


TURNS = 24  # so that whichever worker an opening is of meets it twice


async def test_workers_divide_the_prefixes_of_a_warm_up(three, tmp_path):
    *known, new = three
    async with serving(tmp_path, with_warm_up(known), "--workers=2") as router:
        for _ in range(TURNS):
            for number in range(PREFIXES):
                assert (await router.chat(body(number))).status == 200
        assert (await router.push(with_warm_up(three, WarmUp(time_limit_s=600)), 2))[0] == 200

        async def both_are_done() -> bool:
            _, text = await router.admin("GET", "/metrics")
            seen = samples(text)
            endings = seen.get("warmpath_router_warm_ups_total", [])
            return sum(value for labels, value in endings if labels["ending"] == "complete") == 2

        await router.until(both_are_done, "the warm-ups of both workers")
        own = [number for number in range(PREFIXES) if (await router.chat(body(number))).replica == new.name]
        warmed = sent_to_warm(new)

    assert len(own) > 4
    assert len({call.header(b"x-request-id")[0].split(b"-")[2] for call in warmed}) == 2
    assert len(system_prompts(warmed)) == len(set(system_prompts(warmed)))
    assert set(system_prompts(warmed)) == {prefix_text(number) for number in own}
