"""Compiles the hot modules of the router to native code, with mypyc and the modules' type annotations.

``compile_router`` builds ``dist/warmpath-*.whl``, to be installed on router hosts, and unpacks it into ``.compiled``,
to run and measure it from a checkout. ``pyproject.toml`` lists the native modules. The build uses a copy of the
sources: mypyc writes native modules beside the plain ones, where the plain router would import them. The build packages
are locked in ``requirements/compile.txt``. Only the standard library.
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

from environment import LOCKS, ROOT, exclusive, install, run_quietly, step
from programs import install_packages

COMPILED = ROOT / ".compiled"
BUILD = COMPILED / ".build"  # the dot keeps Python from importing it
DIST = ROOT / "dist"
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "controlplane", "routing", "telemetry")
COMPILER = ("gcc", "libc6-dev")  # Debian packages
# mypyc writes one large C file. At link time gcc optimizes its parts in parallel, which halves the build; the other two
# options let it inline functions that no other library may replace.
FAST_FLAGS = "-flto=auto -fno-semantic-interposition -fvisibility=hidden"
HEADERS = "python3-dev"


class CannotCompileError(Exception):
    """This machine lacks a requirement of the build; the message says what to install."""


def is_compiled() -> bool:
    """Whether ``.compiled`` is the compiled router of the current sources."""
    stamp = BUILD / "made"
    return stamp.exists() and stamp.read_text() == _digest()


def compile_router() -> None:
    """Build the wheel and ``.compiled`` unless both are up to date; CannotCompileError if a requirement is missing."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with exclusive(BUILD / "lock"):
        if is_compiled() and any(DIST.glob("warmpath-*.whl")):
            return
        stamp, digest = BUILD / "made", _digest()
        _check_compiler()
        try:
            install("compile", BUILD / "venv")
        except subprocess.CalledProcessError as error:
            raise CannotCompileError("the packages of requirements/compile.txt could not be fetched.") from error
        stamp.unlink(missing_ok=True)
        with step("Compiling the router, which takes a minute or two"):
            wheel = _build()
        _unpack(wheel)
        stamp.write_text(digest)


def _digest() -> str:
    """Digest of everything that the build depends on."""
    digest = hashlib.sha256(f"{sys.version} {sysconfig.get_platform()}".encode())
    for path in (LOCKS / "compile.txt", ROOT / "deploy" / "compiled.py", *_sources()):
        digest.update(f"{path.relative_to(ROOT)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    for name in SOURCES:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in files if file.is_file() and "__pycache__" not in file.parts)


def _build() -> Path:
    """Build the wheel in a copy of the sources; its path in ``dist``."""
    copy = BUILD / "source"
    shutil.rmtree(copy, ignore_errors=True)
    for source in _sources():
        target = copy / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    output = BUILD / "dist"
    shutil.rmtree(output, ignore_errors=True)
    python = BUILD / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MYPY"))}
    environment["HATCH_BUILD_HOOK_ENABLE_MYPYC"] = "1"
    if "CFLAGS" not in environment and _links_with(FAST_FLAGS.split()):
        environment |= {"CFLAGS": FAST_FLAGS, "LDFLAGS": f"{environment.get('LDFLAGS', '')} {FAST_FLAGS}"}
    run_quietly([str(python), "-m", "hatchling", "build", "-t", "wheel", "-d", str(output)], environment, folder=copy)
    DIST.mkdir(exist_ok=True)
    for previous in DIST.glob("warmpath-*.whl"):
        previous.unlink()
    (wheel,) = output.glob("*.whl")
    return Path(shutil.move(wheel, DIST))


def _unpack(wheel: Path) -> None:
    """Replace the contents of ``.compiled`` by those of the wheel."""
    output = BUILD / "unpacked"
    shutil.rmtree(output, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(output)
    for previous in COMPILED.iterdir():
        if previous != BUILD:
            shutil.rmtree(previous) if previous.is_dir() else previous.unlink()
    for part in output.iterdir():
        part.rename(COMPILED / part.name)


# --- requirements of the build -----------------------------------------------------------------------------------


def _check_compiler() -> None:
    """CannotCompileError without a C compiler or Python's headers. Root on Debian installs both."""
    missing = _missing_packages()
    if missing and install_packages(*missing):
        missing = _missing_packages()
    if missing:
        raise CannotCompileError(
            f"it needs a C compiler and the headers of Python {platform.python_version()}"
            f" (Debian: apt-get install {' '.join(missing)})."
        )


def _missing_packages() -> tuple[str, ...]:
    """Debian packages to install; empty if a module can be compiled."""
    include = Path(sysconfig.get_path("include"))
    headers = () if (include / "Python.h").exists() else (HEADERS,)
    compiler = _compiler()
    if shutil.which(compiler[0]) is None:
        return (*COMPILER, *headers)
    check = [*compiler, "-fsyntax-only", f"-I{include}", "-x", "c", "-"]
    process = subprocess.run(check, input="#include <stdio.h>\n", capture_output=True, text=True, check=False)
    return headers if process.returncode == 0 else (*COMPILER, *headers)


def _links_with(flags: list[str]) -> bool:
    """Whether the compiler can build a shared library with these options."""
    command = [*_compiler(), *flags, "-shared", "-fPIC", "-x", "c", "-", "-o", str(BUILD / "probe.so")]
    source = b"int one(void) { return 1; }\n"
    return subprocess.run(command, input=source, capture_output=True, check=False).returncode == 0


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
