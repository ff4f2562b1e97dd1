"""Captured traffic as a trace in Mooncake's format, for ``python -m routing simulate`` and other simulators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime

import numpy as np

from controlplane.models import Pool
from telemetry.lab.captured import replay_input
from telemetry.storage.decisions import captured_between

TRACE_BLOCK_TOKENS = 512  # of Mooncake's format
MAX_TRACE_REQUESTS = 50_000


def trace_lines(pool: Pool, start: datetime, end: datetime) -> Iterator[bytes]:
    """One line for each of the newest ``MAX_TRACE_REQUESTS`` requests; block ids count from 0."""
    traffic = captured_between(pool.name, start, end, at_most=MAX_TRACE_REQUESTS)
    if not len(traffic):
        return
    columns = replay_input(traffic)
    numbers: dict[int, int] = {}
    first_s = float(traffic.requests.at_s[0])
    rows = zip(
        traffic.requests.at_s.tolist(),
        columns.prompt_tokens.tolist(),
        columns.output_tokens.tolist(),
        columns.starts.tolist(),
        columns.starts[1:].tolist(),
        strict=False,
    )
    for at_s, prompt_tokens, output_tokens, begin, stop in rows:
        ends = np.arange(1, -(-prompt_tokens // TRACE_BLOCK_TOKENS) + 1) * TRACE_BLOCK_TOKENS
        last_ids = np.minimum(begin + -(-ends // columns.block_tokens) - 1, stop - 1)
        ids = [numbers.setdefault(int(block), len(numbers)) for block in columns.ids[last_ids]]
        line = {
            "timestamp": round(1000 * (at_s - first_s)),
            "input_length": prompt_tokens,
            "output_length": output_tokens,
            "hash_ids": ids,
        }
        yield json.dumps(line).encode() + b"\n"
