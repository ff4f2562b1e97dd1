"""SGLang, started with ``--enable-metrics``. By its documentation and its collector; never seen running here.

| our figure | means here |
|---|---|
| queries, hits | prompt and cached tokens of requests that have **ended**; vLLM counts at admission |
| queries | every prompt token: none is left out as not eligible (H6), so ``prompt_tokens`` is the same number |
| external_hits | cached tokens that were not on the device: host memory and storage backends (H3) |
| preemptions | retracted requests |
| kv_usage_ratio | share of the token pool in use |
| ttft, itl | engine's clock, with edges that may differ from vLLM's (T3) |

Counters begin to exist with their first count, and start times are absent (its processes share one registry, H9). Its
gauge ``cache_hit_rate`` is of the latest batch and adds up to nothing, so it is not read. Not reported: external
queries, hits by peer or disk.
"""

from __future__ import annotations

from collections.abc import Iterable

from telemetry.metrics.engines.names import CacheFacts, EngineNames, Split, whole
from telemetry.metrics.exposition import Sample


def _facts(samples: Iterable[Sample]) -> CacheFacts:
    """Of ``sglang:cache_config_info``: a page is a block."""
    infos = [sample.labels for sample in samples]
    if len(infos) != 1:
        return CacheFacts()
    return CacheFacts(whole(infos[0].get("page_size")), whole(infos[0].get("num_pages")))


SGLANG = EngineNames(
    engine="sglang",
    begins=("sglang:", "sglang_"),
    counters={
        "queries": ("sglang:prompt_tokens", "sglang_prompt_tokens"),
        "prompt_tokens": ("sglang:prompt_tokens", "sglang_prompt_tokens"),
        "generation_tokens": ("sglang:generation_tokens", "sglang_generation_tokens"),
        "preemptions": ("sglang:num_retracted_requests",),
        "finished": ("sglang:num_requests",),
    },
    split=Split(
        "sglang:cached_tokens",
        "cache_source",
        {
            "": ("hits",),  # before it told sources apart
            "device": ("hits", "device_tokens"),
            "host": ("external_hits", "host_tokens"),
        },
        otherwise=("external_hits", "other_tokens"),  # storage, by the name of its backend
    ),
    gauges={
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_usage_ratio": ("sglang:token_usage",),
    },
    histograms={
        "ttft": ("sglang:time_to_first_token_seconds",),
        "itl": ("sglang:inter_token_latency_seconds",),
    },
    facts_from=frozenset({"sglang:cache_config_info"}),
    facts=_facts,
    engine_label="dp_rank",
    role_label="engine_type",
    one_of=frozenset({"tp_rank", "pp_rank", "moe_ep_rank"}),
    lazy=True,
)
