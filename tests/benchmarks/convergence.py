"""How soon sixteen real routers run a published configuration: ``python -m tests.benchmarks convergence``.

A separate PostgreSQL, the real services and the worker's task, and routers with sockets and folders in this process.
Measured from the start of a publication until the last acknowledgement is stored.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

ROUTERS = 16
PUBLICATIONS = 100
GOAL_S = 2.0
TOKEN = "router-token-for-tests"


def main() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings.test"
    from controlplane.stack.servers import EmbeddedPostgres
    from tests.conftest import running

    with tempfile.TemporaryDirectory(prefix="wpb-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        server = EmbeddedPostgres(folder / "postgres", folder / "pg")
        server.prepare()
        with running(server.child("fsync=off")):
            seconds = sorted(_publication_s(folder, server.socket_dir))
    print(
        f"{ROUTERS} routers, {PUBLICATIONS} publications, until the last acknowledgement is recorded; goal {GOAL_S:g} s"
    )
    quantiles = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    print(
        "  ".join(
            f"{label} {seconds[min(len(seconds) - 1, int(q * len(seconds)))]:.3f} s" for label, q in quantiles.items()
        )
    )


def _publication_s(folder: Path, socket_dir: Path) -> list[float]:
    import django
    from django.conf import settings

    settings.DATABASES["default"]["HOST"] = str(socket_dir)
    settings.LOGGING = {}
    django.setup()
    from django.core.management import call_command

    from controlplane.services.fleet.pools import create_pool
    from controlplane.services.policies.lifecycle import publish_revision, save_draft
    from controlplane.tasks import reconcile_routers
    from tests.reliability.fleet import fleet

    call_command("migrate", verbosity=0)
    policy = create_pool("default").policies.get()
    durations_s = []
    with fleet(folder, ROUTERS, TOKEN) as routers:
        for router in routers:
            router.announce()
        reconcile_routers()
        for number in range(PUBLICATIONS):
            started = time.perf_counter()
            publish_revision(save_draft(policy, {"strategy": "prefix_hash", "slack_s": 1 + number / 100}).pk)
            reconcile_routers()
            durations_s.append(time.perf_counter() - started)
            if {router.revision for router in routers} != {routers[0].revision}:
                raise AssertionError("not all routers run the same configuration")
    return durations_s
