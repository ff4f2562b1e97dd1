"""The Compose file: services are confined, refer to what exists, and run the same commands as the systemd units."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from routing import __version__
from routing.schema import Limits
from tests.contracts.documents.reading import shown
from tests.contracts.documents.test_completeness import is_variable
from tests.end_to_end.production.units import UNITS, options_of

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy/compose.yaml"
DOCUMENT = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = DOCUMENT["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("warmpath-")}
ONE_OFF = {"migrate", "partitions"}
ALL = pytest.mark.parametrize("name", SERVICES)
STANDARD = {"DJANGO_SETTINGS_MODULE", "WEB_CONCURRENCY"}
SECONDS = re.compile(r"(\d+)s")
# What differs between a host and a container: where programs, state and other services are.
DIFFERENCES = (
    (r"/opt/warmpath/current/\.venv/bin/", ""),
    (r"\$\{WARMPATH_BIND\}:\$\{WARMPATH_WEB_PORT\}", "0.0.0.0:8000"),
    (r"\$\{CONTROL_PLANE_URL\}", "http://web:8000"),
    (r"%S/warmpath/beat/", "/tmp/"),
    (r"%S", "/var/lib"),
    (r"%i", "1"),
)


def unit_command(unit: str) -> list[str]:
    """The command of a unit as a container would run it."""
    (line,) = options_of((UNITS / f"{unit}.service").read_text())["ExecStart"]
    for pattern, replacement in DIFFERENCES:
        line = re.sub(pattern, replacement, line)
    return shlex.split(line)


def command_of(service: str) -> list[str]:
    """What a container of a service runs."""
    return [*SERVICES[service].get("entrypoint", ()), *SERVICES[service]["command"]]


@pytest.mark.parametrize(
    ("service", "unit"),
    [
        ("web", "warmpath-web"),
        ("worker", "warmpath-worker"),
        ("beat", "warmpath-beat"),
        ("router-1", "warmpath-router@"),
    ],
)
def test_a_service_runs_the_same_command_as_its_unit(service: str, unit: str) -> None:
    assert command_of(service) == unit_command(unit)


@pytest.mark.parametrize("service", ["web", "worker"])
def test_the_documented_process_is_that_of_the_service(service: str) -> None:
    command = " ".join(command_of(service)).replace("0.0.0.0", "127.0.0.1")
    assert f"`{command}`" in (ROOT / "deploy/README.md").read_text()


def test_the_routers_differ_in_name_and_state_only() -> None:
    first, second = SERVICES["router-1"], SERVICES["router-2"]
    assert yaml.dump(first).replace("router-1", "router-2") == yaml.dump(second)


@ALL
def test_every_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid"} & set(service)
    assert int(service["user"].partition(":")[0]) > 0
    if name in OURS:
        assert service["user"] == "10001:10001"


@ALL
def test_every_service_restarts_and_is_checked_or_runs_once(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == ("no" if name in ONE_OFF else "unless-stopped")
    assert ("healthcheck" in service) == (name not in ONE_OFF)


@ALL
def test_every_reference_exists(name: str) -> None:
    service = SERVICES[name]
    assert set(service.get("secrets", ())) <= set(DOCUMENT["secrets"])
    conditions = service.get("depends_on", {})
    assert set(conditions) <= set(SERVICES)
    for other, dependency in conditions.items():
        wanted = "service_completed_successfully" if other in ONE_OFF else "service_healthy"
        assert dependency["condition"] == wanted
        assert dependency.get("required", True) == ("profiles" not in SERVICES[other])
    for source in (volume.partition(":")[0] for volume in service.get("volumes", ())):
        assert (FILE.parent / source).is_file() if source.startswith(".") else source in DOCUMENT["volumes"]
    files = {f"/run/secrets/{secret}" for secret in service.get("secrets", ())}
    assert {value for value in service.get("environment", {}).values() if value.startswith("/run/secrets/")} == files


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_a_setting(name: str) -> None:
    named = set(OURS[name].get("environment", ())) - STANDARD
    assert {variable for variable in named if not is_variable(variable)} == set()


def test_the_documented_commands_create_every_secret_and_setting(tmp_path: Path) -> None:
    documented = shown((ROOT / "deploy/images/README.md").read_text())
    commands = [command for command in documented if "deploy/secrets" in command or "deploy/.env" in command]
    (tmp_path / "deploy").mkdir()
    subprocess.run(["sh", "-ec", "\n".join(commands)], cwd=tmp_path, check=True, timeout=60)
    for secret in DOCUMENT["secrets"].values():
        path = tmp_path / "deploy" / secret["file"]
        assert path.read_text().strip()
        assert path.stat().st_mode & 0o777 == 0o444, "users of containers read it"
        assert path.parent.stat().st_mode & 0o777 == 0o700
    settings = re.findall(r"^(\w+)=\S+$", (tmp_path / "deploy/.env").read_text(), re.MULTILINE)
    assert settings == re.findall(r"^#   ([A-Z_]+) ", FILE.read_text(), re.MULTILINE)
    assert (tmp_path / "deploy/secrets/postgres_password").read_text().strip() in (
        tmp_path / "deploy/secrets/database_url"
    ).read_text()


def test_only_the_routers_are_reachable_from_outside() -> None:
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert ports == {"web": ["127.0.0.1:8000:8000"], "haproxy": ["8080:8080"]}


def test_no_router_is_killed_before_it_has_drained() -> None:
    for name in ("router-1", "router-2"):
        (grace_s,) = SECONDS.fullmatch(SERVICES[name]["stop_grace_period"]).groups()
        assert int(grace_s) >= Limits().drain_timeout_s + 15


def test_haproxy_finds_every_router_at_its_ports() -> None:
    text = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    variables_of_file = {*re.findall(r'"\$\{(\w+)\}"', text), *re.findall(r"!defined\((\w+)\)", text)}
    environment = SERVICES["haproxy"]["environment"]
    assert set(environment) == variables_of_file
    routers = [value.partition(":")[0] for name, value in environment.items() if re.fullmatch(r"ROUTER_\d", name)]
    assert routers == [name for name in SERVICES if name.startswith("router-")]


def test_defaults_of_haproxy_are_the_ports_of_the_router_units() -> None:
    text = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    presets = dict(re.findall(r"presetenv (\w+) (?:127\.0\.0\.1:)?(\d+)", text))
    for number in ("1", "2"):
        ports = dict(re.findall(r"^WARMPATH_(\w+)=(\d+)", (UNITS / f"router-{number}.env").read_text(), re.MULTILINE))
        assert presets[f"ROUTER_{number}"] == ports["ROUTER_PORT"]
        assert presets[f"ROUTER_{number}_ADMIN_PORT"] == ports["ROUTER_ADMIN_PORT"]


def test_the_documented_builds_make_the_images_of_this_release() -> None:
    tags = {service["image"].replace("${WARMPATH_VERSION:-", "").rstrip("}") for service in OURS.values()}
    assert tags == {f"warmpath-controlplane:{__version__}", f"warmpath-router:{__version__}"}
    built = set(re.findall(r"docker build .* -t (\S+) \.", (ROOT / "deploy/images/Dockerfile").read_text()))
    assert built == tags
