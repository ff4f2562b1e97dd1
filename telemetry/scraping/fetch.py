"""HTTP requests to targets: many at a time, one exposition (with limits), and the version of an engine."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, Self, TypeVar

import httpx
from django.db.models import F, Q

from controlplane.egress import (
    EgressDeniedError,
    FetchedResponse,
    ResponseTooLargeError,
    fetch_async,
    fleet_rules,
    guarded_async_client,
)
from controlplane.services.fleet.kv_event_sources import read_event_sources, record_event_sources
from telemetry.metrics.engine_names import TENSORRT_LLM_PATH
from telemetry.metrics.exposition import MAX_BYTES, ExpositionError
from telemetry.models import Health, ScrapeState
from telemetry.scraping.merge import Sample, ScrapeFailure, ScrapeResult

HEADERS = {"Accept": "text/plain;version=0.0.4"}
JSON_AT_METRICS: set[str] = set()  # URLs that served JSON: trtllm-serve has its exposition at another path
MAX_REMEMBERED = 4096
RECHECK_AFTER = timedelta(hours=1)
VERSIONS_PER_RUN = 64
VERSION_S = 2.0
MAX_FACTS_BYTES = 65_536
_is_version = re.compile(r"[0-9A-Za-z.+_-]{1,40}").fullmatch
T = TypeVar("T")


class Requests(Generic[T]):
    """Concurrent requests on an event loop that runs only while the caller waits for results.

    Results can so be written to the database between two batches, and a target that hangs delays only its own result.
    Every request has a connection of its own: vLLM closes idle connections after 5 s.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._pending: set[asyncio.Task[T]] = set()
        self.client = guarded_async_client(fleet_rules())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.client.aclose())
        self._runner.close()

    def start(self, request: Coroutine[Any, Any, T], name: str = "") -> None:
        """Start a request; the next batch runs it."""
        self._pending.add(self._runner.get_loop().create_task(request, name=name))

    def batches(self, collect_s: float = 0.0) -> Iterator[set[asyncio.Task[T]]]:
        """Finished requests: each batch has the first to finish, and those of the ``collect_s`` seconds after it."""
        while self._pending:
            done, self._pending = self._runner.run(_next_batch(self._pending, collect_s))
            yield done


async def _next_batch(
    pending: set[asyncio.Task[T]], collect_s: float
) -> tuple[set[asyncio.Task[T]], set[asyncio.Task[T]]]:
    done, waiting = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    return await asyncio.wait(pending, timeout=collect_s) if collect_s and waiting else (done, waiting)


async def scrape(
    client: httpx.AsyncClient,
    url: str,
    read: Callable[[str], Sample],
    *,
    deadline_s: float,
    max_bytes: int = MAX_BYTES,
) -> ScrapeResult[Sample] | ScrapeFailure:
    """Scrape one exposition. Errors of the target are returned, not raised."""
    started_s = time.monotonic()
    try:
        response = await _fetch_exposition(client, url, deadline_s, max_bytes)
    except httpx.HTTPError as error:
        refused = isinstance(error, httpx.ConnectError) and _is_connection_refused(error)
        return ScrapeFailure(failure_reason(error, deadline_s), refused=refused)
    except httpx.InvalidURL:
        return ScrapeFailure("its address is not a valid URL")
    scraped_s, duration_s = time.time(), time.monotonic() - started_s
    if response.status != httpx.codes.OK:
        return ScrapeFailure(f"its /metrics responds with status {response.status}")
    try:
        return ScrapeResult(scraped_s, read(response.body.decode("utf-8")), duration_s)
    except (ExpositionError, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, ExpositionError) else "the text is not UTF-8"
        return ScrapeFailure(f"its /metrics is not a valid exposition: {reason}")


async def _fetch_exposition(client: httpx.AsyncClient, url: str, deadline_s: float, max_bytes: int) -> FetchedResponse:
    """Fetch the URL or, where that is JSON, the path of TensorRT-LLM's exposition, within one deadline."""
    tensorrt_url = url.removesuffix("/metrics") + TENSORRT_LLM_PATH
    ends_s = time.monotonic() + deadline_s

    async def get(address: str) -> FetchedResponse:
        left_s = max(0.05, ends_s - time.monotonic())
        return await fetch_async(client, "GET", address, deadline_s=left_s, max_bytes=max_bytes, headers=HEADERS)

    if url in JSON_AT_METRICS:
        response = await get(tensorrt_url)
        if response.status != httpx.codes.OK:
            JSON_AT_METRICS.discard(url)  # another engine may serve this address by now
        return response
    response = await get(url)
    if response.status == httpx.codes.OK and response.body[:1] in {b"[", b"{"}:
        if len(JSON_AT_METRICS) < MAX_REMEMBERED:
            JSON_AT_METRICS.add(url)
        return await get(tensorrt_url)
    return response


def failure_reason(error: httpx.HTTPError, deadline_s: float) -> str:
    """Why there is no response, in text that contains no URL."""
    if isinstance(error, httpx.TimeoutException):
        return f"no complete response within {deadline_s:g} s"
    if isinstance(error, ResponseTooLargeError):
        return "the response is too long, or compressed"
    if isinstance(error, EgressDeniedError):
        return "its address is in no network that WARMPATH_FLEET_NETWORKS allows"
    if isinstance(error, httpx.ConnectError):
        return "the connection was refused" if _is_connection_refused(error) else "it cannot be reached"
    return f"no usable response ({type(error).__name__})"


def _is_connection_refused(error: BaseException | None) -> bool:
    """Whether the host itself refused the connection: nothing listens there."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine reports outside its metrics: its version and its KV event sources."""

    state_id: int
    replica_id: int
    version: str  # "" where it cannot be read
    event_sources: dict[str, Any] | None
    has_sources: bool  # whether it responded to ``GET /kv_event_sources``


def check_versions(now: datetime) -> int:
    """Read ``/version`` and ``/kv_event_sources`` of vLLM replicas where they are unknown or may have changed.

    Returns how many reported a version. The metrics lack the version, which decides how far the hit rate is reliable.
    Neither request carries a credential.
    """
    outdated = Q(version_at=None) | Q(version_at__lt=F("restarted_at")) | Q(version_at__lt=now - RECHECK_AFTER)
    due = list(
        ScrapeState.objects.filter(outdated, engine="vllm", health=Health.UP, replica__isnull=False)
        .order_by("version_at")
        .values_list("pk", "replica", "replica__url", "replica__data_parallel_size")[:VERSIONS_PER_RUN]
    )
    if not due:
        return 0
    reported = 0
    with Requests[EngineFacts]() as requests:
        for row in due:
            requests.start(_engine_facts(requests.client, *row))
        for batch in requests.batches():
            for facts in (task.result() for task in batch):
                ScrapeState.objects.filter(pk=facts.state_id).update(version=facts.version, version_at=now)
                if facts.has_sources:
                    record_event_sources(facts.replica_id, facts.event_sources)
                reported += bool(facts.version)
    return reported


async def _engine_facts(client: httpx.AsyncClient, state_id: int, replica_id: int, url: str, ranks: int) -> EngineFacts:
    version, sources = await asyncio.gather(_get(client, f"{url}/version"), _get(client, f"{url}/kv_event_sources"))
    is_ok = sources is not None and sources.status == httpx.codes.OK
    event_sources = read_event_sources(sources.body, url, ranks) if sources is not None and is_ok else None
    return EngineFacts(state_id, replica_id, _version_of(version), event_sources, sources is not None)


async def _get(client: httpx.AsyncClient, url: str) -> FetchedResponse | None:
    """A short response; None without one."""
    try:
        return await fetch_async(client, "GET", url, deadline_s=VERSION_S, max_bytes=MAX_FACTS_BYTES)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


def _version_of(response: FetchedResponse | None) -> str:
    """The version, "" where it cannot be read."""
    if response is None or response.status != httpx.codes.OK:
        return ""
    try:
        version = json.loads(response.body).get("version")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return version if isinstance(version, str) and _is_version(version) else ""
