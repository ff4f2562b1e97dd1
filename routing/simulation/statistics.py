"""What an engine counts, at the moment vLLM counts it. Plain numbers; ``standin/metrics.py`` gives them their names.

Bucket edges are those of vLLM 0.32.0 (``v1/metrics/loggers.py``), as its ``/metrics`` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from routing.simulation.blocks import Histogram
from routing.simulation.sequence import Sequence

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


def request_token_edges(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``max_model_len`` tokens."""
    edges: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > max_model_len:
                return tuple(edges)
            edges.append(float(step * scale))
        scale *= 10


@dataclass(slots=True)
class Gauges:
    """The scheduler's state after its last step: a hung engine keeps showing them."""

    running: int = 0  # requests
    waiting: int = 0  # requests
    kv_usage_ratio: float = 0.0  # blocks held by running requests / all blocks


def _seconds() -> Histogram:
    return Histogram(REQUEST_LATENCY_S)


@dataclass(slots=True)
class Statistics:
    """Counters and histograms of one engine since its start. Tokens unless the name says otherwise."""

    max_model_len: int
    gauges: Gauges = field(default_factory=Gauges)
    # at first admission
    queries: int = 0
    hits: int = 0
    # at first token
    prompt_tokens: int = 0
    prompt_cached: int = 0
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(TIME_TO_FIRST_TOKEN_S))
    # at each step
    generation_tokens: int = 0
    preemptions: int = 0  # times; counted when the preempted request runs again
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_TOKENS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_S))
    # at a request's end
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
    )
    request_prompt: Histogram = field(init=False)
    request_generation: Histogram = field(init=False)
    request_max_generation: Histogram = field(init=False)
    request_max_tokens: Histogram = field(init=False)
    request_computed: Histogram = field(init=False)
    request_n: Histogram = field(default_factory=lambda: Histogram(PARAMS_N))
    request_preemptions: Histogram = field(default_factory=lambda: Histogram(PREEMPTIONS))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_S))
    end_to_end: Histogram = field(default_factory=_seconds)
    queue_time: Histogram = field(default_factory=_seconds)
    inference_time: Histogram = field(default_factory=_seconds)
    prefill_time: Histogram = field(default_factory=_seconds)
    decode_time: Histogram = field(default_factory=_seconds)

    def __post_init__(self) -> None:
        """Size the token histograms by the longest request."""
        edges = request_token_edges(self.max_model_len)
        self.request_prompt = Histogram(edges)
        self.request_generation = Histogram(edges)
        self.request_max_generation = Histogram(edges)
        self.request_max_tokens = Histogram(edges)
        self.request_computed = Histogram(edges)

    def count_end(self, sequence: Sequence, now_s: float) -> None:
        """Count a sequence that has ended by itself, now."""
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
        self.end_to_end.observe(now_s - sequence.arrived_s)
        self.queue_time.observe(admitted_s - sequence.arrived_s)
        self.prefill_time.observe(first_s - admitted_s)
        self.decode_time.observe(now_s - first_s)
        self.inference_time.observe(now_s - admitted_s)
        self.time_per_output_token.observe((now_s - first_s) / max(1, generated - 1))
        if sequence.siblings.add(generated):
            self.request_n.observe(sequence.siblings.size)
            self.request_max_generation.observe(sequence.siblings.longest)
