"""A real Envoy as a program. Its ports are free ones; tests find them by the names of its listeners."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

DEADLINE_S = 30.0


def program() -> str:
    """The path of Envoy; skips the test if there is none."""
    path = shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))
    if path is None:
        if os.environ.get("REQUIRE_PROGRAMS"):
            pytest.fail("envoy is not installed, and REQUIRE_PROGRAMS is set")
        pytest.skip("envoy is not installed")
    return path


@asynccontextmanager
async def envoy(config: dict[str, Any]) -> AsyncIterator[dict[str, int]]:
    """Run Envoy with one thread; the ports of its listeners, by name."""
    async with running(config) as (ports, _):
        yield ports


@asynccontextmanager
async def running(config: dict[str, Any]) -> AsyncIterator[tuple[dict[str, int], int]]:
    """As ``envoy``, with the id of the process."""
    with tempfile.TemporaryDirectory() as folder:
        file, admin = Path(folder) / "envoy.json", Path(folder) / "admin"
        file.write_text(json.dumps({"admin": {"address": address(0)}, **config}))
        options = ["-c", file, "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
        process = await asyncio.create_subprocess_exec(
            program(), *options, "--admin-address-path", admin, stdout=None, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        log: list[bytes] = []
        reading = asyncio.create_task(_read(process.stderr, log))
        try:
            async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as http:
                ports = await _ports(http, admin, process, log)
            yield ports, process.pid
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await reading


async def _read(stream: asyncio.StreamReader, log: list[bytes]) -> None:
    while line := await stream.readline():
        log.append(line)


async def _ports(
    http: aiohttp.ClientSession, admin: Path, process: asyncio.subprocess.Process, log: list[bytes]
) -> dict[str, int]:
    """The ports of all listeners, once Envoy is ready."""
    while True:
        assert process.returncode is None, b"".join(log).decode()
        try:
            url = f"http://{await asyncio.to_thread(admin.read_text)}"
            async with http.get(f"{url}/ready") as ready, http.get(f"{url}/listeners?format=json") as listeners:
                if ready.status == 200:
                    statuses = (await listeners.json(content_type=None))["listener_statuses"]
                    return {
                        status["name"]: status["local_address"]["socket_address"]["port_value"] for status in statuses
                    }
        except (OSError, ValueError, aiohttp.ClientError):
            pass
        await asyncio.sleep(0.02)


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
