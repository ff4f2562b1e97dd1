"""The families of vLLM 0.32.0's ``/metrics``, in its order and words, read from an engine's statistics.

A small writer of the text exposition format, fast enough to serve 700 lines in well under 5 ms.

Everything that does not change is rendered once: headers, labels, bucket edges, the ``_created`` companions. What is
left at scrape time is one number per line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from routing.simulation.blocks import BlockResidency, Histogram
from routing.simulation.engine import Engine

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

Labels = Mapping[str, str]
Read = Callable[[], float]


def number(value: float) -> str:
    """A sample's value as prometheus_client writes it: ``9.0``, ``6.1906944e+08``, ``+Inf``."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    text = repr(float(value))
    point = text.find(".")
    if value <= 0 or point <= 6 or "e" in text:
        return text
    digits = f"{text[:point]}{text[point + 1 :]}".rstrip("0") or "0"
    mantissa = f"{digits[0]}.{digits[1:]}".rstrip(".")
    return f"{mantissa}e+{point - 1:02d}"


def label_text(labels: Labels) -> str:
    """``{a="b",c="d"}`` in alphabetical order; nothing without labels."""
    pairs = ",".join(f'{name}="{_escaped(labels[name])}"' for name in sorted(labels))
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@dataclass(frozen=True, slots=True)
class _Value:
    prefix: str
    read: Read

    def lines(self) -> list[str]:
        return [f"{self.prefix} {number(self.read())}"]


@dataclass(frozen=True, slots=True)
class _Buckets:
    prefixes: tuple[str, ...]  # of each bucket, then count and sum
    histogram: Histogram

    def lines(self) -> list[str]:
        prefixes, running, out = self.prefixes, 0, []
        for index, count in enumerate(self.histogram.buckets):
            running += count
            out.append(f"{prefixes[index]} {number(running)}")
        out.append(f"{prefixes[-2]} {number(self.histogram.count)}")
        out.append(f"{prefixes[-1]} {number(self.histogram.total)}")
        return out


class Family:
    """One metric of any kind, with all its label sets; ``name`` is the one on the wire."""

    def __init__(self, name: str, kind: str, help_text: str, created_s: float | None = None) -> None:
        self.name = name
        self._header = f"# HELP {name} {help_text}\n# TYPE {name} {kind}"
        self._series: list[_Value | _Buckets] = []
        self._created_s = created_s
        base = name.removesuffix("_total") if kind == "counter" else name
        self._created_name = f"{base}_created"
        self._created = [f"# HELP {base}_created {help_text}\n# TYPE {base}_created gauge"]

    def value(self, labels: Labels, read: Read, created_s: float | None = None) -> None:
        """Add a label set whose value is read at each scrape."""
        self._series.append(_Value(f"{self.name}{label_text(labels)}", read))
        self._add_created(labels, created_s)

    def histogram(self, labels: Labels, histogram: Histogram, created_s: float | None = None) -> None:
        """Add a label set that is a histogram."""
        edges = [*histogram.edges, math.inf]
        prefixes = [f"{self.name}_bucket{label_text({**labels, 'le': number(edge)})}" for edge in edges]
        prefixes += [f"{self.name}_{part}{label_text(labels)}" for part in ("count", "sum")]
        self._series.append(_Buckets(tuple(prefixes), histogram))
        self._add_created(labels, created_s)

    def summary(self, labels: Labels, histogram: Histogram, created_s: float | None = None) -> None:
        """Add a label set that shows count and sum only."""
        text = label_text(labels)
        self._series.append(_Value(f"{self.name}_count{text}", lambda: histogram.count))
        self._series.append(_Value(f"{self.name}_sum{text}", lambda: histogram.total))
        self._add_created(labels, created_s)

    def _add_created(self, labels: Labels, created_s: float | None) -> None:
        moment_s = self._created_s if created_s is None else created_s
        if moment_s is not None:
            self._created.append(f"{self._created_name}{label_text(labels)} {number(moment_s)}")

    def lines(self) -> list[str]:
        """Header, samples, and the ``_created`` companion where there is one."""
        out = [self._header]
        for series in self._series:
            out += series.lines()
        return out + self._created if len(self._created) > 1 else out


def render(families: list[Family]) -> bytes:
    """The whole page."""
    lines: list[str] = []
    for family in families:
        lines += family.lines()
    lines.append("")
    return "\n".join(lines).encode()


_FLOPS = "Estimated number of {} per GPU (for Model Flops Utilization calculations)."
_WAITING_BY_REASON = (
    "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = "
    "deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals "
    "vllm:num_requests_waiting."
)
_SLEEP_STATE = (
    "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 "
    "means sleep level 1; discard_all = 1 means sleep level 2."
)
_EXTERNAL = "External prefix cache {} from KV connector cross-instance cache sharing, in terms of number of {} tokens."
_CACHED_BY_SOURCE = (
    "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), disk, "
    "p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to "
    "vllm:prefix_cache_hits + vllm:external_prefix_cache_hits."
)
_COMPUTED = "Histogram of new KV tokens computed during prefill (excluding cached tokens)."


@dataclass(slots=True)
class Rejections:
    """Admission attempts that a queue limit refused."""

    requests: int = 0


def _zero() -> float:
    return 0.0


class EngineMetrics:
    """All ``vllm:`` families of one engine."""

    def __init__(self, engine: Engine, model: str, rejections: Rejections) -> None:
        self._labels = {"engine": "0", "model_name": model}
        self._model = model
        self._created_s = time.time()
        self.families: list[Family] = []
        self._add_engine_counters(engine)
        self._add_token_counters(engine)
        self._add_outcomes(engine, rejections)
        self._add_histograms(engine)
        if engine.residency is not None:
            self._add_residency(engine.residency)
        self._add_config(engine)

    def _family(self, name: str, kind: str, help_text: str) -> Family:
        family = Family(f"vllm:{name}", kind, help_text, None if kind == "gauge" else self._created_s)
        self.families.append(family)
        return family

    def _counter(self, name: str, help_text: str, read: Read) -> None:
        self._family(f"{name}_total", "counter", help_text).value(self._labels, read)

    def _gauge(self, name: str, help_text: str, read: Read) -> None:
        self._family(name, "gauge", help_text).value(self._labels, read)

    def _by(self, family: Family, label: str, reads: dict[str, Read]) -> None:
        for value, read in reads.items():
            family.value({**self._labels, label: value}, read)

    def _histogram(self, name: str, help_text: str, histogram: Histogram) -> None:
        self._family(name, "histogram", help_text).histogram(self._labels, histogram)

    def _add_engine_counters(self, engine: Engine) -> None:
        statistics = engine.statistics
        gauges = statistics.gauges
        self._counter("estimated_flops_per_gpu", _FLOPS.format("floating point operations"), _zero)
        self._counter("estimated_read_bytes_per_gpu", _FLOPS.format("bytes read from memory"), _zero)
        self._counter("estimated_write_bytes_per_gpu", _FLOPS.format("bytes written to memory"), _zero)
        self._gauge("num_requests_running", "Number of requests in model execution batches.", lambda: gauges.running)
        self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", lambda: gauges.waiting)
        by_reason = self._family("num_requests_waiting_by_reason", "gauge", _WAITING_BY_REASON)
        self._by(by_reason, "reason", {"capacity": lambda: gauges.waiting, "deferred": _zero})
        asleep = self._family("engine_sleep_state", "gauge", _SLEEP_STATE)
        states: dict[str, Read] = {"awake": lambda: 1.0, "weights_offloaded": _zero, "discard_all": _zero}
        self._by(asleep, "sleep_state", states)
        self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda: gauges.kv_usage_ratio)

    def _add_token_counters(self, engine: Engine) -> None:
        counted = engine.statistics
        cache = "Prefix cache {}, in terms of number of {} tokens."
        self._counter("prefix_cache_queries", cache.format("queries", "queried"), lambda: counted.queries)
        self._counter("prefix_cache_hits", cache.format("hits", "cached"), lambda: counted.hits)
        self._counter("external_prefix_cache_queries", _EXTERNAL.format("queries", "queried"), _zero)
        self._counter("external_prefix_cache_hits", _EXTERNAL.format("hits", "cached"), _zero)
        media = "Multi-modal cache {}, in terms of number of {} items."
        self._counter("mm_cache_queries", media.format("queries", "queried"), _zero)
        self._counter("mm_cache_hits", media.format("hits", "cached"), _zero)
        preempted = "Cumulative number of preemption from the engine."
        self._counter("num_preemptions", preempted, lambda: counted.preemptions)
        self._counter("prompt_tokens", "Number of prefill tokens processed.", lambda: counted.prompt_tokens)
        sources: dict[str, Read] = {
            "local_compute": lambda: counted.prompt_tokens - counted.prompt_cached,
            "local_cache_hit": lambda: counted.prompt_cached,
            "external_kv_transfer": _zero,
        }
        by_source = self._family("prompt_tokens_by_source_total", "counter", "Number of prompt tokens by source.")
        self._by(by_source, "source", sources)
        cached = "Number of cached prompt tokens (local + external)."
        self._counter("prompt_tokens_cached", cached, lambda: counted.prompt_cached)
        tiers: dict[str, Read] = dict.fromkeys(("device", "host", "p2p", "disk", "external_unspecified"), _zero)
        tiers["device"] = lambda: counted.hits
        by_tier = self._family("prompt_tokens_cached_by_source_total", "counter", _CACHED_BY_SOURCE)
        self._by(by_tier, "source", tiers)
        generated = "Number of generation tokens processed."
        self._counter("generation_tokens", generated, lambda: counted.generation_tokens)

    def _add_outcomes(self, engine: Engine, rejections: Rejections) -> None:
        finished = engine.statistics.finished
        outcomes = self._family("request_success_total", "counter", "Count of successfully processed requests.")
        for reason in finished:
            labels = {**self._labels, "finished_reason": reason}
            outcomes.value(labels, lambda reason=reason: finished[reason])  # type: ignore[misc]
        refused = "Number of admission attempts rejected by a queue limit, by reason."
        family = self._family("admission_rejections_total", "counter", refused)
        model = {"model_name": self._model}
        family.value({**model, "reason": "max_num_queued_reqs"}, lambda: rejections.requests)
        family.value({**model, "reason": "max_num_queued_tokens"}, _zero)

    def _add_histograms(self, engine: Engine) -> None:
        counted = engine.statistics
        per = "Histogram of time spent in {} phase for request."
        for name, help_text, histogram in (
            ("request_prompt_tokens", "Number of prefill tokens processed.", counted.request_prompt),
            ("request_generation_tokens", "Number of generation tokens processed.", counted.request_generation),
            ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", counted.iteration_tokens),
            (
                "request_max_num_generation_tokens",
                "Histogram of maximum number of requested generation tokens.",
                counted.request_max_generation,
            ),
            ("request_params_n", "Histogram of the n request parameter.", counted.request_n),
            (
                "request_params_max_tokens",
                "Histogram of the max_tokens request parameter.",
                counted.request_max_tokens,
            ),
            (
                "time_to_first_token_seconds",
                "Histogram of time to first token in seconds.",
                counted.time_to_first_token,
            ),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", counted.inter_token),
            (
                "request_time_per_output_token_seconds",
                "Histogram of time_per_output_token_seconds per request.",
                counted.time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", counted.end_to_end),
            ("request_queue_time_seconds", per.format("WAITING"), counted.queue_time),
            ("request_inference_time_seconds", per.format("RUNNING"), counted.inference_time),
            ("request_prefill_time_seconds", per.format("PREFILL"), counted.prefill_time),
            ("request_decode_time_seconds", per.format("DECODE"), counted.decode_time),
            (
                "request_num_preemptions",
                "Histogram of the number of times a request was preempted.",
                counted.request_preemptions,
            ),
            ("request_prefill_kv_computed_tokens", _COMPUTED, counted.request_computed),
        ):
            self._histogram(name, help_text, histogram)

    def _add_residency(self, residency: BlockResidency) -> None:
        sampled = "Sampled metrics (controlled by --kv-cache-metrics-sample)."
        lifetime = f"Histogram of KV cache block lifetime from allocation to eviction. {sampled}"
        self._histogram("kv_block_lifetime_seconds", lifetime, residency.lifetime)
        idle = f"Histogram of idle time before KV cache block eviction. {sampled}"
        self._histogram("kv_block_idle_before_evict_seconds", idle, residency.idle_before_evict)
        gap = (
            "Histogram of time gaps between consecutive KV cache block accesses. Only the most recent accesses are "
            f"recorded (ring buffer). {sampled}"
        )
        self._histogram("kv_block_reuse_gap_seconds", gap, residency.reuse_gap)

    def _add_config(self, engine: Engine) -> None:
        family = self._family("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
        family.value({**cache_config(engine), "engine": "0"}, lambda: 1.0)


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
    return {
        **dict.fromkeys(unset, "None"),
        **dict.fromkeys(false, "False"),
        "_block_size_resolved": "True",
        "block_size": block,
        "cache_dtype": "auto",
        "effective_attention_block_size": block,
        "enable_prefix_caching": "True",
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
        "swa_bounded_replay": "True",
        "user_specified_block_size": "True",
    }
