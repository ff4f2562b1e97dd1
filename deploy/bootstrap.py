#!/usr/bin/env python3
"""Set up everything a fresh machine needs, then run one of the project's commands.

Only the standard library: this file runs before anything is installed, as root or not.

    python3 deploy/bootstrap.py run | test | check | bench | lock | sync

Theory of operation. Three things are made, each skipped when its stamp says that it is current:

1. ``.uv``      the uv installer, from a hash-locked requirement; ``pip install --target`` needs neither
                root nor a virtual environment, and is exempt from PEP 668;
2. ``.venv``    the environment, synced to a hash-locked list (``base`` for run, ``dev`` for the rest);
3. a browser    for ``test`` only: one on PATH, else Debian's package (installed as root, unpacked beside
                the project otherwise), else Playwright's own download.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UV_HOME = ROOT / ".uv"
UV = UV_HOME / "bin" / "uv"
LOCKS = ROOT / "requirements"
PROGRAMS = ROOT / ".programs"  # what Debian's packages bring, unpacked rather than installed
OLDEST = (3, 11)
# Servers that others run, as Debian packages them: program -> package.
BENCH_PROGRAMS = {"nginx": "nginx-light", "wrk": "wrk"}
TEST_PROGRAMS = {name: name for name in ("prometheus", "prometheus-alertmanager")} | {"promtool": "prometheus"}

# Four processes at least: two of them mostly wait, for the live stack and for servers that are away. What each is
# given: tests/side_by_side.py.
SIDE_BY_SIDE = ["-n", str(max(4, min(os.cpu_count() or 1, 8))), "--dist", "loadgroup", "--no-loadscope-reorder"]

COMPILE = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate", "-q"]


def main(arguments: Sequence[str]) -> int:
    """Run the named command; its exit status is ours."""
    commands = {"run": run, "test": test, "check": check, "bench": bench, "lock": lock, "sync": sync}
    if not arguments or arguments[0] not in commands:
        print(f"usage: bootstrap.py {' | '.join(commands)}", file=sys.stderr)
        return 2
    if sys.version_info < OLDEST:
        print(
            f"Python {'.'.join(map(str, OLDEST))} or newer is needed; this is {sys.version.split()[0]}.",
            file=sys.stderr,
        )
        return 2
    os.chdir(ROOT)
    try:
        return commands[arguments[0]](list(arguments[1:]))
    except subprocess.CalledProcessError as error:
        print(f"\nThat step failed with status {error.returncode}: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return error.returncode or 1


def run(arguments: list[str]) -> int:
    """Start the whole stack and stay in the foreground."""
    install("base")
    # exec, so that a Ctrl-C or a TERM reaches the supervisor itself and nothing lingers in between.
    os.execv(PYTHON, [str(PYTHON), "manage.py", "demo", *arguments])


def test(arguments: list[str]) -> int:
    """Run every test, in several processes; arguments go to pytest, and ``-n 0`` among them makes it one process."""
    install("dev")
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of the many programs that tests start compiles it all
    environment.update(with_programs(TEST_PROGRAMS))
    with contextlib.suppress(FileNotFoundError):
        environment.update(browser())
    return subprocess.call([PYTHON, "-m", "pytest", *SIDE_BY_SIDE, "--durations=12", *arguments], env=environment)


def check(_arguments: list[str]) -> int:
    """Run every static check, all of them even when one fails."""
    install("dev")
    return subprocess.call([PYTHON, "deploy/checks.py"])


def bench(arguments: list[str]) -> int:
    """Run the benchmarks and print their tables."""
    install("dev")
    return subprocess.call([PYTHON, "-m", "tests.benchmarks", *arguments], env=with_programs(BENCH_PROGRAMS))


def sync(arguments: list[str]) -> int:
    """Only set up the environment."""
    install(arguments[0] if arguments else "dev")
    return 0


def lock(_arguments: list[str]) -> int:
    """Compile the locks anew from pyproject.toml. They hold versions and hashes, never an address."""
    install_uv()
    everything = ["--extra", "controlplane", "--extra", "cli", "--extra", "embedded"]
    compile_lock("base", *everything)
    compile_lock("router", "-c", "requirements/base.txt")
    compile_lock("dev", *everything, "--group", "dev", "-c", "requirements/base.txt")
    return 0


def compile_lock(name: str, *options: str) -> None:
    subprocess.check_call(
        [UV, "pip", "compile", "pyproject.toml", *options, *COMPILE, "-o", f"requirements/{name}.txt"]
    )


# --- the environment ---------------------------------------------------------------------------------


def install(lock_name: str) -> None:
    """Bring ``.venv`` to exactly the named lock, unless it stands there already."""
    wanted = LOCKS / f"{lock_name}.txt"
    stamp = VENV / "installed"
    if stamp.exists() and stamp.read_text() in acceptable(lock_name):
        return
    with alone():
        install_uv()
        with step(f"Installing the {lock_name} packages into .venv"):
            quiet_env = {**uv_environment(), "UV_PYTHON_DOWNLOADS": "never"}
            subprocess.check_call(
                [UV, "venv", "-q", "--allow-existing", "--python", sys.executable, VENV], env=quiet_env
            )
            subprocess.check_call(
                [UV, "pip", "sync", "-q", "--require-hashes", "--compile-bytecode", "--python", PYTHON, wanted],
                env=quiet_env,
            )
        stamp.write_text(digest(wanted))


def uv_environment() -> dict[str, str]:
    """Trust the certificates that the system trusts, where it has any: a company's own among them."""
    system_has_some = Path("/etc/ssl/certs/ca-certificates.crt").exists()
    return {**({"UV_SYSTEM_CERTS": "1"} if system_has_some else {}), **os.environ}


def acceptable(lock_name: str) -> set[str]:
    """Stamps that will do: ``dev`` holds every pin of ``base``, so ``run`` after ``test`` installs nothing."""
    names = {"base": ("base", "dev")}.get(lock_name, (lock_name,))
    return {digest(LOCKS / f"{name}.txt") for name in names}


def digest(lock_file: Path) -> str:
    """Digest of a lock and of the Python it is installed for."""
    return hashlib.sha256(lock_file.read_bytes() + sys.version.encode()).hexdigest()


def install_uv() -> None:
    wanted = LOCKS / "uv.txt"
    stamp = UV_HOME / "installed"
    if stamp.exists() and stamp.read_text() == digest(wanted):
        return
    with step("Fetching the uv installer"):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--root-user-action=ignore"]
        subprocess.check_call([*pip, "--upgrade", "--target", UV_HOME, "--require-hashes", "-r", wanted])
    stamp.write_text(digest(wanted))


# --- programs that come from the system --------------------------------------------------------------


def browser() -> dict[str, str]:
    """Environment that names a Chromium for the tests; FileNotFoundError where none can be had."""
    if "CHROMIUM" in os.environ:
        return {}
    names = ("chromium", "chromium-headless-shell", "google-chrome")
    if found := next(filter(None, map(shutil.which, names)), None):
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
    if os.geteuid() == 0 and shutil.which("apt-get"):
        with contextlib.suppress(subprocess.CalledProcessError), step(f"Installing Debian's {package}"):
            noninteractive = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            quietly(["apt-get", "update", "-qq"], noninteractive)
            quietly(["apt-get", "install", "-qq", "-y", "--no-install-recommends", package], noninteractive)
        return Path("/") / binary if (Path("/") / binary).exists() else None
    return unpacked(package, binary)


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


# --- saying what happens -----------------------------------------------------------------------------


def quietly(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a command, and show what it printed only when it fails."""
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is being done, and how long it took."""
    print(f"  {what} ...", flush=True)
    begun = time.monotonic()
    yield
    print(f"  {what}: {time.monotonic() - begun:.1f} s", flush=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keep two set-ups of one checkout from working at once."""
    with (ROOT / ".bootstrap.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
