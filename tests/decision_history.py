"""Some minutes of router decisions, collected and replayed, for tests of pages."""

from __future__ import annotations

from datetime import datetime, timedelta

from controlplane.models import Pool, Router
from telemetry.models import Decision
from telemetry.services.lab.replays import replay_pools, update_curve
from tests.fleet_history import GROUPS
from tests.telemetry.lab.traces import HASH_TOKENS, traffic
from tests.telemetry.stored_decisions import decided

CANDIDATES = [
    {"replica": "gpu-2", "running": 1, "waiting_tokens": 10, "hit_tokens": 0, "cost": 1010.0},
    {"replica": "gpu-1", "running": 4, "waiting_tokens": 40, "hit_tokens": 800, "cost": 240.0},
]


def decisions_at_work(pool: Pool, router: Router, until: datetime, *, count: int = 60) -> Decision:
    """Ten minutes of requests of all task groups, with breakdown and capacity curve; the last decision."""
    groups, replicas = sorted(GROUPS), [replica.name for replica in pool.replicas.order_by("pk")]
    requests = traffic(count, replicas=len(replicas), prompts=5, sessions=8, placed="random")
    for seq, request in enumerate(requests):
        last = decided(
            router,
            until - timedelta(seconds=600 * (count - seq) / count),
            seq,
            group=groups[int(request.group[1:]) + 1],
            replica=replicas[int(request.replica[1:])],
            blocks=[block >> 1 for block in request.blocks],
            positions=None,
            block_count=request.block_count,
            prompt_tokens_estimate=request.block_count * HASH_TOKENS,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens if seq % 5 else None,
            hit_tokens=request.cached_tokens,
            status=200 if seq % 20 else 503,
            retries=seq % 3 == 0,
            candidates=CANDIDATES,
            sample_ratio=1.0,
        )
    replay_pools(until)
    update_curve(pool, until)
    return last
