"""The environment that commands run in: uv, and packages synced to a hash-locked list. Only the standard library."""

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
UV_HOME = ROOT / ".uv"
UV = UV_HOME / "bin" / "uv"
LOCKS = ROOT / "requirements"


def install(lock_name: str, venv: Path = VENV) -> None:
    """Bring an environment to exactly the named lock, unless it stands there already."""
    wanted = LOCKS / f"{lock_name}.txt"
    stamp = venv / "installed"
    if stamp.exists() and stamp.read_text() in acceptable(lock_name):
        return
    with alone():
        install_uv()
        with step(f"Installing the {lock_name} packages into {venv.relative_to(ROOT)}"):
            quiet_env = {**uv_environment(), "UV_PYTHON_DOWNLOADS": "never"}
            subprocess.check_call(
                [UV, "venv", "-q", "--allow-existing", "--python", sys.executable, venv], env=quiet_env
            )
            python = venv / "bin" / "python"
            subprocess.check_call(
                [UV, "pip", "sync", "-q", "--require-hashes", "--compile-bytecode", "--python", python, wanted],
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


# --- saying what happens -----------------------------------------------------------------------------


def quietly(command: list[str], environment: dict[str, str] | None = None, folder: Path = ROOT) -> None:
    """Run a command, and show what it printed only when it fails."""
    captured = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment, cwd=folder, check=False, **captured)
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
def alone(lock: Path = ROOT / ".bootstrap.lock") -> Iterator[None]:
    """Keep two set-ups of one checkout from working at once."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
