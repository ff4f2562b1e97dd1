"""The metric names of vLLM, SGLang and TensorRT-LLM, and the names that Warmpath gives to the same figures.

``telemetry.metrics.engine`` reads expositions by these tables. What a figure counts differs between engines; the
comment above each table says how.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from telemetry.metrics.exposition import Sample

MAX_BLOCKS = 2**31 - 1  # of a cache, and tokens of a block
TIERS = ("device_tokens", "host_tokens", "p2p_tokens", "disk_tokens", "other_tokens")  # hits by tier (H4)
COUNTERS = (
    *("queries", "hits", "external_queries", "external_hits", *TIERS),
    *("prompt_tokens", "generation_tokens", "preemptions", "finished"),
)
GAUGES = ("running", "waiting", "kv_usage_ratio")
RATIOS = frozenset({"kv_usage_ratio"})  # 0 to 1; a value above is in another unit, and not read
EXPECTED = frozenset((*COUNTERS, *GAUGES, "ttft"))  # ``not_reported`` names those that an engine lacks
PROMPT_SOURCES = ("computed_prompt_tokens", "cached_prompt_tokens", "transferred_prompt_tokens")
DURATIONS = ("queue", "prefill", "block_lifetime", "block_idle", "block_reuse_gap")
# Only some engines have these, or only with an option, so ``not_reported`` does not name them.
OPTIONAL_COUNTERS = (
    *(*PROMPT_SOURCES, "mm_cache_queries", "mm_cache_hits"),  # tokens; multimodal items
    *(name for duration in DURATIONS for name in (f"{duration}_ms", f"{duration}_count")),
)
WAITING_REASONS = ("waiting_capacity", "waiting_deferred")  # requests, at the scrape
MetricNames = Mapping[str, tuple[str, ...]]  # Warmpath's name -> the engine's metrics, the preferred one first


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """The KV cache of a replica: all its engines together."""

    block_tokens: int | None = None
    capacity_blocks: int | None = None  # usable blocks
    lacks_prefix_cache: bool = False  # whether an engine says that it runs without prefix caching


@dataclass(frozen=True, slots=True)
class Split:
    """A metric whose label decides which names a sample counts for. A sample for one name makes the others known: 0."""

    metric: str
    label: str
    values: Mapping[str, tuple[str, ...]]  # "": samples without the label
    otherwise: tuple[str, ...] = ()  # for label values that are not listed

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for names in (*self.values.values(), self.otherwise) for name in names)


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one metric name of an engine stands for."""

    kind: Literal["counter", "gauge", "bucket"]
    name: str = ""  # Warmpath's name; "": ``split`` decides
    rank: int = 0  # among the metrics for this name; 0 is preferred
    scale: float = 1.0
    split: Split | None = None

    def names(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """The names that a sample with these labels counts for."""
        if self.split is None:
            return (self.name,)
        return self.split.values.get(labels.get(self.split.label, ""), self.split.otherwise)


@dataclass(frozen=True)
class EngineNames:
    """The metrics of one engine that are read. Counters are read with and without ``_total`` (H14)."""

    engine: str
    prefixes: tuple[str, ...]  # of the engine's own metric names
    counters: MetricNames
    gauges: MetricNames
    histograms: MetricNames
    splits: tuple[Split, ...]  # of counters
    facts_from: frozenset[str]  # metrics that ``facts`` reads
    facts: Callable[[Iterable[Sample]], CacheFacts]
    unit_in_help: frozenset[str] = frozenset()  # counters of tokens or of blocks, depending on the release
    durations: Mapping[str, str] = field(default_factory=dict)  # a name of DURATIONS -> a histogram of seconds
    waiting_reasons: Split | None = None  # of a gauge
    lora_info: str | None = None  # a gauge: its labels list LoRA adapters, its value is the Unix time of that state
    lora_labels: tuple[str, ...] = ()
    engine_label: str | None = None  # names the data-parallel rank (H15)
    role_label: str | None = None  # says whether the engine is one half of a prefill/decode split (H19)
    duplicate_ranks: frozenset[str] = frozenset()  # labels of ranks that all count the same; only rank 0 is read
    created: str | None = None  # the creation time of the counters (H9)
    sleep_state: str | None = None
    lacks_zero_samples: bool = False  # before its first count: a counter that is only declared is 0

    @cached_property
    def meanings(self) -> dict[str, list[Meaning]]:
        """Metric name -> what its samples count for."""
        found: dict[str, list[Meaning]] = {}

        def add(metric: str, meaning: Meaning) -> None:
            found.setdefault(metric, []).append(meaning)

        for split in self.splits:
            add(f"{split.metric}_total", Meaning("counter", split=split))
            add(split.metric, Meaning("counter", rank=1, split=split))
        for name, metric in self.durations.items():
            add(f"{metric}_sum", Meaning("counter", f"{name}_ms", scale=1000.0))
            add(f"{metric}_count", Meaning("counter", f"{name}_count"))
        if self.waiting_reasons:
            add(self.waiting_reasons.metric, Meaning("gauge", split=self.waiting_reasons))
        for name, rank, metric in _ranked(self.counters):
            add(f"{metric}_total", Meaning("counter", name, 2 * rank))
            add(metric, Meaning("counter", name, 2 * rank + 1))
        for name, rank, metric in _ranked(self.gauges):
            add(metric, Meaning("gauge", name, rank))
        for name, rank, metric in _ranked(self.histograms):
            add(f"{metric}_bucket", Meaning("bucket", name, rank))
        return found

    @cached_property
    def metrics(self) -> frozenset[str]:
        """Every metric name that is read."""
        return frozenset(self.meanings) | self.facts_from | ({self.created, self.sleep_state} - {None})  # type: ignore[operator]  # None is removed


def _ranked(names: MetricNames) -> Iterator[tuple[str, int, str]]:
    return ((name, rank, metric) for name, metrics in names.items() for rank, metric in enumerate(metrics))


def _positive_count(value: str | float | None) -> int | None:
    """A count from a label or a gauge; None for anything else."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and 0 < value <= MAX_BLOCKS else None
    return int(value) if value is not None and value.isdecimal() and 0 < int(value) <= MAX_BLOCKS else None


def _one_to_one(values: Sequence[str], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return {value: (name,) for value, name in zip(values, names, strict=True)}


def _blocks_of_tokens(info: Mapping[str, str]) -> int | None:
    tokens, size = _positive_count(info.get("kv_cache_size_tokens")), _positive_count(info.get("block_size"))
    return tokens // size if tokens and size else None


def _vllm_facts(samples: Iterable[Sample]) -> CacheFacts:
    """Reads ``vllm:cache_config_info``. One null block per engine never holds anything.

    With several groups of cache layers, as in models with sliding windows, a token takes a block of each group. Then
    the engine has room for fewer tokens than its blocks, ``kv_cache_size_tokens``.
    """
    infos = [sample.labels for sample in samples]
    blocks = [_positive_count(info.get("num_gpu_blocks")) for info in infos]
    sizes = {_positive_count(info.get("block_size")) for info in infos}
    usable = [
        min(count - 1, _blocks_of_tokens(info) or count)
        for count, info in zip(blocks, infos, strict=True)
        if count is not None and count > 1
    ]
    return CacheFacts(
        block_tokens=sizes.pop() if len(sizes) == 1 else None,
        capacity_blocks=sum(usable) if usable and len(usable) == len(blocks) and sum(usable) <= MAX_BLOCKS else None,
        lacks_prefix_cache=any(info.get("enable_prefix_caching") == "False" for info in infos),
    )


# vLLM 0.28 to 0.33, and older releases under H14. Captures of real servers are in tests/data. Queries and hits are
# counted in tokens when a request is admitted; prompt tokens when its first output arrives (H5). Queries leave out
# requests that may not read the cache and re-admissions after a preemption (H6). ``vllm:iteration_tokens_total`` is a
# histogram in spite of its name, may be wrong behind several API servers, and is not read (T9).
# Until they were renamed, queries and hits were first counted in whole blocks, then in tokens, under the same names.
# ``vllm:lora_requests_info`` keeps a series for each set of adapters with the time when it was last true; up to 0.32
# both labels list adapters with running or scheduled requests, so the two are not told apart.
VLLM = EngineNames(
    engine="vllm",
    prefixes=("vllm:",),
    counters={
        "queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
        "hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
        "external_queries": ("vllm:external_prefix_cache_queries",),
        "external_hits": ("vllm:external_prefix_cache_hits",),
        "prompt_tokens": ("vllm:prompt_tokens",),
        "generation_tokens": ("vllm:generation_tokens",),
        "preemptions": ("vllm:num_preemptions",),
        "finished": ("vllm:request_success",),  # summed over finished_reason
        "mm_cache_queries": ("vllm:mm_cache_queries",),
        "mm_cache_hits": ("vllm:mm_cache_hits",),
    },
    splits=(
        Split(
            "vllm:prompt_tokens_cached_by_source",
            "source",
            _one_to_one(("device", "host", "p2p", "disk", "external_unspecified"), TIERS),
        ),
        Split(
            "vllm:prompt_tokens_by_source",
            "source",
            _one_to_one(("local_compute", "local_cache_hit", "external_kv_transfer"), PROMPT_SOURCES),
        ),
    ),
    gauges={
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    },
    histograms={"ttft": ("vllm:time_to_first_token_seconds",)},
    facts_from=frozenset({"vllm:cache_config_info"}),
    facts=_vllm_facts,
    unit_in_help=frozenset({"vllm:gpu_prefix_cache_queries", "vllm:gpu_prefix_cache_hits"}),
    durations={
        "queue": "vllm:request_queue_time_seconds",
        "prefill": "vllm:request_prefill_time_seconds",
        "block_lifetime": "vllm:kv_block_lifetime_seconds",  # sampled blocks, with --kv-cache-metrics
        "block_idle": "vllm:kv_block_idle_before_evict_seconds",
        "block_reuse_gap": "vllm:kv_block_reuse_gap_seconds",
    },
    waiting_reasons=Split(
        "vllm:num_requests_waiting_by_reason", "reason", _one_to_one(("capacity", "deferred"), WAITING_REASONS)
    ),
    lora_info="vllm:lora_requests_info",
    lora_labels=("running_lora_adapters", "waiting_lora_adapters"),
    engine_label="engine",
    created="vllm:prefix_cache_queries_created",
    sleep_state="vllm:engine_sleep_state",
)


def _sglang_facts(samples: Iterable[Sample]) -> CacheFacts:
    """Reads ``sglang:cache_config_info``. A page is a block."""
    infos = [sample.labels for sample in samples]
    if len(infos) != 1:
        return CacheFacts()
    return CacheFacts(_positive_count(infos[0].get("page_size")), _positive_count(infos[0].get("num_pages")))


# SGLang, started with ``--enable-metrics``; from its documentation and its collector, never seen running here. Queries
# and hits are the prompt and cached tokens of requests that have ended; no token is left out as not eligible (H6), so
# ``prompt_tokens`` is the same number. External hits are cached tokens that were not on the device: host memory and
# storage backends (H3). Preemptions are retracted requests. The KV usage is the share of the token pool in use. Start
# times are absent, because its processes share one registry (H9). The gauge ``cache_hit_rate`` describes the latest
# batch and cannot be summed, so it is not read. External queries and hits by peer or disk are not reported.
SGLANG = EngineNames(
    engine="sglang",
    prefixes=("sglang:", "sglang_"),
    counters={
        "queries": ("sglang:prompt_tokens", "sglang_prompt_tokens"),
        "prompt_tokens": ("sglang:prompt_tokens", "sglang_prompt_tokens"),
        "generation_tokens": ("sglang:generation_tokens", "sglang_generation_tokens"),
        "preemptions": ("sglang:num_retracted_requests",),
        "finished": ("sglang:num_requests",),
    },
    splits=(
        Split(
            "sglang:cached_tokens",
            "cache_source",
            {
                "": ("hits",),  # releases without the label
                "device": ("hits", "device_tokens"),
                "host": ("external_hits", "host_tokens"),
            },
            otherwise=("external_hits", "other_tokens"),  # storage, by the name of its backend
        ),
    ),
    gauges={
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_usage_ratio": ("sglang:token_usage",),
    },
    histograms={"ttft": ("sglang:time_to_first_token_seconds",)},
    facts_from=frozenset({"sglang:cache_config_info"}),
    facts=_sglang_facts,
    engine_label="dp_rank",
    role_label="engine_type",
    duplicate_ranks=frozenset({"tp_rank", "pp_rank", "moe_ep_rank"}),
    lacks_zero_samples=True,
)

TENSORRT_LLM_PATH = "/prometheus/metrics"
_TRT_BLOCK_TOKENS = "trtllm_kv_cache_tokens_per_block"
_TRT_BLOCKS = "trtllm_kv_cache_max_blocks"


def _tensorrt_llm_facts(samples: Iterable[Sample]) -> CacheFacts:
    values = {sample.name: _positive_count(sample.value) for sample in samples}
    return CacheFacts(values.get(_TRT_BLOCK_TOKENS), values.get(_TRT_BLOCKS))


# TensorRT-LLM (``trtllm-serve``); from its collector, never seen running here. ``/metrics`` is JSON about iterations;
# the exposition needs ``return_perf_metrics``, and gauges need ``enable_iter_perf_stats`` too. Queries and hits are
# those of requests that have ended, and every prompt token is a query (H6). Releases without the token counters have no
# hit rate that can be summed: their gauge ``trtllm_kv_cache_hit_rate`` has an unknown weight, so it is not read.
# External queries and hits, hits by tier, preemptions and the time between tokens are not reported either:
# ``trtllm_time_per_output_token_seconds`` is one mean per request.
TENSORRT_LLM = EngineNames(
    engine="tensorrt_llm",
    prefixes=("trtllm_",),
    counters={
        "queries": ("trtllm_prompt_tokens",),
        "prompt_tokens": ("trtllm_prompt_tokens",),
        "generation_tokens": ("trtllm_generation_tokens",),
        "finished": ("trtllm_request_success",),  # summed over finished_reason
    },
    splits=(Split("trtllm_prompt_cached_tokens", "", {"": ("hits",)}),),
    gauges={
        "running": ("trtllm_num_requests_running",),
        "waiting": ("trtllm_num_requests_waiting",),
        "kv_usage_ratio": ("trtllm_kv_cache_utilization",),
    },
    histograms={"ttft": ("trtllm_time_to_first_token_seconds",)},
    facts_from=frozenset({_TRT_BLOCK_TOKENS, _TRT_BLOCKS}),
    facts=_tensorrt_llm_facts,
    lacks_zero_samples=True,
)

ENGINES = (VLLM, SGLANG, TENSORRT_LLM)
VLLM_COUNTS_ONCE = (0, 33)  # the first release that counts a request once, however often it is scheduled (H13)


def may_count_twice(version: str, not_reported: Iterable[str]) -> bool | None:
    """Whether a vLLM release counts a request once per scheduling retry, which skews its rate (H13); None: unknown.

    Without a version, the metrics identify releases before 0.32: those have no hits by tier.
    """
    parsed = re.match(r"(\d+)\.(\d+)", version)
    if parsed:
        return (int(parsed[1]), int(parsed[2])) < VLLM_COUNTS_ONCE
    return True if "device_tokens" in not_reported else None
