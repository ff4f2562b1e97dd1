"""The ``vllm:`` metrics of a modelled engine, with the names, types, labels and buckets of vLLM 0.32.0.

Left out are what no scraper reads: help texts, the families of the Python process and of the web framework, and labels
of ``cache_config_info`` that are constant here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from routing.simulation.engine import Engine
from routing.simulation.statistics import Histogram

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

Rows = Mapping[str, float]  # by the value of a label
Values = Mapping[str, float | tuple[str, Rows]]  # by metric; with the name of a label: one value for each of its values


def page(engine: Engine, model: str, started_s: float) -> bytes:
    """The body of ``/metrics``. ``started_s``: when the engine began to count, Unix time."""
    escaped = model.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    labels = f'engine="0",model_name="{escaped}"'
    lines = ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started_s}"]
    for kind, values in (("gauge", _gauges(engine)), ("counter", _counters(engine))):
        for name, value in values.items():
            label, rows = value if isinstance(value, tuple) else ("", {"": value})
            lines.append(f"# TYPE vllm:{name} {kind}")
            pairs = {f'{labels},{label}="{text}"' if label else labels: number for text, number in rows.items()}
            if name == "admission_rejections_total":  # of all engines behind a server
                pairs = {text.removeprefix('engine="0",'): number for text, number in pairs.items()}
            lines += [f"vllm:{name}{{{text}}} {float(number)}" for text, number in pairs.items()]
            if kind == "counter":
                created = f"vllm:{name.removesuffix('_total')}_created"
                lines += [f"# TYPE {created} gauge", *(f"{created}{{{text}}} {started_s}" for text in pairs)]
    for name, histogram in _histograms(engine).items():
        lines += _histogram_lines(f"vllm:{name}", labels, histogram, started_s)
    info = ",".join(f'{name}="{value}"' for name, value in cache_config(engine).items())
    lines += ["# TYPE vllm:cache_config_info gauge", f'vllm:cache_config_info{{{info},engine="0"}} 1.0', ""]
    return "\n".join(lines).encode()


def _histogram_lines(name: str, labels: str, histogram: Histogram, started_s: float) -> Iterator[str]:
    yield f"# TYPE {name} histogram"
    edges = (*map(str, histogram.edges), "+Inf")
    for edge, count in zip(edges, accumulate(histogram.buckets), strict=True):
        yield f'{name}_bucket{{{labels},le="{edge}"}} {float(count)}'
    yield f"{name}_count{{{labels}}} {float(histogram.count)}"
    yield f"{name}_sum{{{labels}}} {float(histogram.total)}"
    yield f"# TYPE {name}_created gauge"
    yield f"{name}_created{{{labels}}} {started_s}"


def _gauges(engine: Engine) -> Values:
    statistics = engine.statistics
    return {
        "num_requests_running": statistics.running,
        "num_requests_waiting": statistics.waiting,
        "num_requests_waiting_by_reason": ("reason", {"capacity": statistics.waiting, "deferred": 0}),
        "engine_sleep_state": ("sleep_state", {"awake": 1, "weights_offloaded": 0, "discard_all": 0}),
        "kv_cache_usage_perc": statistics.kv_usage_ratio,
    }


def _counters(engine: Engine) -> Values:
    statistics = engine.statistics
    sources = {
        "local_compute": statistics.prompt_tokens - statistics.prompt_cached,
        "local_cache_hit": statistics.prompt_cached - statistics.prompt_external,
        "external_kv_transfer": statistics.prompt_external,
    }
    tiers = {"device": statistics.hits, "host": 0, "p2p": statistics.external_hits, "disk": 0}
    return {
        **dict.fromkeys([f"estimated_{name}_per_gpu_total" for name in ("flops", "read_bytes", "write_bytes")], 0),
        "prefix_cache_queries_total": statistics.queries,
        "prefix_cache_hits_total": statistics.hits,
        "external_prefix_cache_queries_total": statistics.external_queries,
        "external_prefix_cache_hits_total": statistics.external_hits,
        "mm_cache_queries_total": 0,
        "mm_cache_hits_total": 0,
        "num_preemptions_total": statistics.preemptions,
        "prompt_tokens_total": statistics.prompt_tokens,
        "prompt_tokens_by_source_total": ("source", sources),
        "prompt_tokens_cached_total": statistics.prompt_cached,
        "prompt_tokens_cached_by_source_total": ("source", tiers | {"external_unspecified": 0}),
        "generation_tokens_total": statistics.generation_tokens,
        "request_success_total": ("finished_reason", statistics.finished),
        "admission_rejections_total": (
            "reason",
            {"max_num_queued_reqs": statistics.rejected, "max_num_queued_tokens": 0},
        ),
    }


def _histograms(engine: Engine) -> dict[str, Histogram]:
    statistics, blocks = engine.statistics, engine.residency
    sampled = {} if blocks is None else {
        "kv_block_lifetime_seconds": blocks.lifetime,
        "kv_block_idle_before_evict_seconds": blocks.idle_before_evict,
        "kv_block_reuse_gap_seconds": blocks.reuse_gap,
    }  # fmt: skip
    return {
        "request_prompt_tokens": statistics.request_prompt,
        "request_generation_tokens": statistics.request_generation,
        "iteration_tokens_total": statistics.iteration_tokens,
        "request_max_num_generation_tokens": statistics.request_max_generation,
        "request_params_n": statistics.request_n,
        "request_params_max_tokens": statistics.request_max_tokens,
        "time_to_first_token_seconds": statistics.time_to_first_token,
        "inter_token_latency_seconds": statistics.inter_token,
        "request_time_per_output_token_seconds": statistics.time_per_output_token,
        "e2e_request_latency_seconds": statistics.end_to_end,
        "request_queue_time_seconds": statistics.queue_time,
        "request_inference_time_seconds": statistics.inference_time,
        "request_prefill_time_seconds": statistics.prefill_time,
        "request_decode_time_seconds": statistics.decode_time,
        "request_num_preemptions": statistics.request_preemptions,
        "request_prefill_kv_computed_tokens": statistics.request_computed,
        **sampled,
    }


def cache_config(engine: Engine) -> dict[str, str]:
    """The labels of ``vllm:cache_config_info``; ``num_gpu_blocks`` counts the null block that is never used."""
    config = engine.config
    blocks = (config.blocks or 0) + 1
    return {
        "block_size": str(config.block_tokens),
        "enable_prefix_caching": str(config.caches_prefixes),
        "kv_cache_max_concurrency": str(blocks * config.block_tokens / config.max_model_len),
        "kv_cache_size_tokens": str(blocks * config.block_tokens),
        "num_gpu_blocks": str(blocks),
    }
