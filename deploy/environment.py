"""Installs uv, and virtual environments that match a hash-locked list. Only the standard library."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CLIENTS = ROOT / ".clients"
UV_HOME = ROOT / ".uv"
UV = UV_HOME / "bin" / "uv"
LOCKS = ROOT / "requirements"


def install(lock_name: str, venv: Path = VENV) -> None:
    """Install exactly the packages of a lock file into an environment, unless it is up to date."""
    lock_file = LOCKS / f"{lock_name}.txt"
    stamp = venv / "installed"
    if stamp.exists() and stamp.read_text() in valid_stamps(lock_name):
        return
    with exclusive():
        install_uv()
        with step(f"Installing the {lock_name} packages into {venv.relative_to(ROOT)}"):
            quiet_env = {**uv_environment(), "UV_PYTHON_DOWNLOADS": "never"}
            subprocess.check_call(
                [UV, "venv", "-q", "--allow-existing", "--python", sys.executable, venv], env=quiet_env
            )
            python = venv / "bin" / "python"
            subprocess.check_call(
                [UV, "pip", "sync", "-q", "--require-hashes", "--compile-bytecode", "--python", python, lock_file],
                env=quiet_env,
            )
        stamp.write_text(digest(lock_file))


def uv_environment() -> dict[str, str]:
    """Environment in which uv trusts the system's certificates if there are any, for example those of a company."""
    has_system_certificates = Path("/etc/ssl/certs/ca-certificates.crt").exists()
    return {**({"UV_SYSTEM_CERTS": "1"} if has_system_certificates else {}), **os.environ}


def valid_stamps(lock_name: str) -> set[str]:
    """Valid stamps: ``dev`` contains every pin of ``base``, so ``run`` after ``test`` installs nothing."""
    names = {"base": ("base", "dev")}.get(lock_name, (lock_name,))
    return {digest(LOCKS / f"{name}.txt") for name in names}


def digest(lock_file: Path) -> str:
    """Digest of a lock file and of the Python version."""
    return hashlib.sha256(lock_file.read_bytes() + sys.version.encode()).hexdigest()


def install_uv() -> None:
    lock_file = LOCKS / "uv.txt"
    stamp = UV_HOME / "installed"
    if stamp.exists() and stamp.read_text() == digest(lock_file):
        return
    with step("Fetching the uv installer"):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--root-user-action=ignore"]
        subprocess.check_call([*pip, "--upgrade", "--target", UV_HOME, "--require-hashes", "-r", lock_file])
    stamp.write_text(digest(lock_file))


# --- output and locking -----------------------------------------------------------------------------


def run_quietly(command: list[str], environment: dict[str, str] | None = None, folder: Path = ROOT) -> None:
    """Run a command; print its output only if it fails."""
    capture = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.run(command, env=environment, cwd=folder, check=False, **capture)
    if process.returncode:
        print(process.stdout, file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, command)


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Print the name of a step, and its duration at the end."""
    print(f"  {name} ...", flush=True)
    started_at = time.monotonic()
    yield
    print(f"  {name}: {time.monotonic() - started_at:.1f} s", flush=True)


@contextlib.contextmanager
def exclusive(lock: Path = ROOT / ".bootstrap.lock") -> Iterator[None]:
    """Hold a file lock, so that two set-ups of one checkout do not run at once."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
