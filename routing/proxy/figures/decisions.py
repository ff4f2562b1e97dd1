"""The latest decisions: where each request went, why, and what came of it. Hashes, never text.

Bounded in number and in bytes, because a record of a long prompt carries thousands of block hashes. A record enters
when its request has ended; a reader asks for what came after the last sequence number it saw, and learns how many
records it came too late for. What it gets at once is bounded too, because requests wait while it is written out.

A reader who wants every record but not every hash says which part of the blocks it wants (``ratio``). Which ones those
are is a property of the blocks, not of the prompts: the hash lies below that part of its range. Whoever replays them
then sees the same blocks again wherever they come back (SHARDS: Waldspurger et al., "Efficient MRC Construction with
SHARDS", FAST 2015). A smaller part is a subset of a larger one.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from routing.core.residency import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from routing.proxy.exchanges.usage import Usage
    from routing.strategies.placement import CandidateLoad, Decision

MAX_RECORDS: Final = 20_000
MAX_BYTES: Final = 32 << 20
MAX_SHOWN_BLOCKS: Final = 16_384  # block hashes in an answer, or those of one record: writing so many takes 3 ms
_RECORD_UNITS: Final = 25  # of them that a record without its blocks takes as long as, and looking at a block
_LOOK_UNITS: Final = 0.2
_HASHES: Final = 1 << 64
MAX_CANDIDATES: Final = 8  # loads shown with a decision: the chosen replica, the homes that refused, others
_RECORD_BYTES: Final = 900  # of a record without its blocks
_CANDIDATE_BYTES: Final = 120


class Record:
    """One decision. Tokens and seconds; None where nobody said."""

    __slots__ = (
        "arm",
        "at",
        "block_tokens",
        "blocks",
        "cached_tokens",
        "candidates",
        "group",
        "hit_tokens",
        "matched_by",
        "opening",
        "policy",
        "pool",
        "prefix",
        "prompt_tokens",
        "prompt_tokens_estimate",
        "rank",
        "reason",
        "replica",
        "request_id",
        "retries",
        "revision",
        "status",
        "strategy",
        "ttft_s",
    )

    def __init__(
        self,
        request_id: str,
        at: float,
        pool: str,
        group: str,
        matched_by: str,
        policy: str,
        revision: int,
        strategy: str,
        replica: str,
        reason: str,
        prompt_tokens_estimate: int,
        block_tokens: int | None,
        prefix: int | None,
        blocks: list[array[int]],
        candidates: Sequence[CandidateLoad],
        hit_tokens: int | None = None,
        rank: int | None = None,
        arm: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.at = at  # unix seconds
        self.pool = pool
        self.group = group
        self.matched_by = matched_by
        self.policy = policy
        self.revision = revision
        self.strategy = strategy
        self.replica = replica
        self.reason = reason
        self.prompt_tokens_estimate = prompt_tokens_estimate
        self.block_tokens = block_tokens  # of the replica
        self.prefix = prefix
        self.blocks = blocks  # in stretches, shared with other records
        self.candidates = candidates  # with costs where the opening is described
        self.hit_tokens = hit_tokens  # predicted, of the estimated prompt; None where the strategy does not ask
        self.retries = 0
        self.status: int | None = None
        self.ttft_s: float | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.rank = rank  # data-parallel, of the replica; None: it has only one
        self.arm = arm  # whether the revision in force placed it or the one on trial; None: the policy tries none
        self.opening: bytes | None = None  # JSON of a ``Shape``, of a few requests (openings.py)

    @classmethod
    def of(cls, decision: Decision, request_id: str, tokens: int, *, weighed: bool = False) -> Record:
        """What is known when a request is placed; ``weighed``: with what the strategy made of each candidate."""
        route, target, choice = decision.route, decision.target, decision.choice
        policy, replica = route.policy, target.replica
        return cls(
            request_id,
            time.time(),
            route.pool,
            route.group,
            decision.matched_by,
            policy.name,
            policy.revision,
            policy.settings.name,
            replica.name,
            choice.reason,
            tokens,
            replica.block_tokens,
            decision.keys.tier1,
            decision.keys.blocks,
            decision.explained(MAX_CANDIDATES) if weighed else decision.candidate_loads(MAX_CANDIDATES),
            choice.hit_tokens,
            target.rank,
            route.arm,
        )

    def placed_again(self, decision: Decision) -> None:
        """The replica before failed; this one is next."""
        self.retries += 1
        self.replica = decision.replica.name
        self.rank = decision.target.rank
        self.reason = decision.choice.reason
        self.block_tokens = decision.replica.block_tokens
        self.candidates = decision.candidate_loads(MAX_CANDIDATES)
        self.hit_tokens = decision.choice.hit_tokens

    def first_byte(self, status: int, ttft_s: float) -> None:
        """The first byte of the answer's body is here."""
        self.status = status
        self.ttft_s = ttft_s

    def used(self, usage: Usage | None) -> None:
        """What the answer said about its tokens."""
        if usage is not None:
            self.prompt_tokens, self.cached_tokens = usage.prompt_and_cached()

    def as_json(self, seq: int | None = None, ratio: float = 1.0) -> dict[str, Any]:
        """The record as the admin port shows it, with this part of its block hashes."""
        shown = {
            "seq": seq,
            "at": datetime.fromtimestamp(self.at, UTC).isoformat(),
            "request_id": self.request_id,
            "pool": self.pool,
            "group": self.group,
            "matched_by": self.matched_by,
            "policy": self.policy,
            "revision": self.revision,
            "arm": self.arm,
            "strategy": self.strategy,
            "replica": self.replica,
            "rank": self.rank,
            "reason": self.reason,
            "prompt_tokens_estimate": self.prompt_tokens_estimate,
            "block_tokens": self.block_tokens,
            "prefix": shown_hash(self.prefix),
            **self._shown_blocks(ratio),
            "hash_tokens": BLOCK_TOKENS,
            "candidates": [candidate.as_json() for candidate in self.candidates],
            "hit_tokens": self.hit_tokens,
            "retries": self.retries,
            "status": self.status,
            "ttft_s": self.ttft_s,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "opening": msgspec.json.decode(self.opening) if self.opening else None,
        }
        if seq is None:
            del shown["seq"]
        return shown

    @property
    def block_count(self) -> int:
        """Blocks of the prompt."""
        return sum(map(len, self.blocks))

    def _shown_blocks(self, ratio: float) -> dict[str, Any]:
        """``positions`` says which of the prompt's blocks these are, from 0 on; not said where they are all."""
        blocks = chain.from_iterable(self.blocks)
        if ratio >= 1:
            shown = [f"{block:016x}" for block in blocks]
            return {"blocks": shown, "block_count": len(shown)}
        below = round(ratio * _HASHES)
        kept = [(place, block) for place, block in enumerate(blocks) if block < below]
        return {
            "blocks": [f"{block:016x}" for _, block in kept],
            "positions": [place for place, _ in kept],
            "block_count": self.block_count,
        }


def thinned(shown: dict[str, Any], ratio: float) -> dict[str, Any]:
    """A record that is shown with all its blocks, with this part of them."""
    if ratio >= 1:
        return shown
    below = round(ratio * _HASHES)
    kept = [(place, block) for place, block in enumerate(shown["blocks"]) if int(block, 16) < below]
    return {**shown, "blocks": [block for _, block in kept], "positions": [place for place, _ in kept]}


def shown_hash(value: int | None) -> str | None:
    """A hash as people copy it: 16 hexadecimal digits."""
    return None if value is None else f"{value:016x}"


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the latest records, in order. They no longer change, so writing them out may take its time."""

    start: int  # sequence number of the first one
    records: list[Record]
    ratio: float
    next: int
    dropped: int

    def shown(self) -> Iterator[dict[str, Any]]:
        """Each as the admin port shows it."""
        return (record.as_json(seq, self.ratio) for seq, record in enumerate(self.records, self.start))

    def as_json(self, shown: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole page, once its records are written out."""
        return {"decisions": shown, "next": self.next, "dropped": self.dropped}


class DecisionRing:
    """The latest records, oldest first."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self._records: deque[tuple[Record, int]] = deque()  # with the bytes that each takes
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._bytes = 0
        self._last = 0  # sequence number of the newest record; the first one ever is 1

    def __len__(self) -> int:
        return len(self._records)

    @property
    def bytes(self) -> int:
        """Roughly what the records take in memory."""
        return self._bytes

    def add(self, record: Record) -> None:
        """Enter a record, and drop the oldest ones that no longer fit."""
        blocks = sum(map(len, record.blocks))
        size = _RECORD_BYTES + 8 * blocks + _CANDIDATE_BYTES * len(record.candidates)
        if record.opening is not None:
            size += len(record.opening)
        self._records.append((record, size))
        self._last += 1
        self._bytes += size
        while len(self._records) > self._max_records or self._bytes > self._max_bytes:
            self._bytes -= self._records.popleft()[1]

    def after(self, seq: int, limit: int, ratio: float = 1.0) -> dict[str, Any]:
        """Records after ``seq``; ``next`` is where to go on, ``dropped`` what is gone for good.

        ``ratio`` is the part of their blocks that is shown.
        """
        page = self.page(seq, limit, ratio)
        return page.as_json(list(page.shown()))

    def page(self, seq: int, limit: int, ratio: float = 1.0) -> Page:
        """The same, not written out yet.

        At most ``limit``, and fewer where their prompts are long: as many as take no longer to write out than
        ``MAX_SHOWN_BLOCKS`` do.
        """
        first = self._last - len(self._records) + 1
        start = max(seq + 1, first)
        records: list[Record] = []
        units = 0.0
        for record, _ in islice(self._records, start - first, start - first + limit):
            units += record.block_count if ratio >= 1 else _RECORD_UNITS + (_LOOK_UNITS + ratio) * record.block_count
            if records and units > MAX_SHOWN_BLOCKS:
                break
            records.append(record)
        next_ = start + len(records) - 1 if records else max(0, min(seq, self._last))
        return Page(start, records, ratio, next_, max(0, first - seq - 1))
