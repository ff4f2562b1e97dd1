"""One process of the local stack: how it is started, how one knows that it is ready, how it is stopped.

Where the local stack keeps its things, all below the data directory where that can be.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pwd
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Account:
    """The user that a process runs as."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Child:
    """A process to supervise. ``ready`` raises nothing and answers quickly; it is asked until it says True."""

    name: str
    command: Sequence[str]
    ready: Callable[[], bool] = lambda: True
    environment: Mapping[str, str] = field(default_factory=dict)  # added to ours
    account: Account | None = None  # None: our own
    stop_signal: signal.Signals = signal.SIGTERM
    restart: bool = True  # started anew when it ends by itself
    restart_pause_s: float | None = None  # before that; None: short, and growing while it keeps ending

    def popen_options(self) -> dict[str, object]:
        """Options for ``subprocess``: an own session, no input, and TERM when the parent dies."""
        options: dict[str, object] = {
            "env": {**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
            "start_new_session": True,
        }
        if self.account:
            options |= {"user": self.account.uid, "group": self.account.gid, "extra_groups": []}
        if sys.platform == "linux":
            options["preexec_fn"] = self._end_with_parent
        return options

    def _end_with_parent(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(self.stop_signal))


SOCKET_PATH_LIMIT = 90  # bytes; the kernel's is 107, and PostgreSQL adds a file name of its own


def secret(data_dir: Path, name: str) -> str:
    """A random value that is made once and kept in a file that only its owner reads."""
    path = data_dir / "secrets" / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return path.read_text(encoding="ascii")
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(48))
    return path.read_text(encoding="ascii")


def unprivileged() -> Account | None:
    """The account that servers drop to; None where we are not root and nothing need be dropped."""
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    return Account(nobody.pw_uid, nobody.pw_gid)


def can_reach(path: Path) -> bool:
    """Whether servers' account may walk down to ``path``: every folder above it must let others through."""
    return unprivileged() is None or all(folder.stat().st_mode & 0o001 for folder in path.parents if folder.exists())


def server_home(data_dir: Path, name: str) -> Path:
    """A folder for a server's files that its account can reach: below the data directory, else in ``/var/lib``."""
    if can_reach(data_dir / name):
        return data_dir / name
    return Path("/var/lib/warmpath") / _digest(data_dir) / name


def socket_dir(data_dir: Path, name: str) -> Path:
    """A folder for a server's socket: beside its files, or a short one where that path is too long."""
    folder = server_home(data_dir, name) / "socket"
    if len(os.fsencode(folder)) <= SOCKET_PATH_LIMIT:
        return folder
    return Path("/tmp") / f"warmpath-{os.getuid()}-{_digest(data_dir)}-{name}"  # noqa: S108 - made 0700, owner checked


def postgres_url(data_dir: Path, role: str = "warmpath") -> str:
    """URL of the embedded PostgreSQL, which listens on a socket alone; ``postgres`` is its owner."""
    return f"postgresql://{role}@/warmpath?host={quote(str(socket_dir(data_dir, 'postgres')), safe='')}"


def valkey_socket(data_dir: Path) -> Path:
    """Socket of the embedded Valkey, which listens on nothing else."""
    return socket_dir(data_dir, "valkey") / "valkey.sock"


def valkey_url(data_dir: Path) -> str:
    """URL of the embedded Valkey in Celery's form."""
    return f"redis+socket://{quote(str(valkey_socket(data_dir)))}?virtual_host=0"


def _digest(data_dir: Path) -> str:
    return hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
