"""vLLM 0.28 to 0.33 and, under H14, older ones. Seen running; captures are in tests/data.

Queries and hits are counted when a request is admitted, in tokens; prompt tokens when its first output arrives (H5).
Prefix cache queries leave out what may not read the cache and what comes back after a preemption (H6).
``vllm:iteration_tokens_total`` is a histogram in spite of its name; it may be wrong behind several API servers and is
not read (T9). ``vllm:lora_requests_info`` is read of a single API server and engine alone. It keeps a series for each
set of adapters that there was, with the time when it was last true. Up to 0.32 both of its labels list the adapters
that have running or scheduled requests, so these are not told apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from telemetry.metrics.engines.names import MOST_BLOCKS, AdapterInfo, CacheFacts, EngineNames, Split, whole
from telemetry.metrics.exposition import Sample

COUNTS_ONCE = (0, 33)  # the first release that counts a request once, however often its scheduling is tried (H13)


def _facts(samples: Iterable[Sample]) -> CacheFacts:
    """Of ``vllm:cache_config_info``: one null block per engine never holds anything."""
    infos = [sample.labels for sample in samples]
    blocks = [whole(info.get("num_gpu_blocks")) for info in infos]
    sizes = {whole(info.get("block_size")) for info in infos}
    known = [count - 1 for count in blocks if count is not None and count > 1]
    return CacheFacts(
        block_tokens=sizes.pop() if len(sizes) == 1 else None,
        capacity_blocks=sum(known) if known and len(known) == len(blocks) and sum(known) <= MOST_BLOCKS else None,
    )


VLLM = EngineNames(
    engine="vllm",
    begins=("vllm:",),
    counters={
        "queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
        "hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
        "external_queries": ("vllm:external_prefix_cache_queries",),
        "external_hits": ("vllm:external_prefix_cache_hits",),
        "prompt_tokens": ("vllm:prompt_tokens",),
        "generation_tokens": ("vllm:generation_tokens",),
        "preemptions": ("vllm:num_preemptions",),
        "finished": ("vllm:request_success",),  # summed over finished_reason
    },
    split=Split(
        "vllm:prompt_tokens_cached_by_source",
        "source",
        {
            "device": ("device_tokens",),
            "host": ("host_tokens",),
            "p2p": ("p2p_tokens",),
            "disk": ("disk_tokens",),
            "external_unspecified": ("other_tokens",),
        },
    ),
    gauges={
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    },
    histograms={
        "ttft": ("vllm:time_to_first_token_seconds",),
        "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    },
    facts_from=frozenset({"vllm:cache_config_info"}),
    facts=_facts,
    optional={"mm_cache_queries": "vllm:mm_cache_queries_total", "mm_cache_hits": "vllm:mm_cache_hits_total"},
    durations={
        "queue": "vllm:request_queue_time_seconds",
        "prefill": "vllm:request_prefill_time_seconds",
        "block_lifetime": "vllm:kv_block_lifetime_seconds",  # a sample, with --kv-cache-metrics
        "block_idle": "vllm:kv_block_idle_before_evict_seconds",
        "block_reuse_gap": "vllm:kv_block_reuse_gap_seconds",
    },
    prompt_sources=Split(
        "vllm:prompt_tokens_by_source",
        "source",
        {
            "local_compute": ("computed_prompt_tokens",),
            "local_cache_hit": ("cached_prompt_tokens",),
            "external_kv_transfer": ("transferred_prompt_tokens",),
        },
    ),
    waiting_reasons=Split(
        "vllm:num_requests_waiting_by_reason",
        "reason",
        {"capacity": ("waiting_capacity",), "deferred": ("waiting_deferred",)},
    ),
    lora_adapters=AdapterInfo("vllm:lora_requests_info", ("running_lora_adapters", "waiting_lora_adapters")),
    engine_label="engine",
    created="vllm:prefix_cache_queries_created",
    sleep_state="vllm:engine_sleep_state",
)


def may_count_twice(version: str, not_reported: Iterable[str]) -> bool | None:
    """Whether it counts a request once per scheduling retry, which skews its rate either way (H13); None: unknown.

    Without a version the names tell of the releases before 0.32, which have no hits by tier.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found:
        return (int(found[1]), int(found[2])) < COUNTS_ONCE
    return True if "device_tokens" in not_reported else None
