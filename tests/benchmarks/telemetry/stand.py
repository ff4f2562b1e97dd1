"""PostgreSQL, Valkey, Django and stand-in replicas for a benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

SERVER = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=256MB")


@dataclass(frozen=True, slots=True)
class Stand:
    """Addresses of the servers and the environment for processes."""

    folder: Path
    environment: dict[str, str]

    @staticmethod
    def empty() -> None:
        """Remove the rows of the benchmark before."""
        from tests.conftest import empty_tables

        empty_tables()


@contextmanager
def standing(*, broker: bool = False) -> Iterator[Stand]:
    """Servers for the length of a block, fully migrated."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings.test"
    from controlplane.stack.servers import EmbeddedPostgres, valkey_child
    from tests.conftest import running

    with tempfile.TemporaryDirectory(prefix="wpb-") as name, ExitStack() as servers:
        folder = Path(name)
        folder.chmod(0o755)
        server = EmbeddedPostgres(folder / "postgres", folder / "pg")
        server.prepare()
        servers.enter_context(running(server.child(*SERVER)))
        if broker:
            servers.enter_context(running(valkey_child(folder / "valkey" / "socket")))
        secret_key = _migrate(server.socket_dir)
        environment = {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings.dev",
            "WARMPATH_SECRET_KEY": secret_key,
            "WARMPATH_DATA_DIR": str(folder / "data"),
            "WARMPATH_DATABASE_URL": f"postgresql://postgres@/warmpath?host={server.socket_dir}",
            "WARMPATH_REDIS_URL": f"redis+socket://{folder}/valkey/socket?virtual_host=0",
        }
        try:
            yield Stand(folder, environment)
        finally:
            from django.db import connections

            connections.close_all()  # another stand has another server


@contextmanager
def stand_in_replicas() -> Iterator[int]:
    """A process that is all replicas; its port."""
    command = [sys.executable, "-m", "tests.benchmarks.telemetry.replicas"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def server_s() -> float:
    """CPU seconds of PostgreSQL for this process's connection."""
    from django.db import connection

    connection.ensure_connection()
    stat = Path(f"/proc/{connection.connection.info.backend_pid}/stat")
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _migrate(socket_dir: Path) -> str:
    import django
    from django.conf import settings

    settings.DATABASES["default"]["HOST"] = str(socket_dir)
    settings.LOGGING = {}
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    return str(settings.SECRET_KEY)
