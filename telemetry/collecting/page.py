"""A page of ``/admin/decisions``, read with care: what a router says is bounded here before it reaches a table."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec

MOST_BLOCKS = 4096  # of one prompt; a router hashes 2,048 at most
MOST_JSON_BYTES = 32 << 10  # of candidates, and of an opening: routers describe fewer

T = TypeVar("T", bound=msgspec.Struct)

Name = Annotated[str, msgspec.Meta(max_length=256, pattern="^[^\\x00]*$")]
Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Small = Annotated[int, msgspec.Meta(ge=0, le=2**15 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class PageError(ValueError):
    """An answer that no router gives."""


class Told(msgspec.Struct, frozen=True):
    """One decision, as a router tells it."""

    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    at: Annotated[datetime, msgspec.Meta(tz=True)]
    request_id: Name
    pool: Name
    group: Name
    matched_by: Name
    policy: Name
    revision: Whole
    strategy: Name
    replica: Name
    reason: Name
    prompt_tokens_estimate: Count
    hash_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    block_count: Annotated[int, msgspec.Meta(ge=0, le=MOST_BLOCKS)]
    blocks: Annotated[list[Hash], msgspec.Meta(max_length=MOST_BLOCKS)]
    retries: Small
    positions: Annotated[list[Small], msgspec.Meta(max_length=MOST_BLOCKS)] | None = None
    arm: Name | None = None
    rank: Small | None = None
    prefix: Hash | None = None
    block_tokens: Whole | None = None
    hit_tokens: Count | None = None
    status: Small | None = None
    streamed: bool | None = None
    ttft_s: Seconds | None = None
    latency_s: Seconds | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    candidates: Any = None
    opening: Any = None

    def __post_init__(self) -> None:
        """The places are as many as the blocks, and within the prompt."""
        places = range(self.block_count) if self.positions is None else self.positions
        if len(places) != len(self.blocks) or (places and max(places) >= self.block_count):
            raise ValueError("blocks and positions are not those of one prompt")


class Page(msgspec.Struct, frozen=True):
    """What came after a number."""

    boot: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern="^[^\\x00]*$")]
    next: Count
    dropped: Count
    decisions: list[msgspec.Raw]


def read_page(body: bytes) -> Page:
    """The page, its decisions not looked at yet; PageError for anything else."""
    try:
        return _read(body, Page)
    except msgspec.MsgspecError as error:
        raise PageError(str(error)) from None


def read_decisions(page: Page) -> list[Told]:
    """Those that can be read; one that cannot is left out, so that a router is never stuck with it."""
    found = []
    for raw in page.decisions:
        try:
            found.append(_read(raw, Told))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
    return found


def bounded_json(value: Any) -> str | None:
    """JSON as a column takes it; None where there is none, or too much."""
    if value is None:
        return None
    text = msgspec.json.encode(value)
    return None if len(text) > MOST_JSON_BYTES or b"\\u0000" in text else text.decode()


def _read(text: bytes | msgspec.Raw, kind: type[T]) -> T:
    return msgspec.json.decode(text, type=kind)
