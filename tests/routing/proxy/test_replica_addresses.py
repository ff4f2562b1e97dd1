"""Routers connect to replicas only at permitted addresses, whatever a host name resolves to."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import msgspec
import pytest

from routing.schema import HealthCheck, ReplicaNetworks, RouterConfig
from routing.upstream.pool import Address, permitted_hosts
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import config, routed

LOOPBACK = ReplicaNetworks(allowed=("127.0.0.0/8", "::1/128"))
ELSEWHERE = ReplicaNetworks(allowed=("10.0.0.0/8",))
METADATA = "169.254.169.254"
QUICK = HealthCheck(interval_s=0.05, failures=1)


def restricted(configuration: RouterConfig, networks: ReplicaNetworks | None, host: str = "localhost") -> RouterConfig:
    """The same replicas with a host name and permitted networks."""
    (pool,) = configuration.pools
    replicas = tuple(msgspec.structs.replace(it, url=it.url.replace("127.0.0.1", host)) for it in pool.replicas)
    pool = msgspec.structs.replace(pool, replicas=replicas)
    return msgspec.structs.replace(configuration, pools=(pool,), replica_networks=networks)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses of host names, which a test may change."""
    resolved: dict[str, list[str]] = {}
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in resolved:
            return resolve(host, port, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in resolved[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return resolved


@pytest.mark.parametrize(
    ("networks", "is_permitted"),
    [
        (None, True),
        (LOOPBACK, True),
        (ReplicaNetworks(), True),
        (ELSEWHERE, False),
        (ReplicaNetworks(forbidden=("127.0.0.0/8",)), False),
    ],
)
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "2130706433"])
async def test_replicas_get_requests_only_at_permitted_addresses(networks, is_permitted, host, replica, caplog):
    caplog.set_level(logging.WARNING)
    async with routed(restricted(config([replica], health=QUICK), networks, host)) as harness:
        response = await harness.chat()
        if is_permitted:
            assert response.status == 200
            return
        assert response.status in {502, 503}
        await harness.until(lambda: not harness.health.is_up("replica-0"), "its health check to see it too")
        _, shown = await harness.admin("GET", "/admin/replicas")
        assert "its address is not permitted" in shown["replicas"][0]["reason"]
    assert (replica.calls, replica.connections, replica.probes) == ([], 0, 0)
    (line,) = [record.getMessage() for record in caplog.records if "replica_address_rejected" in record.getMessage()]
    assert f"host={host} address=127.0.0.1" in line or f"host={host} address=::1" in line


def test_a_name_is_checked_at_each_connection(names):
    """DNS rebinding: a name resolves to a replica first and to a metadata service later."""

    async def connect_twice() -> None:
        replica = FakeReplica("replica-0")
        await replica.start()
        names["engine.example"] = ["127.0.0.1"]
        configuration = restricted(config([replica], health=HealthCheck(interval_s=60)), LOOPBACK, "engine.example")
        async with routed(configuration) as harness:
            assert (await harness.chat()).status == 200
            names["engine.example"] = [METADATA]
            assert (await harness.chat()).status == 200, "on the connection that is kept alive"
            (idle,) = harness.router.active.connection_pools["replica-0"]._idle
            idle.abort()
            response = await harness.chat()
            assert (response.status, "not permitted" in response.error["message"]) == (502, True)
            assert METADATA not in response.error["message"]
        replica.kill()

    asyncio.run(connect_twice())


@pytest.mark.parametrize(
    "addresses",
    [
        [METADATA],
        ["127.0.0.1", METADATA],
        ["::ffff:169.254.169.254"],
        ["64:ff9b::a9fe:a9fe"],
        ["fe80::1%eth0"],
        ["fd00:ec2::254"],
        ["0.0.0.0"],
        ["8.8.8.8"],
    ],
)
def test_one_forbidden_address_rejects_the_whole_name(addresses, names):
    names["engine.example"] = addresses
    address = Address("http://engine.example:8000", networks=LOOPBACK)
    with pytest.raises(PermissionError):
        asyncio.run(permitted_hosts(address))


def test_permitted_addresses_are_tried_in_the_resolvers_order(names):
    names["engine.example"] = ["127.0.0.2", "127.0.0.1", "127.0.0.2"]
    address = Address("http://engine.example:8000", networks=LOOPBACK)
    assert asyncio.run(permitted_hosts(address)) == ["127.0.0.2", "127.0.0.1"]


async def test_new_networks_apply_from_the_next_configuration(replica):
    configuration = config([replica], health=HealthCheck(interval_s=60))
    async with routed(restricted(configuration, None)) as harness:
        assert (await harness.chat()).status == 200
        await harness.push(restricted(configuration, ELSEWHERE), 2)
        assert (await harness.chat()).status in {502, 503}
        await harness.push(restricted(configuration, LOOPBACK), 3)
        await harness.until(lambda: harness.health.is_up("replica-0"), "it to be asked again")
        assert (await harness.chat()).status == 200
