"""The wheels of ``make build``: which modules are native, and that each serves on a clean host."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
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


TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"


def only_wheel(tags: str = f"{TAG}-{TAG}-*") -> Path:
    (wheel,) = DIST.glob(f"warmpath-{__version__}-{tags}.whl")
    return wheel


def build(*versions: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deploy/bootstrap.py", "build", *versions]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built() -> str:
    """The sdist and all wheels for this Python; what the command printed about a Python that does not exist."""
    process = build(f"{sys.version_info[0]}.{sys.version_info[1]}", "3.99")
    assert process.returncode == 4, process.stderr
    return process.stdout


def test_a_python_that_is_not_installed_is_named(built):
    assert "No compiled wheel for CPython 3.99" in built


def test_the_compiled_wheel_installs_on_any_recent_linux():
    assert re.search(r"[-.](many|musl)linux_\d+_\d+_", only_wheel().name)
    (metadata,) = (text for name, text in contents(only_wheel()).items() if name.endswith(".dist-info/WHEEL"))
    assert re.search(rb"(?m)^Tag: cp\d+-cp\d+-(many|musl)linux_", metadata)
    assert b"Root-Is-Purelib: false" in metadata


def test_no_native_module_names_a_folder_of_the_machine_that_built_it():
    """As a library path it would be searched on every host."""
    folder = sysconfig.get_config_var("LIBDIR").encode()
    modules = {name: text for name, text in contents(only_wheel()).items() if name.endswith(".so")}
    assert [name for name, text in modules.items() if folder in text and folder != b"/usr/lib"] == []


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_plain_wheel_has_the_same_python_code(built):
    plain, compiled = contents(only_wheel("py3-none-any")), contents(only_wheel())
    assert {name: text for name, text in plain.items() if name.endswith(".py")} == {
        name: text for name, text in compiled.items() if name.endswith(".py")
    }
    assert not [name for name in plain if name.endswith(".so")]


def test_the_sdist_has_what_a_wheel_is_built_from(built):
    with tarfile.open(DIST / f"warmpath-{__version__}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "LICENSE", "routing/__init__.py", "templates/base.html", "manage.py"} <= names
    assert not [name for name in names if name.startswith("tests/") or name.endswith(".so")]


def test_exactly_the_listed_modules_are_native():
    names = zipfile.ZipFile(only_wheel()).namelist()

    native = {name.partition(".")[0] for name in names if name.endswith(".so")}
    named = {str(module) for module in named_modules()}
    assert native == {name.removesuffix(".py") for name in named} | {
        "warmpath__mypyc"
    }  # the library that all native modules share
    assert named <= set(names)  # for tracebacks


async def test_a_router_serves_from_the_wheel_and_its_requirements_alone(built, tmp_path):
    """As described in deploy/README.md, on a host without a compiler: pip prefers the compiled wheel."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "host"], check=True)
    (tmp_path / "no-compiler").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "no-compiler").chmod(0o755)
    without_python = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = without_python | {
        "PATH": f"{tmp_path}/host/bin:{os.environ['PATH']}",
        "CC": str(tmp_path / "no-compiler"),
    }
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

    plain = [python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", only_wheel("py3-none-any")]
    subprocess.run(plain, env=environment, check=True)
    async with (
        fake_replicas(1) as replicas,
        serving(tmp_path, config(replicas), python=python, environment=environment, cwd=tmp_path) as router,
    ):
        assert (await router.chat()).status == 200
        await router.line(f"serving version={__version__} compiled=false python=")
