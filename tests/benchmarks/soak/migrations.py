"""R22: migrations on tables of millions of rows while others read and write them."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.soak.verdict import Verdict
from tests.benchmarks.telemetry.stand import SERVER
from tests.pace import is_within
from tests.reliability.migrating import LONGEST_S, TABLES, TableUser, before, fill, migrate, url_of


def measure(verdict: Verdict, rows: int) -> None:
    from controlplane.stack.servers import EmbeddedPostgres
    from tests.conftest import running

    with tempfile.TemporaryDirectory(prefix="wpb-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        server = EmbeddedPostgres(folder / "postgres", folder / "pg")
        server.prepare()
        stack.enter_context(running(server.child(*SERVER)))
        database = url_of(server.socket_dir, stack.enter_context(before(server.socket_dir, folder)))
        fill(database, rows)
        verdict.say("tables", f"{len(TABLES)} of {rows:,} rows each")
        with ExitStack() as using:
            users = [using.enter_context(TableUser(database, table)) for table in TABLES]
            begun = time.monotonic()
            migrate(database, folder, within_s=3000)
            took_s = time.monotonic() - begun
        verdict.say("migrations", f"{took_s:.0f} s")
        for user in users:
            longest_s = max(user.durations_s)
            figures = f"{len(user.durations_s):,} reads and writes, {longest_s:.2f} s at most, of {LONGEST_S:g}"
            verdict.holds(user.table.name.partition("_")[2], figures, is_within(longest_s, LONGEST_S))
