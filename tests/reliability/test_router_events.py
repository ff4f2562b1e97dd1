"""R15: a real router's events are stored exactly once, over kills of the router and outages of the control plane."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.db.models import Count

from controlplane.models import Event, RouterReport
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.tasks import reconcile_routers
from tests.conftest import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]
ROUTER = [sys.executable, "-m", "routing", "serve", "--name", "router-1", "--port", "0", "--admin-port", "0"]
LIVES = 6
NO_BUCKET = "http://127.0.0.1:9"


@contextmanager
def router(url: str, folder, token: str) -> Iterator[subprocess.Popen[bytes]]:
    """A router that is killed at the end of the block."""
    environment = {**os.environ, "WARMPATH_ROUTER_ADMIN_TOKEN": token}
    command = [*ROUTER, "--control-plane", url, "--state-dir", str(folder)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lives() -> int:
    return RouterReport.objects.values("boot").distinct().count()


def test_every_event_of_every_life_is_stored_once(live_server, tmp_path, settings):
    pool = create_pool("default")
    add_replica(pool, name="r1", url=NO_BUCKET)  # nobody is there: each life finds that out
    for life in range(1, LIVES + 1):
        away, before = life % 3 == 0, kept(tmp_path)
        with router(NO_BUCKET if away else live_server.url, tmp_path, settings.ROUTER_ADMIN_TOKEN) as process:
            if away:
                wait_until(lambda least=before: kept(tmp_path) > least, 30, "its finding to be kept", alive=process)
            else:
                wait_until(lambda wanted=life: lives() == wanted, 30, "its first word", alive=process)
                reconcile_routers()
                wait_until(lambda wanted=life: found_down() == wanted, 30, "its finding", alive=process)

    by_boot: dict[str, list[int]] = {}
    for boot, seq in RouterReport.objects.order_by("seq").values_list("boot", "seq"):
        by_boot.setdefault(boot, []).append(seq)
    assert len(by_boot) >= LIVES - 1  # of the last one, which was away, nobody has heard yet
    assert all(seqs == list(range(1, len(seqs) + 1)) for seqs in by_boot.values())
    told = Event.objects.filter(detail__has_key="seq").values("detail__boot", "detail__seq")
    assert set(told.annotate(times=Count("id")).values_list("times", flat=True)) == {1}
    assert told.count() == RouterReport.objects.count()
    kinds = Counter(Event.objects.filter(detail__has_key="seq").values_list("kind", flat=True))
    assert kinds["router_started"] == len(by_boot)


def kept(folder: Path) -> int:
    """Events in the router's spool."""
    file = folder / "events"
    return file.read_bytes().count(b"replica_unreachable") if file.exists() else 0


def found_down() -> int:
    return Event.objects.filter(kind="replica_unreachable").values("detail__boot").distinct().count()
