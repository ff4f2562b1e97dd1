"""Long work beside requests: a little at a time, with their turns in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import perf_counter
from typing import TypeVar

SLICE_S = 0.0005  # of work at a stretch, which a request may wait for twice; an item that takes longer is not cut

T = TypeVar("T")


async def in_turns(items: Iterable[T]) -> list[T]:
    """All items. What they are made from may change between any two of them."""
    made: list[T] = []
    until = perf_counter() + SLICE_S
    for item in items:
        made.append(item)
        if perf_counter() > until:
            await asyncio.sleep(0)
            until = perf_counter() + SLICE_S
    return made
