"""Migrations on tables of millions of rows while other sessions read and write them."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.soak.verdict import Verdict
from tests.benchmarks.telemetry.stand import SERVER
from tests.pace import is_within
from tests.reliability.migrating import MAX_WAIT_S, TABLES, TableUser, fill, migrate, migrated_database, url_of


def measure(verdict: Verdict, rows: int) -> None:
    from controlplane.stack.servers import EmbeddedPostgres
    from tests.conftest import running

    with tempfile.TemporaryDirectory(prefix="wpb-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        server = EmbeddedPostgres(folder / "postgres", folder / "pg")
        server.prepare()
        stack.enter_context(running(server.child(*SERVER)))
        database = url_of(server.socket_dir, stack.enter_context(migrated_database(server.socket_dir, folder)))
        fill(database, rows)
        verdict.report("tables", f"{len(TABLES)} of {rows:,} rows each")
        with ExitStack() as users_stack:
            users = [users_stack.enter_context(TableUser(database, table)) for table in TABLES]
            started = time.monotonic()
            migrate(database, folder, within_s=3000)
            took_s = time.monotonic() - started
        verdict.report("migrations", f"{took_s:.0f} s")
        for user in users:
            max_s = max(user.durations_s)
            figures = f"{len(user.durations_s):,} reads and writes, {max_s:.2f} s at most, limit {MAX_WAIT_S:g}"
            verdict.check(user.table.name.partition("_")[2], figures, is_within(max_s, MAX_WAIT_S))
