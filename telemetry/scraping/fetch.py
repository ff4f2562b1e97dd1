"""Fetching one exposition, with a deadline and limits of its own (S8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import httpx

from controlplane.egress import EgressDeniedError, FetchedResponse, ResponseTooLargeError, fetch_async
from telemetry.metrics.engine import ReplicaSample
from telemetry.metrics.engines import tensorrt_llm
from telemetry.metrics.exposition import MAX_BYTES, ExpositionError
from telemetry.metrics.router import RouterSample
from telemetry.scraping.merge import Failure, Taken

HEADERS = {"Accept": "text/plain;version=0.0.4"}
JSON_AT_METRICS: set[str] = set()  # URLs that served JSON there: trtllm-serve has its Prometheus text elsewhere
MOST_REMEMBERED = 4096
Sample = TypeVar("Sample", ReplicaSample, RouterSample)


async def scrape(
    client: httpx.AsyncClient,
    url: str,
    read: Callable[[str], Sample],
    *,
    deadline_s: float,
    most_bytes: int = MAX_BYTES,
) -> Taken[Sample] | Failure:
    """One exposition, or why there is none; nothing that a target does is raised."""
    begun_s = time.monotonic()
    try:
        answer = await _fetch(client, url, deadline_s, most_bytes)
    except httpx.HTTPError as error:
        return _failure(error, deadline_s)
    except httpx.InvalidURL:
        return Failure("its address is not a valid URL")
    taken_s, duration_s = time.time(), time.monotonic() - begun_s
    if answer.status != httpx.codes.OK:
        return Failure(f"its /metrics answers with status {answer.status}")
    try:
        return Taken(taken_s, read(answer.body.decode("utf-8")), duration_s)
    except (ExpositionError, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, ExpositionError) else "the text is not UTF-8"
        return Failure(f"its /metrics is not to be trusted: {reason}")


async def _fetch(client: httpx.AsyncClient, url: str, deadline_s: float, most_bytes: int) -> FetchedResponse:
    """What is at the URL; where that is JSON, what is at the place that TensorRT-LLM has. One deadline for both."""
    elsewhere = url.removesuffix("/metrics") + tensorrt_llm.PATH
    begun_s = time.monotonic()
    at = elsewhere if url in JSON_AT_METRICS else url
    answer = await fetch_async(client, "GET", at, deadline_s=deadline_s, max_bytes=most_bytes, headers=HEADERS)
    if at == url and answer.status == httpx.codes.OK and answer.body[:1] in {b"[", b"{"}:
        if len(JSON_AT_METRICS) < MOST_REMEMBERED:
            JSON_AT_METRICS.add(url)
        left_s = max(0.05, deadline_s - (time.monotonic() - begun_s))
        return await fetch_async(client, "GET", elsewhere, deadline_s=left_s, max_bytes=most_bytes, headers=HEADERS)
    if at == elsewhere and answer.status != httpx.codes.OK:
        JSON_AT_METRICS.discard(url)  # another engine may serve there by now
    return answer


def _failure(error: httpx.HTTPError, deadline_s: float) -> Failure:
    """The reason in words that name no URL."""
    if isinstance(error, httpx.TimeoutException):
        return Failure(f"no whole answer within {deadline_s:g} s")
    if isinstance(error, ResponseTooLargeError):
        return Failure("the answer is too long, or packed")
    if isinstance(error, EgressDeniedError):
        return Failure("its address is not in WARMPATH_FLEET_NETWORKS")
    if isinstance(error, httpx.ConnectError):
        return Failure("nobody listens there", refused=True) if _refused(error) else Failure("it cannot be reached")
    return Failure(f"no usable answer ({type(error).__name__})")


def _refused(error: BaseException | None) -> bool:
    """Whether the address itself said that nobody listens, as against a network that did not answer."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False
