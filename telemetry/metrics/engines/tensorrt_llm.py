"""TensorRT-LLM (``trtllm-serve``), by its collector; never seen running here.

Its Prometheus text is at ``/prometheus/metrics`` (``/metrics`` is JSON about iterations) and needs
``return_perf_metrics``; gauges need ``enable_iter_perf_stats`` too.

| our figure | means here |
|---|---|
| queries, hits | prompt tokens, and cached ones, of requests that have **ended**; vLLM counts at admission |
| queries | every prompt token: none is left out as not eligible (H6), so ``prompt_tokens`` is the same number |
| kv_usage_ratio | used blocks / all blocks |
| ttft | engine's clock |

Releases before the token counters came have no hit rate that adds up: their gauge ``trtllm_kv_cache_hit_rate`` is a
ratio of unknown weight, so it is not read, and hits are not reported. Neither are external queries and hits, hits by
tier, preemptions, and the time between tokens: ``trtllm_time_per_output_token_seconds`` is one mean per request.
"""

from __future__ import annotations

from collections.abc import Iterable

from telemetry.metrics.engines.names import CacheFacts, EngineNames, Split, whole
from telemetry.metrics.exposition import Sample

BLOCK_TOKENS = "trtllm_kv_cache_tokens_per_block"
BLOCKS = "trtllm_kv_cache_max_blocks"
PATH = "/prometheus/metrics"


def _facts(samples: Iterable[Sample]) -> CacheFacts:
    told = {sample.name: whole(sample.value) for sample in samples}
    return CacheFacts(told.get(BLOCK_TOKENS), told.get(BLOCKS))


TENSORRT_LLM = EngineNames(
    engine="tensorrt_llm",
    begins=("trtllm_",),
    counters={
        "queries": ("trtllm_prompt_tokens",),
        "prompt_tokens": ("trtllm_prompt_tokens",),
        "generation_tokens": ("trtllm_generation_tokens",),
        "finished": ("trtllm_request_success",),  # summed over finished_reason
    },
    split=Split("trtllm_prompt_cached_tokens", "", {"": ("hits",)}),
    gauges={
        "running": ("trtllm_num_requests_running",),
        "waiting": ("trtllm_num_requests_waiting",),
        "kv_usage_ratio": ("trtllm_kv_cache_utilization",),
    },
    histograms={"ttft": ("trtllm_time_to_first_token_seconds",)},
    facts_from=frozenset({BLOCK_TOKENS, BLOCKS}),
    facts=_facts,
    lazy=True,
)
