"""Checks ``make clients`` as part of ``make test``, as far as that is possible without the clients' packages."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from tests.contracts.documents.reading import ROOT

SUITE = ROOT / "tests" / "clients"
CLIENTS = {"aiperf", "anthropic", "litellm", "openai"}


def test_the_lock_has_the_clients_and_the_routers_own_versions():
    pins = {name: (ROOT / "requirements" / name).read_text() for name in ("clients.txt", "router.txt")}
    versions = {name: dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE)) for name, text in pins.items()}
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["clients"]

    assert set(versions["clients.txt"]) >= CLIENTS
    assert {re.split(r"[>=<]", requirement)[0] for requirement in group} >= CLIENTS
    assert versions["router.txt"].items() <= versions["clients.txt"].items()
    assert "://" not in pins["clients.txt"]


def test_each_client_has_tests_that_import_it():
    imported = {
        (node.module or "").partition(".")[0]
        if isinstance(node, ast.ImportFrom)
        else node.names[0].name.partition(".")[0]
        for path in SUITE.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert CLIENTS - {"aiperf"} <= imported  # a command
    assert '"aiperf"' in (SUITE / "test_aiperf.py").read_text()


def test_the_target_runs_the_suite_in_an_environment_of_its_own():
    dry = subprocess.run(["make", "-n", "clients"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "deploy/bootstrap.py clients" in dry.stdout
    usage = subprocess.run(
        [sys.executable, "deploy/bootstrap.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "clients" in usage.stderr
    assert (SUITE / "pytest.ini").is_file()


def test_without_the_clients_nothing_of_the_suite_is_collected():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", str(SUITE)]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert collected.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, collected.stdout + collected.stderr


def test_its_server_starts_and_compares(tmp_path):
    from tests.clients.servers import plain, router_config, router_process
    from tests.routing.standin.replica_process import replica_process

    with replica_process() as replica, router_process(tmp_path, router_config([replica], [replica])) as url:
        assert url.startswith("http://127.0.0.1:")
    usage = {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": None}
    same = {"input_tokens": 7, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    assert plain({"id": "a", "usage": usage}) == plain({"id": "b", "usage": same})
