"""Counters and histograms of a modelled engine, updated at the same moments as in vLLM.

Bucket edges are those of vLLM 0.32.0 (``v1/metrics/loggers.py``). ``standin/metrics.py`` exposes the values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from routing.simulation.engine import Sequence

TIME_TO_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PARAMS_N = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """``buckets[i]`` counts values <= ``edges[i]`` and above the previous edge; the last bucket is +Inf."""

    __slots__ = ("buckets", "count", "edges", "total")

    def __init__(self, edges: Iterable[float]) -> None:
        self.edges = tuple(float(edge) for edge in edges)
        self.buckets = [0] * (len(self.edges) + 1)
        self.count = 0
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self.buckets[bisect_left(self.edges, value)] += times
        self.count += times
        self.total += value * times


def request_token_edges(max_model_len: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 ... up to ``max_model_len`` tokens."""
    edges = (step * 10**power for power in range(len(str(max_model_len))) for step in (1.0, 2.0, 5.0))
    return [edge for edge in edges if edge <= max_model_len]


class Statistics:
    """Counters, histograms and gauges of one engine since its start. Tokens unless the name says otherwise."""

    def __init__(self, max_model_len: int) -> None:
        request_tokens = request_token_edges(max_model_len)
        # Gauges: the scheduler's state after its last step. A hung engine keeps showing them.
        self.running = 0  # requests
        self.waiting = 0  # requests
        self.kv_usage_ratio = 0.0  # blocks held by running requests / all blocks
        self.rejected = 0  # requests that the stand-in rejects because its queue is full
        # At first admission.
        self.queries = 0
        self.hits = 0
        self.external_queries = 0  # of prompts whose KV blocks came from another engine: tokens not cached here
        self.external_hits = 0
        # At the first token.
        self.prompt_tokens = 0
        self.prompt_cached = 0  # external ones included
        self.prompt_external = 0
        self.time_to_first_token = Histogram(TIME_TO_FIRST_TOKEN_S)
        # At each step.
        self.generation_tokens = 0
        self.preemptions = 0  # counted when the preempted request runs again
        self.iteration_tokens = Histogram(ITERATION_TOKENS)
        self.inter_token = Histogram(INTER_TOKEN_S)
        # At the end of a request.
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.request_prompt = Histogram(request_tokens)
        self.request_generation = Histogram(request_tokens)
        self.request_max_generation = Histogram(request_tokens)
        self.request_max_tokens = Histogram(request_tokens)
        self.request_computed = Histogram(request_tokens)
        self.request_n = Histogram(PARAMS_N)
        self.request_preemptions = Histogram(PREEMPTIONS)
        self.time_per_output_token = Histogram(INTER_TOKEN_S)
        self.end_to_end = Histogram(REQUEST_LATENCY_S)
        self.queue_time = Histogram(REQUEST_LATENCY_S)
        self.inference_time = Histogram(REQUEST_LATENCY_S)
        self.prefill_time = Histogram(REQUEST_LATENCY_S)
        self.decode_time = Histogram(REQUEST_LATENCY_S)

    def count_end(self, sequence: Sequence, now_s: float) -> None:
        """Count a sequence that finished now, other than by an abort.

        No duration is negative, although a late driver plans steps that begin before the latest arrivals.
        """
        admitted_s, first_s = sequence.admitted_s, sequence.first_token_s
        if admitted_s is None or first_s is None:
            raise AssertionError("a sequence ends only after its first token")
        generated = sequence.generated_tokens
        self.finished[sequence.finish_reason] += 1
        self.request_prompt.observe(sequence.prompt_tokens)
        self.request_generation.observe(generated)
        if sequence.max_tokens is not None:
            self.request_max_tokens.observe(sequence.max_tokens)
        self.request_computed.observe(sequence.prompt_tokens - (sequence.cached_tokens or 0))
        self.request_preemptions.observe(sequence.preemptions)
        self.end_to_end.observe(max(0.0, now_s - sequence.arrived_s))
        self.queue_time.observe(admitted_s - sequence.arrived_s)
        self.prefill_time.observe(max(0.0, first_s - admitted_s))
        self.decode_time.observe(now_s - first_s)
        self.inference_time.observe(max(0.0, now_s - admitted_s))
        self.time_per_output_token.observe((now_s - first_s) / max(1, generated - 1))
        if sequence.siblings.add(generated):
            self.request_n.observe(sequence.siblings.size)
            self.request_max_generation.observe(sequence.siblings.longest)
