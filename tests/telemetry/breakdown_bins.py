"""Stored bins of a hit-rate breakdown."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from controlplane.models import Pool
from telemetry.lab.breakdown import bin_start
from telemetry.models import BreakdownBin

PROMPT = 1000.0  # tokens of each request


def breakdown_bin(
    pool: Pool, at: datetime, *, requests: int, reachable: float, spread: float = 0.0, **columns: Any
) -> BreakdownBin:
    """A bin of equal prompts: ``reachable`` of each (0 to 1), half of them ``spread`` more and the others less."""
    low, high = (PROMPT * (reachable + sign * spread) for sign in (-1, 1))
    return BreakdownBin.objects.create(
        pool=pool,
        at=bin_start(at),
        requests=requests,
        prompt_tokens=requests * PROMPT,
        reachable=requests * PROMPT * reachable,
        prompt_squares=requests * PROMPT**2,
        reachable_squares=requests / 2 * (low**2 + high**2),
        reachable_products=requests * PROMPT**2 * reachable,
        **{"group": "", "sample_ratio": 1.0, **columns},
    )
