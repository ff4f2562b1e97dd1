"""Runs the commands of deploy/README.md against a real PostgreSQL and Valkey."""

import contextlib
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
import pytest

from tests.conftest import wait_until
from tests.contracts.documents.reading import ROOT, shown
from tests.end_to_end.live_stack import free_ports

BIN = Path(sys.executable).parent
START_S = 120  # of four programs at once, on a machine that runs the other tests too
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def database(postgres: Path) -> Iterator[str]:
    name = f"production_{secrets.token_hex(4)}"
    with psycopg.connect(host=str(postgres), user="postgres", autocommit=True) as server:
        server.execute(f"create database {name}")
        yield f"postgresql://postgres@/{name}?host={postgres}"
        server.execute(f"drop database {name} with (force)")


@pytest.fixture
def environment(database: str, valkey: str, tmp_path: Path) -> dict[str, str]:
    """The documented required variables; without the redirect to HTTPS."""
    return {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "DJANGO_SETTINGS_MODULE": "controlplane.settings.production",
        "WARMPATH_SECRET_KEY": secrets.token_urlsafe(48),
        "WARMPATH_ROUTER_ADMIN_TOKEN": secrets.token_urlsafe(32),
        "WARMPATH_ALLOWED_HOSTS": "127.0.0.1",
        "WARMPATH_DATABASE_URL": database,
        "WARMPATH_REDIS_URL": valkey,
        "WARMPATH_SSL_REDIRECT": "0",
        "WARMPATH_DATA_DIR": str(tmp_path),
        "WARMPATH_STATIC_ROOT": str(tmp_path / "static"),
    }


def documented(word: str) -> str:
    """The documented command that contains these words."""
    commands = shown((ROOT / "deploy/README.md").read_text())
    (command,) = [line for line in commands if set(word.split()) <= set(line.split())]
    return command


def run(word: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        documented(word),
        shell=True,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def started(command: str, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process for the length of a block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", f"exec {command}"], cwd=ROOT, env=environment, stdout=output, stderr=output
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=30)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    return False


def test_the_documented_commands_bring_up_a_fleet(environment, tmp_path):
    web, data, admin = free_ports(3, spare_after_last=0)
    environment |= {"WARMPATH_ROUTER_PORT": str(data), "WARMPATH_ROUTER_ADMIN_PORT": str(admin)}
    run("migrate", environment)
    run("collectstatic", environment)
    run("maintain_partitions", environment)
    assert re.search(r"Sign in as admin with the password \S{12,}", run("seed_fleet", environment))

    gunicorn = documented("gunicorn").replace("8000", str(web)).replace("--workers 2", "--workers 1")
    worker = documented("celery worker")
    beat = f"{documented('beat')} --schedule {tmp_path}/beat"
    router = documented("-m routing serve").replace(":8000", f":{web}").replace("/var/lib/warmpath", str(tmp_path))
    with (
        started(gunicorn, environment, tmp_path / "web.log") as web_process,
        started(worker, environment, tmp_path / "worker.log"),
        started(beat, environment, tmp_path / "beat.log"),
        started(router, environment, tmp_path / "router.log"),
    ):
        wait_until(lambda: answers(f"http://127.0.0.1:{web}/readyz"), START_S, "the web process", alive=web_process)
        wait_until(lambda: answers(f"http://127.0.0.1:{admin}/readyz"), START_S, "a router that has its configuration")
        page = httpx.get(f"http://127.0.0.1:{web}/accounts/login/", trust_env=False)

    assert page.status_code == 200
    assert re.match(r"__Host-csrftoken=\w+; .*Path=/; SameSite=Lax; Secure$", page.headers["Set-Cookie"])
    assert re.search(r'href="/static/css/[\w.-]+\.[0-9a-f]{12}\.css"', page.text), "static files are hashed"
