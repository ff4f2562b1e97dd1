"""Programs from Debian packages for tests and benchmarks: a browser, servers. Only the standard library."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from environment import PYTHON, ROOT, exclusive, run_quietly, step

PROGRAMS = ROOT / ".programs"  # Debian packages, unpacked instead of installed
DEBIAN_BUILDS = ("chromium-headless-shell", "chromium")  # programs and packages have the same names; cheapest first


def browser() -> dict[str, str]:
    """Environment variables with the path of a Chromium; FileNotFoundError if none is available."""
    if "CHROMIUM" in os.environ:
        return {}
    if os.environ.get("REQUIRE_BROWSER") == "1":  # both builds, because their requests and logs differ
        missing = [build for build in DEBIAN_BUILDS if not shutil.which(build)]
        with exclusive():
            if missing:
                install_packages(*missing)
    if path := next(filter(None, map(shutil.which, (*DEBIAN_BUILDS, "google-chrome"))), None):
        return {"CHROMIUM": path}
    with exclusive():
        package = "chromium-headless-shell"
        if binary := package_binary(package, f"usr/bin/{package}"):
            return {"CHROMIUM": str(binary), "CHROMIUM_LIBRARY_PATH": libraries(package)}
        with step("Fetching Playwright's own Chromium"), contextlib.suppress(subprocess.CalledProcessError):
            subprocess.check_call([PYTHON, "-m", "playwright", "install", "chromium-headless-shell"])
            return {}
    print("No Chromium is available: browser tests are skipped (REQUIRE_BROWSER=1 makes that a failure).")
    raise FileNotFoundError("chromium")


def with_programs(packages: dict[str, str]) -> dict[str, str]:
    """The environment with the programs on PATH; packages that are not installed are unpacked.

    They are not installed, because an installed web server would start itself. Programs that are not available are left
    out; the tests and benchmarks that need them report it.
    """
    environment = dict(os.environ)
    with exclusive():
        for program, package in packages.items():
            binary = None if shutil.which(program) else unpack(package, f"usr/*/{program}")
            if binary:
                environment["PATH"] = f"{binary.parent}:{environment['PATH']}"
                previous = environment.get("LD_LIBRARY_PATH")
                environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [libraries(package), previous]))
    return environment


def package_binary(package: str, binary: str) -> Path | None:
    """Path of a program of a Debian package, installed by root or else unpacked; None if not available."""
    if install_packages(package):
        return Path("/") / binary if (Path("/") / binary).exists() else None
    return unpack(package, binary)


def install_packages(*packages: str) -> bool:
    """Install Debian packages if run by root; whether an installation was tried."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    with contextlib.suppress(subprocess.CalledProcessError), step(f"Installing Debian packages {' '.join(packages)}"):
        noninteractive = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run_quietly(["apt-get", "update", "-qq"], noninteractive)
        run_quietly(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages], noninteractive)
    return True


def unpack(package: str, pattern: str) -> Path | None:
    """Download a package with missing dependencies and unpack them below ``.programs``, without root.

    Returns the file that matches ``pattern``, or None if the package is not available.
    """
    home = PROGRAMS / package
    if shutil.which("apt-get") and not any(map(Path.is_file, home.glob(pattern))):
        with contextlib.suppress(subprocess.CalledProcessError), step(f"Unpacking Debian's {package} below .programs"):
            download(package)
            for archive in (PROGRAMS / "archives").glob("*.deb"):
                run_quietly(["dpkg", "-x", str(archive), str(home)])
                archive.unlink()
    return next(filter(Path.is_file, home.glob(pattern)), None)


def download(package: str) -> None:
    """Download a package and its missing dependencies, without using the system's folders."""
    apt_get("-qq", "update")
    apt_get("-qq", "--download-only", "-y", "--no-install-recommends", "install", package)


def apt_get(*arguments: str, folder: Path = ROOT) -> None:
    """Run apt-get with package lists and archives of its own below ``.programs``."""
    run_quietly(["apt-get", *_private_folders(), *arguments], folder=folder)


def print_apt_get(*arguments: str) -> str:
    """What such an apt-get prints."""
    return subprocess.check_output(["apt-get", *_private_folders(), *arguments], text=True)


def _private_folders() -> list[str]:
    for folder in ("lists/partial", "archives/partial"):
        (PROGRAMS / folder).mkdir(parents=True, exist_ok=True)
    private = ["-o", "Debug::NoLocking=1", "-o", f"Dir::State::lists={PROGRAMS}/lists"]
    return [*private, "-o", f"Dir::Cache::archives={PROGRAMS}/archives"]


def libraries(package: str) -> str:
    """Folders of a package's unpacked shared libraries, for ``LD_LIBRARY_PATH``."""
    return ":".join(sorted({str(path.parent) for path in (PROGRAMS / package).rglob("*.so*")}))
