"""Debian's Prometheus on loopback: real scrapes, TSDB and query API."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

DEADLINE_S = 60.0


def program(name: str) -> str:
    """Path of a program of Debian's prometheus package; skips if the package is unavailable."""
    path = shutil.which(name)
    if path is None:
        if os.environ.get("REQUIRE_PROGRAMS"):
            pytest.fail(f"{name} is not installed, and REQUIRE_PROGRAMS is set")
        pytest.skip(f"{name} is not installed")
    return path


@contextmanager
def running(folder: Path, targets: Sequence[str], *, interval: str = "1s") -> Iterator[str]:
    """A server that scrapes these targets (host:port/path); its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(json.dumps(_config(targets, interval)))  # JSON is YAML
    port = _free_port()
    command = [
        program("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: httpx.get(f"{url}/-/ready", timeout=2).status_code == 200, "Prometheus to be ready")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=DEADLINE_S)


def wait_until(condition, description: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until a condition holds; connection errors count as false."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {deadline_s:g} s for {description}")
        time.sleep(0.05)


def _config(targets: Sequence[str], interval: str) -> dict[str, object]:
    jobs = []
    for number, target in enumerate(targets):
        address, _, path = target.partition("/")
        static = [{"targets": [address], "labels": {"pod": f"pod-{number}"}}]
        jobs.append({"job_name": f"vllm-{number}", "metrics_path": f"/{path}", "static_configs": static})
    return {"global": {"scrape_interval": interval, "scrape_timeout": interval}, "scrape_configs": jobs}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
