"""Builds the compiled router for tests and benchmarks, puts it first on the import path, and names the tests of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from pathspec import GitIgnoreSpec

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / ".compiled"
DIST = ROOT / "dist"
PARTS = ("prompt", "limits", "balancing", "health", "kv_events", "proxy", "replay")
FOLDERS = [*(f"tests/routing/{part}" for part in PARTS), "tests/routing/picker/test_streams.py"]
# Tests of modules that are not compiled (processes, sockets, files, certificates), and replays and processes that check
# results rather than code. They would take more than half of the time; test_wheel.py starts compiled processes too.
EXCLUDED = [
    f"tests/routing/{name}.py"
    for name in (
        "prompt/test_structure",
        "proxy/test_announcements",
        "proxy/test_floods",
        "proxy/test_tls",
        "replay/test_routers",
    )
]
ONLY_COMPILED = "TEST_ONLY_COMPILED"  # environment variable of `make test`: these tests skip the plain router
CANNOT_COMPILE = 3  # exit status of `bootstrap.py compile` on a machine without compiler or packages


class CannotCompileError(Exception):
    """The router cannot be compiled on this machine; the message says why."""


def compile_router() -> None:
    """Compile unless it is up to date; CannotCompileError if that is impossible."""
    command = [sys.executable, "deploy/bootstrap.py", "compile"]
    process = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    if process.returncode == CANNOT_COMPILE:
        raise CannotCompileError(process.stderr.strip().splitlines()[-1])
    if process.returncode:
        raise RuntimeError(process.stderr)


def environment() -> dict[str, str]:
    """Environment in which Python, also with ``-m``, imports the compiled router."""
    path = os.pathsep.join(map(str, (PACKAGES, ROOT)))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TEST_COMPILED": "1"}


def has_compiled_run(path: str) -> bool:
    """Whether the run with the compiled router includes a file, by its path relative to the root."""
    return path not in EXCLUDED and any(path == folder or path.startswith(f"{folder}/") for folder in FOLDERS)


def named_modules() -> list[Path]:
    """Modules that pyproject.toml lists for compilation, relative to the root."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]
    include, exclude = (GitIgnoreSpec.from_lines(hook[name]) for name in ("include", "exclude"))
    modules = sorted(path.relative_to(ROOT) for path in (ROOT / "routing").rglob("*.py"))
    return [path for path in modules if include.match_file(path) and not exclude.match_file(path)]


def runs_compiled(pid: int) -> bool:
    """Whether a process has the native modules mapped."""
    return "warmpath__mypyc" in Path(f"/proc/{pid}/maps").read_text()
