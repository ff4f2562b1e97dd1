"""The router as native code: its hot modules compiled ahead of time by mypyc, which reads the types that they carry.

``compile_router`` makes two things that are the same: ``dist/warmpath-*.whl``, to be installed on router hosts, and
``.compiled``, that wheel unpacked, to run and to measure it from a checkout. Which modules are native is said in
``pyproject.toml``. The wheel is built from a copy of the sources, because the native modules are made beside the plain
ones, where the plain router would find them; everything that builds it is locked in ``requirements/compile.txt``.
Only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

from environment import LOCKS, ROOT, alone, install, quietly, step
from programs import install_packages

COMPILED = ROOT / ".compiled"
BUILDING = COMPILED / ".build"  # no name that Python could import
DIST = ROOT / "dist"
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "controlplane", "routing", "telemetry")
COMPILER = ("gcc", "libc6-dev")  # Debian's packages
HEADERS = "python3-dev"


class NotHereError(Exception):
    """This machine lacks something that compiling takes; the message says what to install."""


def compile_router() -> None:
    """Make the wheel and ``.compiled``, unless both stand as the sources are; NotHereError where that cannot be."""
    BUILDING.mkdir(parents=True, exist_ok=True)
    with alone(BUILDING / "lock"):
        stamp, wanted = BUILDING / "made", _digest()
        if stamp.exists() and stamp.read_text() == wanted and any(DIST.glob("warmpath-*.whl")):
            return
        _check_compiler()
        try:
            install("compile", BUILDING / "venv")
        except subprocess.CalledProcessError as error:
            raise NotHereError("the packages of requirements/compile.txt could not be fetched.") from error
        stamp.unlink(missing_ok=True)
        with step("Compiling the router, which takes a minute or two"):
            wheel = _built()
        _unpack(wheel)
        stamp.write_text(wanted)


def _digest() -> str:
    """Of everything that the result depends on."""
    found = hashlib.sha256(f"{sys.version} {sysconfig.get_platform()}".encode())
    for path in (LOCKS / "compile.txt", *_sources()):
        found.update(f"{path.relative_to(ROOT)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _sources() -> Iterator[Path]:
    for name in SOURCES:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in files if file.is_file() and "__pycache__" not in file.parts)


def _built() -> Path:
    """The wheel, made in a copy of the sources."""
    copy = BUILDING / "source"
    shutil.rmtree(copy, ignore_errors=True)
    for source in _sources():
        target = copy / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    fresh = BUILDING / "dist"
    shutil.rmtree(fresh, ignore_errors=True)
    python = BUILDING / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MYPY"))}
    environment["HATCH_BUILD_HOOK_ENABLE_MYPYC"] = "1"
    quietly([str(python), "-m", "hatchling", "build", "-t", "wheel", "-d", str(fresh)], environment, folder=copy)
    DIST.mkdir(exist_ok=True)
    for former in DIST.glob("warmpath-*.whl"):
        former.unlink()
    (built,) = fresh.glob("*.whl")
    return Path(shutil.move(built, DIST))


def _unpack(wheel: Path) -> None:
    """Put what the wheel holds in the place of what a former one held."""
    fresh = BUILDING / "unpacked"
    shutil.rmtree(fresh, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(fresh)
    for former in COMPILED.iterdir():
        if former != BUILDING:
            shutil.rmtree(former) if former.is_dir() else former.unlink()
    for part in fresh.iterdir():
        part.rename(COMPILED / part.name)


# --- what it takes -----------------------------------------------------------------------------------


def _check_compiler() -> None:
    """NotHereError without a C compiler or Python's headers; root on a Debian gets both."""
    lacking = _lacking()
    if lacking and install_packages(*lacking):
        lacking = _lacking()
    if lacking:
        raise NotHereError(
            f"it takes a C compiler and the headers of Python {platform.python_version()}"
            f" (Debian: apt-get install {' '.join(lacking)})."
        )


def _lacking() -> tuple[str, ...]:
    """Debian's packages to install; nothing where a module could be compiled."""
    include = Path(sysconfig.get_path("include"))
    headers = () if (include / "Python.h").exists() else (HEADERS,)
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return (*COMPILER, *headers)
    check = [*compiler, "-fsyntax-only", f"-I{include}", "-x", "c", "-"]
    done = subprocess.run(check, input="#include <stdio.h>\n", capture_output=True, text=True, check=False)
    return headers if done.returncode == 0 else (*COMPILER, *headers)
