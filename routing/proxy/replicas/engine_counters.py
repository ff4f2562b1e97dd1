"""The counters of a replica's ``/metrics`` that move with every step of its engine.

Theory of operation. vLLM's API server answers ``/metrics`` while the engine behind it hangs, with the figures of the
engine's last step. Each step changes some of these: a prefill takes KV blocks chunk by chunk and raises
``kv_cache_usage_perc``, a decode counts ``generation_tokens``. So figures that stay the same while requests are at the
engine show that it takes no steps. Only figures that the engine reports are read; the API server's own would move
without it. Names of vLLM 0.10 to 0.33.
"""

from __future__ import annotations

import asyncio
import re
from enum import Enum
from typing import NamedTuple

from routing.proxy.replicas.address import Address
from routing.proxy.replicas.asking import fetched

PATH = "/metrics"
MAX_BYTES = 4 << 20  # of one exposition; vLLM 0.32 sends 64 KB

_STEP_FIGURES = (
    b"generation_tokens_total|prompt_tokens_total|iteration_tokens_total_count|iteration_tokens_total_sum|"
    b"prefix_cache_queries_total|gpu_prefix_cache_queries_total|kv_cache_usage_perc|gpu_cache_usage_perc|"
    b"num_preemptions_total|request_success_total"
)
_step_lines = re.compile(rb"^vllm:(?:" + _STEP_FIGURES + rb")(?:\{[^}\n]*\})? [^\s]+", re.MULTILINE).findall
_request_lines = re.compile(
    rb"^vllm:num_requests_(?:running|waiting)(?:\{[^}\n]*\})? ([0-9.e+]+)", re.MULTILINE
).findall


class NoCounters(Enum):
    """Why there are none."""

    UNANSWERED = "unanswered"  # nothing came, or not in time
    ABSENT = "absent"  # an answer that has none: metrics are disabled, or it is another engine


class EngineCounters(NamedTuple):
    """One reading; two have the same ``lines`` where the engine took no step in between."""

    lines: tuple[bytes, ...]  # name, labels and value of each, as they came
    requests: float  # running and waiting, as of the engine's last step


def parse_counters(text: bytes) -> EngineCounters | NoCounters:
    """The engine's figures in a Prometheus exposition. Linear in its length."""
    lines = tuple(_step_lines(text))
    requests = _request_lines(text)
    if not lines:
        return NoCounters.ABSENT
    try:
        return EngineCounters(lines, sum(map(float, requests)))
    except ValueError:
        return NoCounters.ABSENT


async def read_counters(address: Address, timeout_s: float) -> EngineCounters | NoCounters:
    """A replica's figures now, or why there are none. One GET; nothing is raised."""
    try:
        async with asyncio.timeout(timeout_s):
            status, text = await fetched(address, PATH, max_bytes=MAX_BYTES)
    except (TimeoutError, OSError):
        return NoCounters.UNANSWERED
    except ValueError:  # no HTTP, or a host that no resolver takes
        return NoCounters.ABSENT
    return parse_counters(text) if status == 200 else NoCounters.ABSENT
