"""TLS on both sides: the router's certificate, and the verification of replicas."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import aiohttp
import msgspec
import pytest

from routing.http.tls import Tls, TlsError, TlsFiles
from routing.schema import HealthCheck, Limits
from tests.fakes.certificates import Authority, Certificate
from tests.fakes.replica import (
    LAST_CHUNK,
    STREAM_HEAD,
    Call,
    FakeReplica,
    answering,
    chunk,
    fake_replicas,
    resetting,
    sse,
)
from tests.routing.proxy.harness import BODY, CHAT, config, connect, post, routed

LARGE = b'{"text":"' + b"x" * 3_000_000 + b'"}'


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def files(certificate: Certificate, ca: Path | None = None) -> TlsFiles:
    return TlsFiles(str(certificate.path), str(certificate.key), str(ca) if ca else None)


# --- clients ---
async def test_requests_over_tls_are_answered_on_one_connection(authority, replica):
    async with routed(config([replica]), tls=files(authority.issue("router"))) as harness:
        assert harness.server.data_url.startswith("https://")
        async with harness.connect(authority.client()) as client:
            for _ in range(2):
                assert (await client.ask(post(CHAT))).status == 200
            assert client.writer.get_extra_info("ssl_object").version() in {"TLSv1.2", "TLSv1.3"}
        await harness.at_rest()
    assert [call.body for call in replica.calls] == [BODY, BODY]


async def test_large_bodies_and_streams_pass_both_ways(authority, replica):
    async def stream(call: Call) -> None:
        await call.send(STREAM_HEAD, *(chunk(sse({"n": number})) for number in range(200)), LAST_CHUNK)

    async with (
        routed(config([replica]), tls=files(authority.issue("router"))) as harness,
        harness.connect(authority.client()) as client,
    ):
        replica.script = answering(LARGE)
        assert (await client.ask(post(CHAT, BODY + b" " * 3_000_000))).body == LARGE
        replica.script = stream
        await client.send(post(CHAT))
        assert (await client.read_response()).body == b"".join(sse({"n": number}) for number in range(200))


async def test_a_rejected_client_can_read_the_rejection(authority, replica, caplog):
    limits = Limits(max_body_bytes=1024)
    async with routed(config([replica], limits=limits), tls=files(authority.issue("router"))) as harness:
        async with harness.connect(authority.client()) as client:
            assert (await client.ask(post(CHAT, BODY + b" " * 500_000))).status == 413
            assert await client.read_all() == b""
        await harness.until(lambda: not harness.router.clients, "the connection to end")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_incomplete_response_is_not_complete_over_tls(authority, replica):
    async def half(call: Call) -> None:
        await call.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"half")
        )
        call.reset()

    replica.script = half
    async with (
        routed(config([replica]), tls=files(authority.issue("router"))) as harness,
        harness.connect(authority.client()) as client,
    ):
        await client.send(post(CHAT))
        with pytest.raises(asyncio.IncompleteReadError):
            await client.read_response()


@pytest.mark.parametrize("sent", [post(CHAT), b"", b"\x16\x03\x01\x00\x00"])
async def test_clients_without_tls_get_no_http(sent, authority, replica):
    async with routed(config([replica]), tls=files(authority.issue("router"))) as harness:
        async with harness.connect() as client:
            await client.send(sent)
            client.writer.write_eof()
            assert b"HTTP" not in await client.read_all()
        async with harness.connect(authority.client()) as client:
            assert (await client.ask(post(CHAT))).status == 200


def test_a_connection_has_one_handshake(authority):
    """Renegotiation would cost the router more than the client. No client can request it, so the option is checked."""
    listening = Tls(files(authority.issue("router"))).server_context
    assert listening is not None
    assert listening.options & ssl.OP_NO_RENEGOTIATION


async def test_old_versions_are_declined(authority, replica):
    context = authority.client()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with routed(config([replica]), tls=files(authority.issue("router"))) as harness:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            async with harness.connect(context):
                raise AssertionError


async def test_a_renewed_certificate_is_loaded_and_a_broken_one_is_not(authority, replica):
    first = authority.issue("router")
    async with (
        routed(config([replica]), tls=files(first)) as harness,
        harness.connect(authority.client()) as early,
    ):
        serials = []
        renewals = (
            lambda: authority.issue("router"),
            lambda: first.key.write_text("torn"),
            lambda: first.path.write_bytes(authority.issue("another").path.read_bytes()),  # its key is not written yet
        )
        for renew in renewals:
            renew()
            harness.server.data.reload()
            async with harness.connect(authority.client()) as client:
                assert (await client.ask(post(CHAT))).status == 200
                serials.append(client.seen_serial)
        assert (await early.ask(post(CHAT))).status == 200
        assert early.seen_serial == first.serial
    second, *later = serials
    assert first.serial != second
    assert later == [second, second]


async def test_the_admin_port_has_its_own_renewable_certificate(authority, replica):
    first = authority.issue("admin")
    async with routed(config([replica]), token="t" * 32, admin_tls=files(first)) as harness:
        url, headers = harness.server.admin_url, {"Authorization": "Bearer " + "t" * 32}
        assert (url[:8], harness.server.data_url[:7]) == ("https://", "http://")
        context, port = authority.client(), int(url.rpartition(":")[2])
        assert (await harness.admin("GET", "/admin/config", ssl=context, headers=headers))[0] == 200
        assert (await harness.admin("GET", "/admin/config", ssl=context))[0] == 401, "a certificate is no token"
        async with connect(port, authority.client()) as client:
            assert client.seen_serial == first.serial
        second = authority.issue("admin")
        harness.server.reload()
        async with connect(port, authority.client()) as client:
            assert client.seen_serial == second.serial
        with pytest.raises(aiohttp.ClientError):
            await harness.http.get(url.replace("https", "http") + "/healthz")
        with pytest.raises(aiohttp.ClientError):
            await harness.http.get(f"{url}/healthz")  # signed by an unknown authority


def test_unusable_files_are_named(tmp_path, authority):
    secure, other_certificate = authority.issue("one"), authority.issue("other")
    missing = Certificate(tmp_path / "nothing.pem", secure.key, 0)
    for certificate in (Certificate(secure.path, other_certificate.key, 0), missing):
        with pytest.raises(TlsError, match=certificate.path.name):
            Tls(files(certificate))
    with pytest.raises(TlsError, match="nothing"):
        assert Tls(TlsFiles(upstream_ca=str(missing.path))).upstream_context


async def test_a_router_does_not_start_without_its_certificate(tmp_path):
    with pytest.raises(TlsError):
        async with routed(None, tls=TlsFiles(str(tmp_path / "a"), str(tmp_path / "b"))):
            raise AssertionError


# --- replicas ---
@asynccontextmanager
async def secure_replica(certificate: Certificate) -> AsyncIterator[FakeReplica]:
    secure = FakeReplica("secure")
    secure.tls = certificate.server()
    await secure.start()
    try:
        yield secure
    finally:
        secure.kill()


def trusting(authority: Authority) -> TlsFiles:
    return TlsFiles(upstream_ca=str(authority.path))


async def test_a_replica_with_a_valid_certificate_is_used_and_its_connection_kept(authority):
    async with (
        secure_replica(authority.issue("replica")) as secure,
        routed(config([secure], health=HealthCheck(interval_s=0.05)), tls=trusting(authority)) as harness,
    ):
        for body in (BODY, BODY + b" " * 1_000_000):
            assert (await harness.chat(body)).status == 200
        await harness.until(lambda: harness.router.services.checks.status("secure").is_up, "its health check")
        assert secure.connections == 1
        secure.script = resetting
        assert (await harness.chat()).status == 502
        await harness.at_rest()


async def test_a_url_with_an_upper_case_scheme_is_spoken_to_over_tls(authority):
    """Control planes of earlier releases pushed a URL as it was entered."""
    async with secure_replica(authority.issue("replica")) as secure:
        written = config([secure], health=HealthCheck(interval_s=0.05))
        replica = msgspec.structs.replace(
            written.pools[0].replicas[0], url=secure.url.replace("https", "HTTPS"), api_key="engine-key"
        )
        pools = (msgspec.structs.replace(written.pools[0], replicas=(replica,)),)
        async with routed(msgspec.structs.replace(written, pools=pools), tls=trusting(authority)) as harness:
            assert (await harness.chat()).status == 200
            await harness.until(lambda: harness.router.services.checks.status("secure").is_up, "its health check")


@pytest.mark.parametrize("problem", ["stranger", "another host", "too old"])
async def test_a_replica_whose_certificate_is_not_accepted_gets_nothing(problem, tmp_path, authority):
    certificate = {
        "stranger": lambda: Authority(tmp_path, "stranger").issue("replica"),
        "another host": lambda: authority.issue("replica", "127.0.0.2"),
        "too old": lambda: authority.issue("replica", age=timedelta(days=30)),
    }[problem]()
    checks = HealthCheck(interval_s=0.05, failures=100)
    async with (
        secure_replica(certificate) as secure,
        routed(config([secure], health=checks), tls=trusting(authority)) as harness,
    ):
        response = await harness.chat()
        await harness.until(lambda: harness.router.services.checks.status("secure").reason, "its health check")
        reason = harness.router.services.checks.status("secure").reason
        await harness.at_rest()
    assert response.status == 502
    assert "its certificate is not accepted" in response.error["message"]
    assert reason is not None
    assert "its certificate is not accepted" in reason
    assert (secure.calls, secure.probes) == ([], 0)


async def test_by_default_the_systems_authorities_apply(authority):
    async with secure_replica(authority.issue("replica")) as secure, routed(config([secure])) as harness:
        assert (await harness.chat()).status == 502
        assert secure.calls == []


async def test_a_replica_that_moves_to_https_is_a_new_one(authority):
    async with (
        fake_replicas(1) as [plain],
        secure_replica(authority.issue("replica")) as secure,
        routed(config([plain]), tls=trusting(authority)) as harness,
    ):
        assert (await harness.chat()).status == 200
        secure.name = plain.name
        assert (await harness.push(config([secure]), revision=2))[0] == 200
        assert (await harness.chat()).status == 200
        assert (len(plain.calls), len(secure.calls)) == (1, 1)
