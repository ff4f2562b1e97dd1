"""Decisions as routers report them at ``/admin/decisions``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from controlplane.models import Router
from telemetry.models import DecisionCursor
from telemetry.scraping.decision_records import Page, Progress, record_page
from tests.fakes.fake_metrics_server import Responder, text
from tests.telemetry.conftest import T0
from tests.telemetry.lab.traces import Request

SPREAD = 0x9E37_79B9_7F4A_7C15


def hashes(seed: int, count: int) -> list[str]:
    """Block hashes spread over their range."""
    return [f"{(seed * 65_537 + number + 1) * SPREAD % (1 << 64):016x}" for number in range(count)]


def decision(seq: int, at: datetime | None = None, **changes: Any) -> dict[str, Any]:
    """One decision, by default 10 ms after the previous one."""
    blocks = changes.pop("blocks", hashes(seq, 4))
    return {
        "seq": seq,
        "at": (at or T0 + timedelta(milliseconds=10 * seq)).isoformat(),
        "request_id": f"r{seq}",
        "pool": "chat",
        "group": "",
        "matched_by": "",
        "policy": "everyday",
        "revision": 1,
        "arm": None,
        "strategy": "prefix_hash",
        "replica": "a",
        "rank": None,
        "reason": "affinity",
        "prompt_tokens_estimate": 64 * len(blocks),
        "block_tokens": 16,
        "hash_tokens": 64,
        "prefix": "ffffffffffffffff",
        "blocks": blocks,
        "block_count": len(blocks),
        "candidates": [{"replica": "a", "running": 1, "waiting_tokens": 0}],
        "hit_tokens": None,
        "retries": 0,
        "status": 200,
        "ttft_s": 0.25,
        "prompt_tokens": 60 * len(blocks),
        "cached_tokens": 16,
        **changes,
    }


class FakeRing:
    """A router's ring of decisions over HTTP, as ``/admin/decisions`` serves it. ``tokens`` are those of requests."""

    def __init__(self, boot: str = "b1", page: int = 1000) -> None:
        self.boot = boot
        self.page = page
        self.records: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []

    def __call__(self, handler: Any) -> None:
        query = parse_qs(urlsplit(handler.path).query)
        self.tokens.append(handler.headers["Authorization"])
        after, limit, ratio = int(query["after"][0]), int(query["limit"][0]), float(query["blocks"][0])
        text(json.dumps(self.page_after(after, min(limit, self.page), ratio)), "application/json")(handler)

    def page_after(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        last = self.records[-1]["seq"] if self.records else 0
        first = self.records[0]["seq"] if self.records else 1
        records = [record for record in self.records if record["seq"] > after][:limit]
        return {
            "boot": self.boot,
            "decisions": [self.sampled(record, ratio) for record in records],
            "next": records[-1]["seq"] if records else min(after, last),
            "dropped": max(0, first - after - 1),
        }

    def sampled(self, record: dict[str, Any], ratio: float) -> dict[str, Any]:
        if ratio >= 1:
            return record
        blocks = [(at, block) for at, block in enumerate(record["blocks"]) if int(block, 16) < ratio * 2**64]
        return {**record, "blocks": [block for _, block in blocks], "positions": [at for at, _ in blocks]}


def json_response(page: Any) -> Responder:
    return text(json.dumps(page), "application/json")


def store(requests: Iterable[Request], *, pool: str = "chat", boot: str = "b1") -> None:
    """Store these requests as if they were collected from a router."""
    router, _ = Router.objects.get_or_create(
        name="r", defaults={"admin_url": "http://127.0.0.1:1", "boot": "b1", "last_seen_at": T0}
    )
    cursor, _ = DecisionCursor.objects.get_or_create(router=router, defaults={"boot": boot})
    records = [_record(request, cursor.seq + number, pool) for number, request in enumerate(requests, 1)]
    raw = [msgspec.Raw(json.dumps(record).encode()) for record in records]
    page = Page(boot, cursor.seq + len(records), 0, raw)
    ratio = min((request.sample_ratio for request in requests), default=1.0)
    record_page(Progress(router, cursor, len(records), 0), page, ratio=ratio, now=T0 + timedelta(hours=2))


def _record(request: Request, seq: int, pool: str) -> dict[str, Any]:
    return decision(
        seq,
        datetime.fromtimestamp(request.at_s, UTC),
        pool=pool,
        group=request.group,
        replica=request.replica,
        blocks=[f"{block:016x}" for block in request.blocks],
        positions=request.positions,
        block_count=request.block_count,
        hash_tokens=request.hash_tokens,
        prompt_tokens_estimate=request.estimate_tokens,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        block_tokens=request.block_tokens,
    )
