"""What routers tell of their decisions, as ``/admin/decisions`` shows it."""

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
from tests.fakes.fake_metrics_server import Answer, text
from tests.telemetry.conftest import T0
from tests.telemetry.lab.traces import Request

SPREAD = 0x9E37_79B9_7F4A_7C15


def hashes(seed: int, count: int) -> list[str]:
    """Block hashes spread over their range."""
    return [f"{(seed * 65_537 + number + 1) * SPREAD % (1 << 64):016x}" for number in range(count)]


def decision(seq: int, at: datetime | None = None, **changes: Any) -> dict[str, Any]:
    """One decision, 10 ms after the one before it unless told otherwise."""
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
    """A router's ring over HTTP: keeps the rules of ``/admin/decisions``. ``asked`` holds the queries."""

    def __init__(self, boot: str = "b1", page: int = 1000) -> None:
        self.boot = boot
        self.page = page
        self.records: list[dict[str, Any]] = []
        self.asked: list[dict[str, list[str]]] = []
        self.tokens: list[str | None] = []

    def __call__(self, handler: Any) -> None:
        query = parse_qs(urlsplit(handler.path).query)
        self.asked.append(query)
        self.tokens.append(handler.headers["Authorization"])
        after, limit, ratio = int(query["after"][0]), int(query["limit"][0]), float(query["blocks"][0])
        text(json.dumps(self.answer(after, min(limit, self.page), ratio)), "application/json")(handler)

    def answer(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        last = self.records[-1]["seq"] if self.records else 0
        first = self.records[0]["seq"] if self.records else 1
        found = [one for one in self.records if one["seq"] > after][:limit]
        return {
            "boot": self.boot,
            "decisions": [self.thinned(one, ratio) for one in found],
            "next": found[-1]["seq"] if found else min(after, last),
            "dropped": max(0, first - after - 1),
        }

    def thinned(self, one: dict[str, Any], ratio: float) -> dict[str, Any]:
        if ratio >= 1:
            return one
        kept = [(at, block) for at, block in enumerate(one["blocks"]) if int(block, 16) < ratio * 2**64]
        return {**one, "blocks": [block for _, block in kept], "positions": [at for at, _ in kept]}


def said(page: Any) -> Answer:
    """Any answer."""
    return text(json.dumps(page), "application/json")


def store(requests: Iterable[Request], *, pool: str = "chat", boot: str = "b1") -> None:
    """Let a router have told of these requests, and have them stored as they are when they are collected."""
    router, _ = Router.objects.get_or_create(
        name="r", defaults={"admin_url": "http://127.0.0.1:1", "boot": "b1", "last_seen_at": T0}
    )
    cursor, _ = DecisionCursor.objects.get_or_create(router=router, defaults={"boot": boot})
    told = [_told(one, cursor.seq + number, pool) for number, one in enumerate(requests, 1)]
    page = Page(boot, cursor.seq + len(told), 0, [msgspec.Raw(json.dumps(one).encode()) for one in told])
    ratio = min((one.sample_ratio for one in requests), default=1.0)
    record_page(Progress(router, cursor, len(told), 0), page, ratio=ratio, now=T0 + timedelta(hours=2))


def _told(one: Request, seq: int, pool: str) -> dict[str, Any]:
    return decision(
        seq,
        datetime.fromtimestamp(one.at_s, UTC),
        pool=pool,
        group=one.group,
        replica=one.replica,
        blocks=[f"{block:016x}" for block in one.blocks],
        positions=one.positions,
        block_count=one.block_count,
        hash_tokens=one.hash_tokens,
        prompt_tokens_estimate=one.estimate_tokens,
        prompt_tokens=one.prompt_tokens,
        cached_tokens=one.cached_tokens,
        block_tokens=one.block_tokens,
    )
