"""A PostgreSQL and a Valkey of a benchmark's own, with Django on them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

SERVER = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=256MB")


@dataclass(frozen=True, slots=True)
class Stand:
    """Where it stands, and what a process needs to know to use it."""

    folder: Path
    environment: dict[str, str]


@contextmanager
def standing(*, broker: bool = False) -> Iterator[Stand]:
    """Servers for the length of a block, every migration applied."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings.test"
    from controlplane.stack.postgres import EmbeddedPostgres
    from controlplane.stack.valkey import valkey_child
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
        yield Stand(folder, environment)


def _migrate(socket_dir: Path) -> str:
    """What secrets in the database are sealed with."""
    import django
    from django.conf import settings

    settings.DATABASES["default"]["HOST"] = str(socket_dir)
    settings.LOGGING = {}
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    return str(settings.SECRET_KEY)
