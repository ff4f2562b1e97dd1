"""TLS with one and with several processes."""

from __future__ import annotations

import signal

import pytest

from tests.fakes.certificates import Authority
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import CHAT, config, connect, post
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
async def test_every_process_uses_a_renewed_certificate_after_sighup_and_verifies_those_of_replicas(
    workers, line, tmp_path
):
    authority = Authority(tmp_path)
    replica = FakeReplica("secure")
    replica.tls = authority.issue("replica").server()
    await replica.start()
    first = authority.issue("router")
    certificates = (f"--tls-cert={first.path}", f"--tls-key={first.key}", f"--upstream-ca={authority.path}")
    async with serving(tmp_path, config([replica]), f"--workers={workers}", *certificates) as router:
        before = await serials(router, authority)
        second = authority.issue("router")
        router.process.send_signal(signal.SIGHUP)
        await router.line(line)
        after = await serials(router, authority)
        assert await router.end() == 0
    replica.kill()
    assert (before, after) == ({first.serial}, {second.serial})
