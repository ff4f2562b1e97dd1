"""The wheel of ``make compile``: which modules are native, and that it serves on a clean host."""

import os
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

from routing import __version__
from tests.compiled.package import DIST, ROOT, named_modules, runs_compiled
from tests.contracts.documents.reading import shown
from tests.fakes.replica import fake_replicas
from tests.routing.proxy.harness import config
from tests.routing.workers.harness import serving

pytestmark = [pytest.mark.usefixtures("compiled"), pytest.mark.timeout(400)]


def only_wheel() -> Path:
    (wheel,) = DIST.glob("*.whl")
    return wheel


def test_exactly_the_listed_modules_are_native():
    names = zipfile.ZipFile(only_wheel()).namelist()

    native = {name.partition(".")[0] for name in names if name.endswith(".so")}
    named = {str(module) for module in named_modules()}
    assert native == {name.removesuffix(".py") for name in named} | {
        "warmpath__mypyc"
    }  # the library that all native modules share
    assert named <= set(names)  # for tracebacks


async def test_a_router_serves_from_the_wheel_and_its_requirements_alone(tmp_path):
    """As described in deploy/README.md."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "host"], check=True)
    without_python = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = without_python | {"PATH": f"{tmp_path}/host/bin:{os.environ['PATH']}"}
    install_commands = [
        command for command in shown((ROOT / "deploy/README.md").read_text()) if "pip install" in command
    ]
    assert len(install_commands) == 2
    requirements, wheel = (
        partial(subprocess.run, command, shell=True, cwd=ROOT, env=environment) for command in install_commands
    )
    if requirements(check=False).returncode and not os.environ.get("REQUIRE_PROGRAMS"):
        pytest.skip("LOUD: the packages of a router host could not be installed, so its wheel was not tried")
    wheel(check=True)
    python = str(tmp_path / "host/bin/python")

    usage = subprocess.run(
        [python, "-m", "routing", "--help"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, check=True
    )
    assert b"route requests to replicas" in usage.stderr
    async with (
        fake_replicas(2) as replicas,
        serving(
            tmp_path, config(replicas), "--workers=2", python=python, environment=environment, cwd=tmp_path
        ) as router,
    ):
        assert (await router.chat()).status == 200
        _, text = await router.admin("GET", "/metrics")
        await router.line(f"serving version={__version__} compiled=true python=")
        assert text.count('compiled="true"') == 1
        assert [runs_compiled(pid) for pid in (router.process.pid, *router.workers)] == [True, True, True]
