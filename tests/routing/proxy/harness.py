"""A router in this process on real sockets, a client that sees every byte, and configurations for tests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import ssl
import tempfile
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from cryptography import x509
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import CandidateLoads
from routing.balancing.replicas import HealthRegistry
from routing.health.circuit_breaker import CircuitBreakers
from routing.http.tls import TlsFiles
from routing.observability.decision_log import DecisionRing, Record
from routing.proxy.config_store import Swap
from routing.proxy.router import Router
from routing.response_cache.cache import ResponseCaches
from routing.schema import (
    Access,
    ApiKey,
    BreakerConfig,
    Canary,
    ConcurrencyConfig,
    HealthCheck,
    LeastLoadSettings,
    Limits,
    LoadedSnapshot,
    PolicyConfig,
    PoolConfig,
    PrefixHashSettings,
    ReplicaConfig,
    RoundRobinSettings,
    RouterConfig,
    Settings,
    StreamUsage,
    TaskGroupConfig,
    dump_snapshot,
)
from routing.server import MakeDataPlane, Server, data_plane, running
from routing.settings import ServeSettings
from routing.singleprocess import SingleProcess
from tests.fakes.replica import FakeReplica

DEADLINE_S = 30.0
SOCKET_BYTES = 4096  # socket buffer of a narrow connection; the kernel doubles it
SECRET = "ab" * 16
CHAT = b"/v1/chat/completions"
BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Say something."}]}).encode()


def config(
    replicas: Iterable[FakeReplica],
    *,
    settings: Settings | None = None,
    models: tuple[str, ...] = (),
    groups: tuple[TaskGroupConfig, ...] = (),
    limits: Limits | None = None,
    health: HealthCheck | None = None,
    breaker: BreakerConfig | None = None,
    concurrency: ConcurrencyConfig | None = None,
    policy_revision: int = 1,
    stream_usage: StreamUsage = StreamUsage.REQUEST,
) -> RouterConfig:
    members = tuple(ReplicaConfig(name=item.name, url=item.url, block_tokens=16) for item in replicas)
    policy = PolicyConfig(name="everyday", revision=policy_revision, settings=settings or RoundRobinSettings())
    pool = PoolConfig(
        name="chat",
        policy=policy,
        models=models,
        replicas=members,
        groups=groups,
        health=health or HealthCheck(),
        breaker=breaker or BreakerConfig(),
        concurrency=concurrency,
        stream_usage=stream_usage,
    )
    return RouterConfig(hash_secret=SECRET, pools=(pool,), limits=limits or Limits())


class Harness:
    """A running router."""

    def __init__(self, server: Server, http: aiohttp.ClientSession) -> None:
        self.server = server
        self.http = http

    @property
    def router(self) -> Router:
        data = self.server.data
        assert isinstance(data, SingleProcess)
        return data.router

    @property
    def breakers(self) -> CircuitBreakers:
        return self.router.balancer.breakers

    @property
    def health(self) -> HealthRegistry:
        return self.router.balancer.health

    @property
    def loads(self) -> LoadTracker:
        return self.router.balancer.loads

    @property
    def caches(self) -> ResponseCaches:
        return self.router.services.all_response_caches

    @property
    def port(self) -> int:
        return self.server.data_port

    def connect(self, tls: ssl.SSLContext | None = None) -> AbstractAsyncContextManager[RawClient]:
        return connect(self.port, tls)

    async def chat(self, body: bytes = BODY, headers: Sequence[bytes] = ()) -> Response:
        """Send a chat on its own connection."""
        return await self.send(post(CHAT, body, headers))

    async def send(self, request: bytes) -> Response:
        """Send a request on its own connection."""
        async with self.connect() as client:
            return await client.ask(request)

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The decision records so far."""
        return decision_page(self.router.services.decisions, 0, 99)["decisions"]

    async def admin(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.request(method, self.server.admin_url + path, **options) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def push(self, config: RouterConfig, revision: int) -> tuple[int, Any]:
        return await self.admin("PUT", "/admin/config", data=dump_snapshot(config, revision).document)

    async def until(self, is_met: Any, description: str) -> None:
        """Wait until a condition holds."""
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        while not is_met():
            assert asyncio.get_running_loop().time() < deadline, f"waited {DEADLINE_S} s for {description}"
            await asyncio.sleep(0.005)

    async def at_rest(self) -> None:
        """Wait until no request is in flight, and check that no load remains."""
        await self.until(lambda: self.router.services.in_flight == 0, "all requests to end")
        assert self.router.balancer.loads.audit() == {}
        serving = self.router.active
        for name in serving.connection_pools if serving else ():
            load = self.router.balancer.loads.load(name)
            assert (load.running, load.waiting_tokens) == (0, 0)


@asynccontextmanager
async def routed(
    snapshot: RouterConfig | None,
    *,
    revision: int = 1,
    token: str | None = None,
    state_dir: Path | None = None,
    tls: TlsFiles | None = None,
    admin_tls: TlsFiles | None = None,
    make: MakeDataPlane = data_plane,
    fallbacks: int = 0,
) -> AsyncIterator[Harness]:
    """A router that serves this configuration, or none yet."""
    with tempfile.TemporaryDirectory() as folder:
        file = None
        if snapshot is not None:
            file = Path(folder) / "config.json"
            file.write_bytes(dump_snapshot(snapshot, revision).document)
        settings = ServeSettings(
            name="tested",
            config_file=file,
            control_plane_url=None,
            host="127.0.0.1",
            port=0,
            admin_host="127.0.0.1",
            admin_port=0,
            state_dir=state_dir or Path(folder) / "state",
            admin_token=token,
            tls=tls or TlsFiles(),
            admin_tls=admin_tls or TlsFiles(),
            fallbacks=fallbacks,
        )
        async with running(settings, make) as server, aiohttp.ClientSession() as http:
            yield Harness(server, http)


class Response:
    """A response as received."""

    def __init__(self, head: bytes, body: bytes, raw_body: bytes) -> None:
        self.head = head
        self.body = body  # without chunk sizes
        self.raw_body = raw_body
        line, *lines = head.split(b"\r\n")[:-2]
        self.status = int(line.split()[1])
        pairs = [item.partition(b":") for item in lines]
        self.headers = {name.lower().decode(): value.strip().decode("latin-1") for name, _, value in pairs}

    @property
    def replica(self) -> str:
        return self.headers["x-warmpath-replica"]

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


class RawClient:
    """A client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @property
    def seen_serial(self) -> int:
        """The serial number of the router's certificate."""
        der = self.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(der).serial_number

    async def send(self, *pieces: bytes) -> None:
        async with asyncio.timeout(DEADLINE_S):
            for piece in pieces:
                self.writer.write(piece)
                await self.writer.drain()

    async def ask(self, *pieces: bytes) -> Response:
        """Send a request and read its response, the first of them."""
        await self.send(*pieces)
        return await self.read_response()

    async def read_until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.readuntil(mark)

    async def read_all(self) -> bytes:
        """Read to the end of the connection; a reset counts as the end."""
        data = b""
        async with asyncio.timeout(DEADLINE_S):
            try:
                while piece := await self.reader.read(65536):
                    data += piece
            except ConnectionError:
                pass
        return data

    async def read_response(self, *, bodyless: bool = False) -> Response:
        """Read one whole response; IncompleteReadError if it is incomplete."""
        async with asyncio.timeout(DEADLINE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            blank = Response(head, b"", b"")
            if bodyless or blank.status in {100, 204, 304}:
                return blank
            if "content-length" in blank.headers:
                body = await self.reader.readexactly(int(blank.headers["content-length"]))
                return Response(head, body, body)
            if "transfer-encoding" in blank.headers:
                return Response(head, *await self._chunks())
        body = await self.read_all()
        return Response(head, body, body)

    async def _chunks(self) -> tuple[bytes, bytes]:
        body, framed = bytearray(), bytearray()
        while True:
            line = await self.reader.readuntil(b"\r\n")
            data = await self.reader.readexactly(int(line, 16) + 2)
            framed += line + data
            if line == b"0\r\n":
                return bytes(body), bytes(framed)
            body += data[:-2]


@asynccontextmanager
async def connect(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22, ssl=tls)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def narrow(harness: Harness) -> AsyncIterator[RawClient]:
    """The only client, which does not read yet, on a connection with small kernel buffers."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, ("127.0.0.1", harness.port))
    reader, writer = await asyncio.open_connection(sock=narrow, limit=1 << 22)
    await harness.until(lambda: len(harness.router.clients) == 1, "the client")
    (connection,) = harness.router.clients
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    writer.transport.pause_reading()
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


def post(path: bytes, body: bytes = BODY, headers: Sequence[bytes] = ()) -> bytes:
    lines = b"".join(line + b"\r\n" for line in headers)
    return b"POST %b HTTP/1.1\r\nHost: router\r\n%bContent-Length: %d\r\n\r\n%b" % (path, lines, len(body), body)


def get(path: bytes, headers: Sequence[bytes] = (), method: bytes = b"GET") -> bytes:
    return b"%b %b HTTP/1.1\r\nHost: router\r\n%b\r\n" % (method, path, b"".join(line + b"\r\n" for line in headers))


KEY, OTHER = "sk-" + "a1" * 32, "sk-" + "b2" * 32
MODELS = ("tiny", "large")


def api_key(name: str = "team", secret: str = KEY, **fields: Any) -> ApiKey:
    return ApiKey(name=name, digest=hashlib.sha256(secret.encode()).hexdigest(), **fields)


def with_keys(replicas: Sequence[FakeReplica], *keys: ApiKey, **fields: Any) -> RouterConfig:
    groups = tuple(TaskGroupConfig(name=name) for name in ("coding", "chatting"))
    open_to_all = config(replicas, models=MODELS, groups=groups, **fields)
    return msgspec.structs.replace(open_to_all, access=Access(keys=keys))


def bearer(secret: str = KEY) -> bytes:
    return b"Authorization: Bearer " + secret.encode()


def chat_body(model: str = "tiny", text: str = "Say something.", **fields: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], **fields}).encode()


def record(name: str, blocks: array[int]) -> Record:
    placed = ("chat", "", "", "everyday", 1, "prefix_hash", "a", "affinity")
    return Record(name, 0.0, *placed, 100, 16, None, [blocks], CandidateLoads([]))


def decision_page(ring: DecisionRing, after: int, limit: int, ratio: float = 1.0) -> dict[str, Any]:
    """A page of decision records as JSON."""
    page = ring.page(after, limit, ratio)
    return page.as_json(list(page.rows()))


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    values: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, []).append((sample.labels, sample.value))
    return values


HISTOGRAM = "warmpath_router_policy_ttft_seconds"


def with_canary(replicas: list[FakeReplica], share: float = 0.5, **fields: Any) -> RouterConfig:
    whole = config(replicas, settings=PrefixHashSettings())
    canary = Canary(revision=2, settings=LeastLoadSettings(), share=share, **fields)
    pool = whole.pools[0]
    return replace(whole, pools=(replace(pool, policy=replace(pool.policy, canary=canary)),))


def body(number: int) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": f"Prompt {number}."}]}).encode()


async def ready(_: LoadedSnapshot) -> Swap:
    """Prepare any configuration."""

    async def swap() -> None:
        return

    return swap
