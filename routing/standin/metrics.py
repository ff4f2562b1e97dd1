"""The ``vllm:`` metric families of vLLM 0.32.0, with vLLM's order and help texts, read from a modelled engine.

Whatever does not change is rendered once: headers, labels, bucket edges, the ``_created`` companions. A scrape formats
one number per line, so that a page of 700 lines takes well under 5 ms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate

from routing.simulation.engine import Engine
from routing.simulation.statistics import Histogram

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

Labels = Mapping[str, str]
ReadValue = Callable[[], float]


def number(value: float) -> str:
    """A sample's value as prometheus_client formats it: ``9.0``, ``6.1906944e+08``, ``+Inf``."""
    if math.isinf(value):
        return "+Inf"
    text = repr(float(value))
    point = text.find(".")
    if value <= 0 or point <= 6 or "e" in text:
        return text
    digits = f"{text[:point]}{text[point + 1 :]}".rstrip("0")
    mantissa = f"{digits[0]}.{digits[1:]}".rstrip(".")
    return f"{mantissa}e+{point - 1:02d}"


def label_text(labels: Labels) -> str:
    """``{a="b",c="d"}`` in alphabetical order; empty without labels."""
    pairs = ",".join(f'{name}="{_escaped(labels[name])}"' for name in sorted(labels))
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Family:
    """One metric with all its label sets. ``created_s`` of a label set adds a ``_created`` sample."""

    def __init__(self, name: str, kind: str, help_text: str) -> None:
        self.name = name
        self._header = f"# HELP {name} {help_text}\n# TYPE {name} {kind}"
        self._series: list[tuple[list[str], Callable[[], Iterable[float]]]] = []  # names with labels, and their values
        self._created_name = f"{name.removesuffix('_total') if kind == 'counter' else name}_created"
        self._created = [f"# HELP {self._created_name} {help_text}\n# TYPE {self._created_name} gauge"]

    def value(self, labels: Labels, read: ReadValue, created_s: float | None = None) -> None:
        """Add a label set whose value is read at each scrape."""
        self._add(labels, created_s, [f"{self.name}{label_text(labels)}"], lambda: (read(),))

    def histogram(self, labels: Labels, histogram: Histogram, created_s: float | None = None) -> None:
        """Add a label set that is a histogram."""
        edges = [*histogram.edges, math.inf]
        samples = [f"{self.name}_bucket{label_text({**labels, 'le': number(edge)})}" for edge in edges]
        samples += [f"{self.name}_{part}{label_text(labels)}" for part in ("count", "sum")]
        self._add(
            labels, created_s, samples, lambda: [*accumulate(histogram.buckets), histogram.count, histogram.total]
        )

    def summary(self, labels: Labels, histogram: Histogram, created_s: float | None = None) -> None:
        """Add a label set that has count and sum only."""
        samples = [f"{self.name}_{part}{label_text(labels)}" for part in ("count", "sum")]
        self._add(labels, created_s, samples, lambda: (histogram.count, histogram.total))

    def _add(
        self, labels: Labels, created_s: float | None, samples: list[str], read: Callable[[], Iterable[float]]
    ) -> None:
        self._series.append((samples, read))
        if created_s is not None:
            self._created.append(f"{self._created_name}{label_text(labels)} {number(created_s)}")

    def lines(self) -> list[str]:
        """Header, samples, and the ``_created`` companion if there is one."""
        lines = [self._header]
        for samples, read in self._series:
            lines += [f"{sample} {number(value)}" for sample, value in zip(samples, read(), strict=True)]
        return lines + self._created if len(self._created) > 1 else lines


def render(families: Iterable[Family]) -> bytes:
    """The whole page."""
    return "\n".join([*(line for family in families for line in family.lines()), ""]).encode()


_WAITING_BY_REASON = (
    "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = "
    "deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals "
    "vllm:num_requests_waiting."
)
_SLEEP_STATE = (
    "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 "
    "means sleep level 1; discard_all = 1 means sleep level 2."
)
_CACHED_BY_SOURCE = (
    "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), disk, "
    "p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to "
    "vllm:prefix_cache_hits + vllm:external_prefix_cache_hits."
)
_SAMPLED = "Sampled metrics (controlled by --kv-cache-metrics-sample)."


def _zero() -> float:
    return 0.0


class EngineMetrics:
    """All ``vllm:`` families of one engine."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._labels = {"engine": "0", "model_name": model}
        self._created_s = time.time()
        self.families: list[Family] = []
        self._add_engine_counters(engine)
        self._add_token_counters(engine)
        self._add_outcomes(engine)
        self._add_histograms(engine)
        self._family("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig").value(
            {**cache_config(engine), "engine": "0"}, lambda: 1.0
        )

    def _family(self, name: str, kind: str, help_text: str) -> Family:
        family = Family(f"vllm:{name}", kind, help_text)
        self.families.append(family)
        return family

    def _counter(self, name: str, help_text: str, read: ReadValue) -> None:
        self._family(f"{name}_total", "counter", help_text).value(self._labels, read, self._created_s)

    def _gauge(self, name: str, help_text: str, read: ReadValue) -> None:
        self._family(name, "gauge", help_text).value(self._labels, read)

    def _labelled(self, name: str, kind: str, help_text: str, label: str, reads: Mapping[str, ReadValue]) -> None:
        """A family with one more label, whose values are the keys of ``reads``."""
        family = self._family(name, kind, help_text)
        for value, read in reads.items():
            family.value({**self._labels, label: value}, read, self._created_s if kind == "counter" else None)

    def _add_engine_counters(self, engine: Engine) -> None:
        statistics = engine.statistics
        for name, estimated in (
            ("flops", "floating point operations"),
            ("read_bytes", "bytes read from memory"),
            ("write_bytes", "bytes written to memory"),
        ):
            help_text = f"Estimated number of {estimated} per GPU (for Model Flops Utilization calculations)."
            self._counter(f"estimated_{name}_per_gpu", help_text, _zero)
        running = "Number of requests in model execution batches."
        self._gauge("num_requests_running", running, lambda: statistics.running)
        self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", lambda: statistics.waiting)
        reasons: dict[str, ReadValue] = {"capacity": lambda: statistics.waiting, "deferred": _zero}
        self._labelled("num_requests_waiting_by_reason", "gauge", _WAITING_BY_REASON, "reason", reasons)
        states: dict[str, ReadValue] = {"awake": lambda: 1.0, "weights_offloaded": _zero, "discard_all": _zero}
        self._labelled("engine_sleep_state", "gauge", _SLEEP_STATE, "sleep_state", states)
        usage = "KV-cache usage. 1 means 100 percent usage."
        self._gauge("kv_cache_usage_perc", usage, lambda: statistics.kv_usage_ratio)

    def _add_token_counters(self, engine: Engine) -> None:
        statistics = engine.statistics
        external = "External prefix cache {} from KV connector cross-instance cache sharing"
        caches: tuple[tuple[str, str, str, ReadValue, ReadValue], ...] = (
            ("", "Prefix cache {}", "tokens", lambda: statistics.queries, lambda: statistics.hits),
            ("external_", external, "tokens", lambda: statistics.external_queries, lambda: statistics.external_hits),
            ("mm_", "Multi-modal cache {}", "items", _zero, _zero),
        )
        for prefix, subject, unit, queries, hits in caches:
            name = f"{prefix}cache" if prefix == "mm_" else f"{prefix}prefix_cache"
            self._counter(
                f"{name}_queries", f"{subject.format('queries')}, in terms of number of queried {unit}.", queries
            )
            self._counter(f"{name}_hits", f"{subject.format('hits')}, in terms of number of cached {unit}.", hits)
        preemptions = "Cumulative number of preemption from the engine."
        self._counter("num_preemptions", preemptions, lambda: statistics.preemptions)
        self._counter("prompt_tokens", "Number of prefill tokens processed.", lambda: statistics.prompt_tokens)
        sources: dict[str, ReadValue] = {
            "local_compute": lambda: statistics.prompt_tokens - statistics.prompt_cached,
            "local_cache_hit": lambda: statistics.prompt_cached - statistics.prompt_external,
            "external_kv_transfer": lambda: statistics.prompt_external,
        }
        by_source = "Number of prompt tokens by source."
        self._labelled("prompt_tokens_by_source_total", "counter", by_source, "source", sources)
        cached = "Number of cached prompt tokens (local + external)."
        self._counter("prompt_tokens_cached", cached, lambda: statistics.prompt_cached)
        tiers: dict[str, ReadValue] = dict.fromkeys(("device", "host", "p2p", "disk", "external_unspecified"), _zero)
        tiers["device"] = lambda: statistics.hits
        tiers["p2p"] = lambda: statistics.external_hits
        self._labelled("prompt_tokens_cached_by_source_total", "counter", _CACHED_BY_SOURCE, "source", tiers)
        generated = "Number of generation tokens processed."
        self._counter("generation_tokens", generated, lambda: statistics.generation_tokens)

    def _add_outcomes(self, engine: Engine) -> None:
        statistics = engine.statistics
        reads: dict[str, ReadValue] = {
            reason: partial(statistics.finished.__getitem__, reason) for reason in statistics.finished
        }
        success = "Count of successfully processed requests."
        self._labelled("request_success_total", "counter", success, "finished_reason", reads)
        rejected = "Number of admission attempts rejected by a queue limit, by reason."
        family = self._family("admission_rejections_total", "counter", rejected)
        limits: dict[str, ReadValue] = {
            "max_num_queued_reqs": lambda: statistics.rejected,
            "max_num_queued_tokens": _zero,
        }
        for reason, read in limits.items():
            family.value({"model_name": self._labels["model_name"], "reason": reason}, read, self._created_s)

    def _add_histograms(self, engine: Engine) -> None:
        statistics = engine.statistics
        phase = "Histogram of time spent in {} phase for request."
        generated, n = "Number of generation tokens processed.", "Histogram of the n request parameter."
        most_generated = "Histogram of maximum number of requested generation tokens."
        max_tokens = "Histogram of the max_tokens request parameter."
        ttft = "Histogram of time to first token in seconds."
        decode_pace = "Histogram of time_per_output_token_seconds per request."
        preempted = "Histogram of the number of times a request was preempted."
        computed = "Histogram of new KV tokens computed during prefill (excluding cached tokens)."
        rows = [
            ("request_prompt_tokens", "Number of prefill tokens processed.", statistics.request_prompt),
            ("request_generation_tokens", generated, statistics.request_generation),
            ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", statistics.iteration_tokens),
            ("request_max_num_generation_tokens", most_generated, statistics.request_max_generation),
            ("request_params_n", n, statistics.request_n),
            ("request_params_max_tokens", max_tokens, statistics.request_max_tokens),
            ("time_to_first_token_seconds", ttft, statistics.time_to_first_token),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", statistics.inter_token),
            ("request_time_per_output_token_seconds", decode_pace, statistics.time_per_output_token),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", statistics.end_to_end),
            ("request_queue_time_seconds", phase.format("WAITING"), statistics.queue_time),
            ("request_inference_time_seconds", phase.format("RUNNING"), statistics.inference_time),
            ("request_prefill_time_seconds", phase.format("PREFILL"), statistics.prefill_time),
            ("request_decode_time_seconds", phase.format("DECODE"), statistics.decode_time),
            ("request_num_preemptions", preempted, statistics.request_preemptions),
            ("request_prefill_kv_computed_tokens", computed, statistics.request_computed),
        ]
        if (blocks := engine.residency) is not None:
            lifetime = f"Histogram of KV cache block lifetime from allocation to eviction. {_SAMPLED}"
            idle = f"Histogram of idle time before KV cache block eviction. {_SAMPLED}"
            gap = "Histogram of time gaps between consecutive KV cache block accesses. "
            gap += f"Only the most recent accesses are recorded (ring buffer). {_SAMPLED}"
            rows += [
                ("kv_block_lifetime_seconds", lifetime, blocks.lifetime),
                ("kv_block_idle_before_evict_seconds", idle, blocks.idle_before_evict),
                ("kv_block_reuse_gap_seconds", gap, blocks.reuse_gap),
            ]
        for name, help_text, histogram in rows:
            self._family(name, "histogram", help_text).histogram(self._labels, histogram, self._created_s)


def cache_config(engine: Engine) -> dict[str, str]:
    """The labels of ``vllm:cache_config_info``; ``num_gpu_blocks`` counts the null block that is never used."""
    config = engine.config
    blocks = (config.blocks or 0) + 1
    block = str(config.block_tokens)
    unset = (
        "cache_hit_alignment_tokens", "hash_block_size", "kv_cache_layout", "kv_cache_memory_bytes",
        "kv_offloading_size", "mamba_block_size", "mamba_page_size_padded", "num_cpu_blocks", "num_gpu_blocks_override",
        "prefix_match_unit", "skip_page_size_padded", "sliding_window",
    )  # fmt: skip
    false = (
        "enable_mamba_shared_prefix_checkpoint", "is_attention_free", "kv_sharing_fast_prefill",
        "use_kda_recoverssm", "use_replayssm",
    )  # fmt: skip
    true = ("_block_size_resolved", "swa_bounded_replay", "user_specified_block_size")
    return {
        **dict.fromkeys(unset, "None"),
        **dict.fromkeys(false, "False"),
        **dict.fromkeys(true, "True"),
        "block_size": block,
        "cache_dtype": "auto",
        "effective_attention_block_size": block,
        "enable_prefix_caching": str(config.caches_prefixes),
        "gpu_memory_utilization": "0.92",
        "kv_cache_dtype_skip_layers": "[]",
        "kv_cache_max_concurrency": str(blocks * config.block_tokens / config.max_model_len),
        "kv_cache_size_tokens": str(blocks * config.block_tokens),
        "kv_offloading_backend": "native",
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_ssm_cache_dtype": "float32",
        "num_gpu_blocks": str(blocks),
        "prefix_cache_retention_interval": "0",
        "prefix_caching_hash_algo": "xxhash",
        "replayssm_buffer_len": "16",
    }
