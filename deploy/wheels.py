"""Builds what is published: the sdist, a plain wheel for every platform, and a compiled wheel for each Python.

``pip install warmpath`` takes the compiled wheel of its Python and platform if there is one, else the plain wheel;
neither needs a compiler. Each compiled wheel is built by its own Python with ``bootstrap.py wheel``. Pythons are found
on PATH and among pyenv's versions. Only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from compiled import (
    BUILD,
    DIST,
    SOURCES,
    build_environment,
    compiled_wheel,
    copy_sources,
    install_build_packages,
    sources,
)
from environment import ROOT, exclusive, run_quietly, step

VERSIONS = ("3.11", "3.12", "3.13")  # of CPython
SDIST_SOURCES = (*SOURCES, "templates", "static", "manage.py", "deploy", "requirements", "Makefile")
SDIST_SOURCES += ("CHANGELOG.md", "SECURITY.md")


def build_wheels(versions: Sequence[str] = VERSIONS) -> list[str]:
    """Build everything; the versions that have no compiled wheel, because no such Python is installed."""
    build_plain()
    found = {version: interpreter(version) for version in versions}
    for python in filter(None, found.values()):
        if python == sys.executable:
            compiled_wheel()
        else:
            subprocess.check_call([python, "deploy/bootstrap.py", "wheel"], cwd=ROOT)
    return [version for version, python in found.items() if python is None]


def build_plain() -> Path:
    """Build the sdist and, from its contents, the plain wheel, unless they are up to date; the path of the wheel."""
    home = BUILD / "plain"
    home.mkdir(parents=True, exist_ok=True)
    with exclusive(home / "lock"):
        stamp, digest = home / "made", _digest()
        built = [*DIST.glob("warmpath-*-py3-none-any.whl"), *DIST.glob("warmpath-*.tar.gz")]
        if len(built) == 2 and stamp.exists() and stamp.read_text() == digest:
            return built[0]
        with step("Building the sdist and the plain wheel"):
            wheel = _build_plain(home, built)
        stamp.write_text(digest)
        return wheel


def _build_plain(home: Path, previous: list[Path]) -> Path:
    python, copy, output = install_build_packages(), home / "source", home / "dist"
    copy_sources(copy, SDIST_SOURCES)
    shutil.rmtree(output, ignore_errors=True)
    command = [str(python), "-m", "hatchling", "build", "-d", str(output)]
    run_quietly([*command, "-t", "sdist", "-t", "wheel"], build_environment(), folder=copy)
    DIST.mkdir(exist_ok=True)
    for path in previous:
        path.unlink()
    shutil.move(next(output.glob("*.tar.gz")), DIST)
    return Path(shutil.move(next(output.glob("*.whl")), DIST))


def _digest() -> str:
    digest = hashlib.sha256()
    for path in sources(SDIST_SOURCES):
        digest.update(f"{path.relative_to(ROOT)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


# --- Pythons -----------------------------------------------------------------------------------------------------


def interpreter(version: str) -> str | None:
    """Path of a CPython of a version such as ``3.12``; this process's own if it fits; None if none is installed."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    return next((path for path in _candidates(version) if _runs(path, version)), None)


def _candidates(version: str) -> Iterator[str]:
    if path := shutil.which(f"python{version}"):
        yield path
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python{version}")), reverse=True)


def _runs(path: str, version: str) -> bool:
    """Whether the program is that Python: a pyenv shim exists for versions that are not active, and only fails."""
    code = "import sys; print(sys.implementation.name, '%d.%d' % sys.version_info[:2])"
    process = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    return process.returncode == 0 and process.stdout.split() == ["cpython", version]
