"""Which LoRA adapters a replica has loaded, by its own ``/v1/models``.

Asked by the health check's task, on a connection of its own. vLLM loads and drops adapters at run time, so it is asked
again every few checks; an answer that cannot be read tells nothing, and what was known stays.
"""

from __future__ import annotations

import asyncio
import re

import msgspec
from msgspec import Struct

from routing.proxy.replicas.address import Address
from routing.proxy.replicas.asking import asked

EVERY = 5  # health checks between two questions
MAX_BYTES = 1 << 20  # of an answer; a thousand adapters take a quarter of it

_length = re.compile(rb"\r\ncontent-length: *([0-9]{1,7})\r\n", re.IGNORECASE).search


class _Card(Struct):
    id: str


class _Models(Struct):
    data: list[_Card]


_models = msgspec.json.Decoder(_Models)


async def held_adapters(address: Address, names: frozenset[str], timeout_s: float) -> frozenset[str] | None:
    """Those of ``names`` that a replica lists; None where it gives no answer that says."""
    try:
        async with asyncio.timeout(timeout_s):
            body = await _ask(address)
        return names & {card.id for card in _models.decode(body).data}
    except (TimeoutError, OSError, ValueError, EOFError, RecursionError, asyncio.LimitOverrunError):
        return None


async def _ask(address: Address) -> bytes:
    """The body of the answer; ValueError if it is none of 200 with a length."""
    async with asked(address, "/v1/models") as answer:
        head = await answer.readuntil(b"\r\n\r\n")
        _, status, *_ = head.split(maxsplit=2)  # too few are a ValueError
        length = _length(head)
        if length is None or status != b"200" or int(length[1]) > MAX_BYTES:
            raise ValueError("no list of models")
        return await answer.readexactly(int(length[1]))
