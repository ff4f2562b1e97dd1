"""What version of vLLM a replica is: it decides how far its rate is to be trusted (H13). Metrics do not tell it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta

import httpx
from django.db.models import F, Q

from controlplane.egress import fetch_async, fleet_rules, guarded_async_client
from telemetry.models import Health, ScrapeState

ASK_AGAIN = timedelta(hours=1)
AT_ONCE = 64  # replicas asked by one run
DEADLINE_S = 2.0
MOST_BYTES = 4096
_version = re.compile(r"[0-9A-Za-z.+_-]{1,40}").fullmatch


def check_versions(now: datetime) -> int:
    """Ask replicas that were not asked since they last started, or for an hour; how many told. 2 queries and more."""
    stale = Q(version_at=None) | Q(version_at__lt=F("restarted_at")) | Q(version_at__lt=now - ASK_AGAIN)
    due = list(
        ScrapeState.objects.filter(stale, engine="vllm", health=Health.UP, replica__isnull=False)
        .order_by("version_at")
        .values_list("pk", "replica__url")[:AT_ONCE]
    )
    if not due:
        return 0
    told = asyncio.run(_ask([url for _, url in due]))
    for (pk, _), version in zip(due, told, strict=True):
        ScrapeState.objects.filter(pk=pk).update(version=version, version_at=now)
    return sum(bool(version) for version in told)


async def _ask(urls: Sequence[str]) -> list[str]:
    client = guarded_async_client(fleet_rules())
    try:
        return list(await asyncio.gather(*(_version_at(client, url) for url in urls)))
    finally:
        await client.aclose()


async def _version_at(client: httpx.AsyncClient, url: str) -> str:
    """What it says; empty where none can be had, for it is unknown then."""
    try:
        answer = await fetch_async(client, "GET", f"{url}/version", deadline_s=DEADLINE_S, max_bytes=MOST_BYTES)
        told = json.loads(answer.body).get("version") if answer.status == httpx.codes.OK else ""
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError, RecursionError):
        return ""
    return told if isinstance(told, str) and _version(told) else ""
