"""Programs that come from the system: a browser, servers that others run. Only the standard library."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from environment import PYTHON, ROOT, alone, quietly, step

PROGRAMS = ROOT / ".programs"  # what Debian's packages bring, unpacked rather than installed
DEBIAN_BUILDS = ("chromium", "chromium-headless-shell")  # programs and packages have the same names


def browser() -> dict[str, str]:
    """Environment that names a Chromium for the tests; FileNotFoundError where none can be had."""
    if "CHROMIUM" in os.environ:
        return {}
    if os.environ.get("REQUIRE_BROWSER") == "1":  # both builds: they differ in what they request and log
        missing = [build for build in DEBIAN_BUILDS if not shutil.which(build)]
        with alone():
            if missing:
                install_packages(*missing)
    if found := next(filter(None, map(shutil.which, (*DEBIAN_BUILDS, "google-chrome"))), None):
        return {"CHROMIUM": found}
    with alone():
        package = "chromium-headless-shell"
        if found := packaged(package, f"usr/bin/{package}"):
            return {"CHROMIUM": str(found), "CHROMIUM_LIBRARY_PATH": libraries(package)}
        with step("Fetching Playwright's own Chromium"), contextlib.suppress(subprocess.CalledProcessError):
            subprocess.check_call([PYTHON, "-m", "playwright", "install", "chromium-headless-shell"])
            return {}
    print("No Chromium could be had: the browser tests will be skipped (REQUIRE_BROWSER=1 makes that a failure).")
    raise FileNotFoundError("chromium")


def with_programs(packages: dict[str, str]) -> dict[str, str]:
    """The environment with programs of Debian's packages on PATH, unpacked where they are not installed.

    They are never installed: an installed web server would start itself. What cannot be had is left out, and whoever
    wants it says so.
    """
    environment = dict(os.environ)
    with alone():
        for program, package in packages.items():
            binary = None if shutil.which(program) else unpacked(package, f"usr/*/{program}")
            if binary:
                environment["PATH"] = f"{binary.parent}:{environment['PATH']}"
                known = environment.get("LD_LIBRARY_PATH")
                environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [libraries(package), known]))
    return environment


def packaged(package: str, binary: str) -> Path | None:
    """A program of a Debian package: installed as root, else unpacked with what it depends on; None if neither."""
    if install_packages(package):
        return Path("/") / binary if (Path("/") / binary).exists() else None
    return unpacked(package, binary)


def install_packages(*packages: str) -> bool:
    """Install Debian packages, which takes root; whether that was tried."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    with contextlib.suppress(subprocess.CalledProcessError), step(f"Installing Debian's {' '.join(packages)}"):
        noninteractive = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        quietly(["apt-get", "update", "-qq"], noninteractive)
        quietly(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages], noninteractive)
    return True


def unpacked(package: str, pattern: str) -> Path | None:
    """Download a package and what it lacks, and unpack all of it below ``.programs``; no root needed.

    The file that matches ``pattern``, or None if the package cannot be had.
    """
    home = PROGRAMS / package
    if shutil.which("apt-get") and not any(home.glob(pattern)):
        with contextlib.suppress(subprocess.CalledProcessError), step(f"Unpacking Debian's {package} below .programs"):
            download(package)
            for archive in (PROGRAMS / "archives").glob("*.deb"):
                quietly(["dpkg", "-x", str(archive), str(home)])
                archive.unlink()
    return next(home.glob(pattern), None)


def download(package: str) -> None:
    """Fetch a package and those of its dependencies that the system lacks, without the system's own folders."""
    for folder in ("lists/partial", "archives/partial"):
        (PROGRAMS / folder).mkdir(parents=True, exist_ok=True)
    private = ["-o", "Debug::NoLocking=1", "-o", f"Dir::State::lists={PROGRAMS}/lists"]
    private += ["-o", f"Dir::Cache::archives={PROGRAMS}/archives"]
    quietly(["apt-get", *private, "-qq", "update"])
    quietly(["apt-get", *private, "-qq", "--download-only", "-y", "--no-install-recommends", "install", package])


def libraries(package: str) -> str:
    """Folders of the shared libraries that were unpacked with a package, for the loader."""
    return ":".join(sorted({str(path.parent) for path in (PROGRAMS / package).rglob("*.so*")}))
