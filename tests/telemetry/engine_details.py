"""A reading of everything that only some engines report, and the values of each chart."""

from datetime import datetime

from controlplane.models import Replica
from controlplane.services.fleet.replicas import record_engine_facts
from tests.telemetry.readings import engine_reading

COUNTERS = {
    "queue_ms": 3000,
    "queue_count": 10,
    "prefill_ms": 2000,
    "prefill_count": 10,
    "computed_prompt_tokens": 500,
    "cached_prompt_tokens": 300,
    "transferred_prompt_tokens": 200,
    "mm_cache_queries": 8,
    "mm_cache_hits": 6,
    "block_lifetime_ms": 60_000,
    "block_lifetime_count": 2,
    "block_idle_ms": 8000,
    "block_idle_count": 2,
    "block_reuse_gap_ms": 9000,
    "block_reuse_gap_count": 3,
}
WAITING = {"waiting_capacity": 2.0, "waiting_deferred": 1.0}
QUEUE_AND_PREFILL = {"in queue": 0.3, "in prefill": 0.2}
WAITING_BY_REASON = {"capacity": 2.0, "deferred": 1.0}
PROMPT_SOURCES = {"computed": 0.5, "cached": 0.3, "transferred": 0.2}
MULTIMODAL = {"Multimodal hit rate": 0.75}
BLOCK_TIMES = {"allocation to eviction": 30.0, "last access to eviction": 4.0, "between accesses": 3.0}
EVICTIONS = {"r1": 24.0}  # 2 in 5 s, a minute
CHURN = {"r1": 45.0}  # 500 + 200 + 300 tokens of 16,000 in 5 s, an hour


def read_details(replica: Replica, at: datetime) -> None:
    """Store the reading, and a cache of 16,000 tokens."""
    record_engine_facts(replica, block_tokens=16, capacity_blocks=1000)
    engine_reading(replica, at, gauges=WAITING, generation_tokens=300, **COUNTERS)
