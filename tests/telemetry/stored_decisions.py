"""Stored decisions, with defaults for most columns."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from controlplane.models import Router
from controlplane.services.routers import announce
from telemetry.models import Decision
from telemetry.scraping.decision_records import TABLE
from telemetry.storage.partitions import ensure_days
from telemetry.storage.store import store_rows


def a_router(name: str = "router-1") -> Router:
    return announce(name=name, boot="b1", admin_url="http://127.0.0.1:1")


def decided(router: Router, at: datetime, seq: int, **changes: Any) -> Decision:
    """Store one request of 1,000 tokens: 800 predicted to be cached, 780 reported as cached."""
    ensure_days([at.date()])
    row = decision(router, at, seq, **changes)
    row.save(force_insert=True)
    return row


def decision(router: Router, at: datetime, seq: int, **changes: Any) -> Decision:
    """The same, without storing it."""
    fields: dict[str, Any] = {
        "boot": "b1",
        "pool": "chat",
        "group": "agents",
        "matched_by": "header",
        "policy": "chat",
        "revision": 3,
        "arm": "",
        "strategy": "lowest_cost",
        "replica": "gpu-1",
        "reason": "hit",
        "status": 200,
        "outcome": "ok",
        "ttft_s": 0.12,
        "prompt_tokens_estimate": 1000,
        "prompt_tokens": 1000,
        "cached_tokens": 780,
        "hit_tokens": 800,
        "block_tokens": 16,
        "hash_tokens": 64,
        "prefix": 77,
        "blocks": [1, 2, 3],
        "positions": [0, 4, 9],
        "block_count": 16,
        "sample_ratio": 0.25,
        "request_id": f"req-{seq}",
        "retries": 0,
    }
    return Decision(at=at, router=router, seq=seq, **(fields | changes))


def store(rows: list[Decision]) -> None:
    """Store many decisions, as collected ones are."""
    ensure_days({row.at.date() for row in rows})
    store_rows(TABLE, [tuple(getattr(row, column) for column in TABLE.columns) for row in rows])


def decided_in_a_row(router: Router, until: datetime, count: int, **changes: Any) -> list[Decision]:
    """Store one decision per second, the last one a second before ``until``; ascending."""
    return [decided(router, until - timedelta(seconds=count - seq), seq, **changes) for seq in range(count)]


def repeated_in_a_row(router: Router, until: datetime, count: int, **changes: Any) -> None:
    """Store one cacheable request per minute, the last one a minute before ``until``: each question comes twice."""
    first = 1000 * len(changes.get("group", ""))  # other digests for another group
    for seq in range(count):
        at = until - timedelta(minutes=count - seq)
        digest = {
            "request_digest": first + seq // 2 << 6,
            "digest_ratio": 1.0,
            "generated_tokens": 50,
            "latency_s": 2.0,
        }
        decided(router, at, seq, **(digest | changes))
