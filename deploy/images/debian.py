"""Debian packages of the images: locked by version and hash, downloaded by apt, unpacked without being installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from environment import step
from images.digests import sha256_of
from programs import apt_get, print_apt_get

HERE = Path(__file__).parent
LOCK = HERE / "debian.lock"
# Debian's top-level folders are links to those below /usr.
MERGED = ("bin", "lib", "lib64", "sbin")


class StaleLockError(Exception):
    """The configured Debian archives no longer have a locked version."""


@dataclass(frozen=True)
class DebianPackage:
    """A locked package."""

    name: str
    version: str
    sha256: str  # of the .deb file

    @property
    def pin(self) -> str:
        return f"{self.name}={self.version}"


@dataclass(frozen=True)
class Base:
    """What ``debian.toml`` says."""

    release: str
    version: str  # of the release
    architecture: str
    python: str
    leave_out: list[str]
    packages: dict[str, dict[str, Any]]

    def contains(self, package: str, path: str) -> bool:
        """Whether images contain this file of a package."""
        if path.startswith("usr/share/doc/"):
            return PurePosixPath(path).name in {"copyright", package}  # a package's folder may be a link
        only = self.packages[package].get("only", ["*"])
        return any(fnmatch(path, pattern) for pattern in only) and not any(
            fnmatch(path, pattern) for pattern in self.leave_out
        )


def read_base() -> Base:
    return Base(**tomllib.loads((HERE / "debian.toml").read_text()))


# --- the lock ----------------------------------------------------------------------------------------------------


def read_lock() -> list[DebianPackage]:
    lines = (line.split() for line in LOCK.read_text().splitlines() if not line.startswith("#"))
    return [DebianPackage(*pin.split("="), digest.removeprefix("sha256:")) for pin, digest in lines]


def newest(names: Sequence[str]) -> list[DebianPackage]:
    """The versions that the configured Debian archives have now."""
    with step("Reading Debian's package lists"):
        apt_get("-qq", "update")
    listed = print_apt_get("download", "--print-uris", *names).splitlines()
    found = [re.search(r" ([^ _]+)_([^ _]+)_[^ _]+\.deb \d+ SHA256:([0-9a-f]{64})", line) for line in listed]
    packages = [DebianPackage(match[1], unquote(match[2]), match[3]) for match in found if match]
    if missing := set(names) - {package.name for package in packages}:
        raise StaleLockError(f"the Debian archives that apt is configured for lack {', '.join(sorted(missing))}")
    return sorted(packages, key=lambda package: package.name)


def write_lock(packages: Sequence[DebianPackage]) -> None:
    lines = ["# Written by `bootstrap.py images --lock`."]
    lines += [f"{package.pin} sha256:{package.sha256}" for package in packages]
    LOCK.write_text("\n".join(lines) + "\n")


# --- archives ----------------------------------------------------------------------------------------------------


def archives(packages: Sequence[DebianPackage], cache: Path) -> dict[DebianPackage, Path]:
    """The .deb files; downloads those that are not in the cache. StaleLockError if one is not available."""
    cache.mkdir(parents=True, exist_ok=True)
    paths = {package: cache / f"{package.sha256}.deb" for package in packages}
    if missing := [package for package, path in paths.items() if not path.exists()]:
        with step(f"Downloading {len(missing)} Debian packages"):
            _download(missing, cache)
    return paths


def _download(packages: Sequence[DebianPackage], cache: Path) -> None:
    folder = cache / "partial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        apt_get("-qq", "update")
        apt_get("-qq", "download", *(package.pin for package in packages), folder=folder)
    except subprocess.CalledProcessError as error:
        raise StaleLockError(
            "apt cannot download the locked versions. If Debian has newer ones, use them with --latest,"
            " or lock them with `bootstrap.py images --lock`."
        ) from error
    downloaded = {sha256_of(path): path for path in folder.glob("*.deb")}
    for package in packages:
        if package.sha256 not in downloaded:
            raise StaleLockError(f"the archive of {package.pin} differs from the lock")
        downloaded[package.sha256].rename(cache / f"{package.sha256}.deb")


def unpack(archive: Path, package: str, base: Base, root: Path) -> None:
    """Add a package's files to a folder."""
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as files,
    ):
        for member in files:
            path = merged(member.name)
            if not member.isdir() and base.contains(package, path):
                _extract(files, member, root, root / path)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    status = root / "var/lib/dpkg/status.d" / package  # scanners look for the installed packages there
    status.parent.mkdir(parents=True, exist_ok=True)
    status.write_bytes(subprocess.check_output(["dpkg-deb", "--field", str(archive)]))


def merged(name: str) -> str:
    """A path of an archive, below /usr if its top-level folder is a link."""
    path = PurePosixPath(name.removeprefix("./"))
    return str("usr" / path if path.parts and path.parts[0] in MERGED else path)


def _extract(files: tarfile.TarFile, member: tarfile.TarInfo, root: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if member.issym():
        target.unlink(missing_ok=True)
        target.symlink_to(member.linkname)
    elif member.islnk():
        shutil.copy2(root / merged(member.linkname), target)
    elif content := files.extractfile(member):
        target.write_bytes(content.read())
        target.chmod(0o755 if member.mode & 0o100 else 0o644)
