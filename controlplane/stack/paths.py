"""A supervised process of the local stack, and the paths and URLs of the stack's files and sockets."""

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
    """User and group of a process."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Child:
    """A process to supervise. ``ready`` is polled until it returns True; it is fast and never raises."""

    name: str
    command: Sequence[str]
    ready: Callable[[], bool] = lambda: True
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the parent's
    account: Account | None = None  # None: the parent's
    stop_signal: signal.Signals = signal.SIGTERM
    restart: bool = True  # when it ends by itself
    restart_pause_s: float | None = None  # None: short, and longer after each failure

    def popen_options(self) -> dict[str, object]:
        """Options for ``subprocess``: a new session, and ``stop_signal`` when the parent dies."""
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


SOCKET_PATH_LIMIT = 90  # bytes; the kernel allows 107, and PostgreSQL appends a file name


def secret(data_dir: Path, name: str) -> str:
    """A random secret, created once and stored in a file that only the owner can read."""
    path = data_dir / "secrets" / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return path.read_text(encoding="ascii")
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(48))
    return path.read_text(encoding="ascii")


def server_account() -> Account | None:
    """The account of embedded servers: ``nobody`` for root, None (no change) otherwise."""
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    return Account(nobody.pw_uid, nobody.pw_gid)


def can_reach(path: Path) -> bool:
    """Whether the servers' account can reach ``path``: all directories above it are searchable by others."""
    return server_account() is None or all(folder.stat().st_mode & 0o001 for folder in path.parents if folder.exists())


def server_dir(data_dir: Path, name: str) -> Path:
    """Directory of a server's files: below the data directory if its account can reach that, else in /var/lib."""
    if can_reach(data_dir / name):
        return data_dir / name
    return Path("/var/lib/warmpath") / _digest(data_dir) / name


def socket_dir(data_dir: Path, name: str) -> Path:
    """Directory of a server's socket: next to its files, or in /tmp if that path is too long."""
    folder = server_dir(data_dir, name) / "socket"
    if len(os.fsencode(folder)) <= SOCKET_PATH_LIMIT:
        return folder
    return Path("/tmp") / f"warmpath-{os.getuid()}-{_digest(data_dir)}-{name}"  # noqa: S108 - created 0700, owner checked


def postgres_url(data_dir: Path, role: str = "warmpath") -> str:
    """URL of the embedded PostgreSQL, which listens only on a Unix socket; role ``postgres`` is its owner."""
    return f"postgresql://{role}@/warmpath?host={quote(str(socket_dir(data_dir, 'postgres')), safe='')}"


def valkey_socket(data_dir: Path) -> Path:
    """Unix socket of the embedded Valkey."""
    return socket_dir(data_dir, "valkey") / "valkey.sock"


def valkey_url(data_dir: Path) -> str:
    """URL of the embedded Valkey, as Celery expects it."""
    return f"redis+socket://{quote(str(valkey_socket(data_dir)))}?virtual_host=0"


def _digest(data_dir: Path) -> str:
    return hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
