"""TLS with one and with several processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fakes.certificates import Authority
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import CHAT, connect, post
from tests.routing.proxy.harness import config as configured
from tests.routing.workers.harness import Process, serving


async def serials(router: Process, authority: Authority) -> set[int]:
    """What several clients see, all of them answered."""
    found = set()
    for _ in range(8):
        async with connect(router.port, authority.client()) as client:
            assert (await client.ask(post(CHAT))).status == 200
            found.add(client.seen_serial)
    return found


@pytest.mark.parametrize(("workers", "line"), [(1, "certificate_loaded"), (2, "workers_replaced")])
async def test_every_process_uses_a_renewed_certificate_after_sighup(
    workers: int, line: str, replica: FakeReplica, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    first = authority.issue("router")
    options = (f"--workers={workers}", f"--tls-cert={first.path}", f"--tls-key={first.key}")
    async with serving(tmp_path, configured([replica]), *options) as router:
        before = await serials(router, authority)
        second = authority.issue("router")
        router.process.send_signal(signal.SIGHUP)
        await router.line(line)
        after = await serials(router, authority)
        assert await router.end() == 0
    assert (before, after) == ({first.serial}, {second.serial})


@pytest.mark.parametrize("workers", [1, 2])
async def test_every_process_verifies_the_certificates_of_replicas(workers: int, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    replica = FakeReplica("secure")
    replica.tls = authority.issue("replica").server()
    await replica.start()
    try:
        ca = f"--upstream-ca={authority.path}"
        async with serving(tmp_path, configured([replica]), f"--workers={workers}", ca) as router:
            assert [(await router.chat()).status for _ in range(8)] == [200] * 8
        async with serving(tmp_path, configured([replica]), f"--workers={workers}", name="other") as router:
            assert (await router.chat()).status in {502, 503}
    finally:
        replica.kill()
