"""Python packages of the images: the wheels of a lock file, downloaded by hash and unpacked."""

from __future__ import annotations

import configparser
import email
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from fnmatch import fnmatch
from pathlib import Path

from compiled import build_environment
from environment import run_quietly, step
from images.contents import WITHOUT

HERE = Path(__file__).parent
GLIBC_MINOR = 36  # of the base's glibc 2.36
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC_MINOR, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


@dataclass(frozen=True)
class Wheel:
    """A wheel file and what its metadata says."""

    path: Path
    metadata: Message
    licence_files: dict[str, str]  # text by file name

    @property
    def name(self) -> str:
        return re.sub(r"[-_.]+", "-", self.metadata["Name"]).lower()

    @property
    def version(self) -> str:
        return str(self.metadata["Version"])


def download(lock: Path, python_version: str, cache: Path, build_python: Path) -> list[Wheel]:
    """The wheels of a lock for the images' Python and platform. ``build_python`` has pip and packaging.

    Their markers are evaluated here, because pip evaluates them for the Python that runs it.
    """
    requirements = subprocess.check_output([build_python, HERE / "applicable.py", lock, python_version], text=True)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "requirements.txt").write_text(requirements)
    stamp = cache / "downloaded"
    if not stamp.exists():
        with step(f"Downloading the wheels of {lock.name}"):
            _pip_download(build_python, python_version, cache)
        stamp.touch()
    return [read_wheel(path) for path in sorted(cache.glob("*.whl"))]


def _pip_download(build_python: Path, python_version: str, cache: Path) -> None:
    abi = "cp" + "".join(python_version.split(".")[:2])
    command = [str(build_python), "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary=:all:", "--implementation=cp", f"--python-version={abi[2:]}"]
    command += [f"--abi={name}" for name in (abi, "abi3", "none")]
    command += [f"--platform={name}" for name in PLATFORMS]
    run_quietly([*command, "-d", str(cache), "-r", str(cache / "requirements.txt")], build_environment())


def read_wheel(path: Path) -> Wheel:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        folder = metadata.removesuffix("METADATA")
        licences = [name for name in names if name.startswith(folder) and _is_licence(name)]
        texts = {name.removeprefix(folder): archive.read(name).decode("utf-8", "replace") for name in licences}
        return Wheel(path, email.message_from_bytes(archive.read(metadata)), texts)


def _is_licence(name: str) -> bool:
    return "/licenses/" in name or bool(re.search(r"/(LICEN[CS]E|COPYING|NOTICE|AUTHORS)[^/]*$", name))


# --- installation ------------------------------------------------------------------------------------------------


def unpack(wheel: Path, packages: Path, programs: Path, python: str) -> None:
    """Install a wheel: its modules into one folder, its programs into another, to be run by ``python``."""
    programs.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            if not item.is_dir() and not any(fnmatch(item.filename, pattern) for pattern in WITHOUT):
                target = _target(item.filename, packages, programs)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(item) as source, target.open("wb") as output:
                    shutil.copyfileobj(source, output)
                target.chmod(0o755 if item.external_attr >> 16 & 0o100 else 0o644)
        entry_points = [archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt")]
    for text in entry_points:
        for name, reference in _console_scripts(text):
            _write_program(programs / name, reference, python)


def _target(name: str, packages: Path, programs: Path) -> Path:
    """Where a file of a wheel belongs, by the specification of the binary distribution format."""
    if match := re.fullmatch(r"[^/]+\.data/(\w+)/(.+)", name):
        scheme, rest = match.groups()
        prefix = programs.parent
        folders = {"purelib": packages, "platlib": packages, "scripts": programs, "data": prefix}
        return folders.get(scheme, prefix / "include") / rest
    return packages / name


def _console_scripts(text: str) -> Iterator[tuple[str, str]]:
    parser = configparser.ConfigParser(delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names are case-sensitive
    parser.read_string(text)
    if parser.has_section("console_scripts"):
        yield from parser.items("console_scripts", raw=True)


def _write_program(path: Path, reference: str, python: str) -> None:
    module, _, attribute = reference.partition("[")[0].strip().partition(":")
    lines = [f"#!{python}", "import sys", f"from {module} import {attribute.partition('.')[0]}"]
    path.write_text("\n".join([*lines, f"sys.exit({attribute}())", ""]))
    path.chmod(0o755)
