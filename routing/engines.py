"""What the router knows of the engines behind it: one row of ``ENGINES`` for each.

A configuration does not say which engine a replica runs, so all rows hold for every replica: names and texts that only
one engine has, and limits that suit all. Two protocols are vLLM's alone and have modules of their own: KV events
(``kv_events``) and the transfer of KV blocks (``proxy/prefill_leg.py``).
"""

from __future__ import annotations

from typing import Final, NamedTuple

RANK_HEADER: Final = b"X-data-parallel-rank"  # vLLM and SGLang choose the data-parallel rank by it
DRAINING: Final = "draining"  # causes of retries
BUSY: Final = "busy"


class Engine(NamedTuple):
    """One engine. Texts of errors are parts of a body."""

    name: str
    step_metrics: tuple[str, ...]  # each step changes some of them, and nothing else does
    request_metrics: tuple[str, ...]  # requests running and waiting, as of the latest step
    errors: dict[tuple[int, bytes], str]  # cause of a retry, by status and text
    priority_rejected: bytes  # in the 400 of an engine that schedules by arrival; empty: it ignores priorities
    idle_s: float  # after which its server closes an idle connection
    step_tokens: int  # the most that it prefills in one step, by default


VLLM: Final = Engine(
    "vLLM",  # 0.10 to 0.33
    step_metrics=(
        *("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count"),
        *("vllm:iteration_tokens_total_sum", "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:num_preemptions_total"),
        "vllm:request_success_total",
    ),
    request_metrics=("vllm:num_requests_running", "vllm:num_requests_waiting"),
    errors={
        (500, b"cannot schedule new futures after shutdown"): DRAINING,
        (503, b"currently busy and cannot accept new requests"): BUSY,  # its own limit of waiting requests
    },
    priority_rejected=b"riority scheduling",
    idle_s=5.0,
    step_tokens=8192,
)
SGLANG: Final = Engine(
    "SGLang",
    step_metrics=(
        *("sglang:generation_tokens_total", "sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
        *("sglang:token_usage", "sglang:num_used_tokens", "sglang:gen_throughput"),
    ),
    request_metrics=("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    errors={(503, b"The request queue is full."): BUSY},
    priority_rejected=b"",
    idle_s=5.0,
    step_tokens=8192,
)
ENGINES: Final = (VLLM, SGLANG)

IDLE_S: Final = min(engine.idle_s for engine in ENGINES)
STEP_TOKENS: Final = max(engine.step_tokens for engine in ENGINES)


def error_cause(status: int, body: bytes) -> str | None:
    """Why an engine rejected a request that another replica may serve; None if it did not say so."""
    for engine in ENGINES:
        for (error_status, text), cause in engine.errors.items():
            if status == error_status and text in body:
                return cause
    return None


def rejects_priorities(body: bytes) -> bool:
    """Whether the 400 of an engine rejects a request because of its priority."""
    return any(engine.priority_rejected in body for engine in ENGINES if engine.priority_rejected)
