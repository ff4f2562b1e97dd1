"""The live comparison of routers: its harness on short runs, and the page that shows its results."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest

from tests.benchmarks import comparison
from tests.benchmarks.__main__ import main
from tests.benchmarks.comparison import PAGE, RECORD, page_tables, runs, tables_of
from tests.benchmarks.comparison.routers import PACKAGE, ROUTERS, Router, locked
from tests.benchmarks.comparison.workloads import PREFILL_RATE, WORKLOADS, Request, requests_of
from tests.benchmarks.proxy import free_port, listening
from tests.conftest import wait_until
from tests.contracts.documents.reading import ROOT

COMMENT = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n: still waiting\n\n\r\n"  # and no event
REFUSAL = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.skipif(not shutil.which("haproxy"), reason="haproxy is not installed")
def test_a_short_comparison_measures_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "OUTPUT", tmp_path / "peers.json")
    for name in ("LATE_P50_S", "LATE_P99_S", "MAX_CORES"):
        monkeypatch.setattr(runs, name, 60.0)

    options = ["--workloads", "prefixes", "--routers", "haproxy leastconn", "--engines", "2", "--seconds", "2"]
    assert main(["peers", *options]) == 0

    (cell,) = json.loads((tmp_path / "peers.json").read_text())["cells"]
    assert cell["requests"] > 5
    assert cell["errors"] == cell["unfinished"] == 0
    assert 0 < cell["ttft_p50_s"] <= cell["ttft_p99_s"]
    assert cell["max_to_mean"] >= 1
    assert "| haproxy leastconn | " in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "error"), [(COMMENT, None), (REFUSAL, "http_502")])
async def test_a_request_without_an_event_counts_as_waiting_until_the_end(
    answer: bytes, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "DRAIN_S", 0.2)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        (sent,) = await runs.play([Request(0.0, "s", b"{}")], [server.sockets[0].getsockname()[1]])

    assert (sent.result.error, sent.is_unfinished) == (error, error is None)
    assert sent.wait_s >= 0.2


def test_replicas_that_refuse_to_empty_their_caches_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [b"", b'{"success": true}', b'{"success": false}']  # last first; an empty one says nothing
    monkeypatch.setattr(runs.urllib.request, "urlopen", lambda *_, **__: BytesIO(answers.pop()))

    assert runs.given(["http://a:1/", "http://b:1"]) == [runs.Engine("http://a:1"), runs.Engine("http://b:1")]
    assert not answers


def test_a_fault_refuses_only_its_run_and_names_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router("false", lambda _stand: listening("peer", ["/bin/false"], 1), "", "")
    monkeypatch.setattr(comparison, "given", lambda _urls: [])
    run = partial(comparison.run, WORKLOADS["two"], [], router, Namespace(replicas=["http://replica:8000"]))
    assert run() == {"refused": ["it did not start: peer does not listen: exit status 1"]}

    monkeypatch.setattr(comparison, "given", lambda _urls: Path("/no/such/file").read_text())
    assert run() == {"refused": ["the replicas did not start: FileNotFoundError"]}


def test_nothing_that_a_peer_started_is_left() -> None:
    port = free_port()
    command = f"sleep 300 & exec {sys.executable} -m http.server --bind 127.0.0.1 {port}"
    with listening("peer", ["sh", "-c", command], port) as proxy:
        (child,) = set(proxy.pids()) - {proxy.pid}

    status = Path(f"/proc/{child}/stat")
    wait_until(lambda: not status.exists() or ") Z " in status.read_text(), 5, "the end of what a peer started")


def test_tables_count_the_refused_runs_of_a_router() -> None:
    names = (name for names, _ in comparison.COLUMNS.values() for name in names)
    cell = dict.fromkeys(names, 1.0) | {"workload": "chat", "router": "x", "refused": []}
    table = tables_of({"versions": {}, "cells": [cell, cell | {"refused": ["late"]}]})["chat"]
    assert table[-1].startswith("| x (1 of 2 runs) | 1.0 |")


def test_a_run_is_refused_if_the_client_was_late_or_a_process_was_busy() -> None:
    assert not list(runs.refusals({"router 0": 0.2}, [0.001] * 100))
    reasons = list(runs.refusals({"router 0": 0.7, "engine 0": 0.1}, [0.05] * 100))
    assert [reason.partition(" was")[0] for reason in reasons] == ["router 0", "the client"]


@pytest.mark.parametrize("name", ["chat", "prefixes"])
def test_traffic_is_the_same_every_time_and_has_the_load(name: str) -> None:
    workload, seconds = WORKLOADS[name], 5.0
    requests = requests_of(workload, seconds, 1, 2, None)

    assert requests == requests_of(workload, seconds, 1, 2, None)
    assert requests != requests_of(workload, seconds, 2, 2, None)
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
    assert requests[-1].at_s == pytest.approx(seconds)
    tokens = sum(len(request.body) for request in requests) / 4
    assert tokens == pytest.approx(workload.load * 2 * PREFILL_RATE * seconds, rel=0.4)


@pytest.mark.parametrize(("name", "seed"), [("chat", 3), ("coding", 2)])
def test_conversations_that_share_a_system_prompt_are_not_one_session(name: str, seed: int) -> None:
    sessions = Counter(request.session for request in requests_of(WORKLOADS[name], 30.0, seed, 8, None))

    assert 1 < max(sessions.values()) <= 50


def test_the_page_shows_the_recorded_runs() -> None:
    text = PAGE.read_text()
    tables = page_tables(json.loads(RECORD.read_text()))

    assert all(f"<!-- table {name} -->\n\n" + "".join(f"{line}\n" for line in tables[name]) in text for name in tables)


def test_every_peer_is_locked_and_the_target_compares() -> None:
    assert {router.program for router in ROUTERS.values()} - {"", "nginx", "haproxy"} == set(PACKAGE)
    assert all(locked(package)[0].isdigit() for package in PACKAGE.values())
    dry = subprocess.run(["make", "-n", "peers"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "deploy/bootstrap.py bench peers" in dry.stdout
