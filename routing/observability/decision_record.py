"""One decision: where a request went, why, and what came of it. Hashes, never text.

A part of the block hashes, for a reader who wants every record but not every hash.

Which ones those are is a property of the blocks, not of the prompts: the hash lies below that part of its range.
Whoever replays them then sees the same blocks again wherever they come back (SHARDS: Waldspurger et al., "Efficient
MRC Construction with SHARDS", FAST 2015). A smaller part is a subset of a larger one.
"""

from __future__ import annotations

import time
from array import array
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec

from routing.http.usage import prompt_and_cached
from routing.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from routing.balancing.decision import CandidateLoads, Decision
    from routing.http.response_json import Usage


_HASHES: Final = 1 << 64


def bound(ratio: float) -> int:
    """Hashes below it are in this part of them, 0 to 1."""
    return round(ratio * _HASHES)


def thinned(shown: dict[str, Any], ratio: float) -> dict[str, Any]:
    """A record that is shown with all its blocks, with this part of them."""
    if ratio >= 1:
        return shown
    below = bound(ratio)
    kept = [(place, block) for place, block in enumerate(shown["blocks"]) if int(block, 16) < below]
    return {**shown, "blocks": [block for _, block in kept], "positions": [place for place, _ in kept]}


MAX_CANDIDATES: Final = 8  # loads shown with a decision: the chosen replica, the homes that refused, others


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
        "hash_tokens",
        "hit_tokens",
        "is_streamed",
        "lacks_details",
        "latency_s",
        "matched_by",
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
        "structure",
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
        candidates: CandidateLoads,
        hit_tokens: int | None = None,
        rank: int | None = None,
        arm: str | None = None,
        hash_tokens: int = BLOCK_TOKENS,
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
        self.hash_tokens = hash_tokens  # estimated, of each of ``blocks``
        self.blocks = blocks  # in stretches, shared with other records
        self.candidates = candidates  # with costs where the shape is taken
        self.hit_tokens = hit_tokens  # predicted, of the estimated prompt; None where the strategy does not ask
        self.retries = 0
        self.status: int | None = None
        self.is_streamed: bool | None = None  # whether the response came as events; None: there was none
        self.ttft_s: float | None = None  # of a streamed response only: the first byte of another is its last token
        self.latency_s: float | None = None  # from the request's last byte to the response's; None: it never came whole
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.lacks_details = False  # the engine generated tokens and reported usage, but not how many were cached
        self.rank = rank  # data-parallel, of the replica; None: it has only one
        self.arm = arm  # whether the revision in force placed it or the one on trial; None: the policy tries none
        self.structure: bytes | None = None  # JSON of a ``PromptStructure``, of a few requests (decision_log.py)

    @classmethod
    def from_decision(cls, decision: Decision, request_id: str, *, with_costs: bool = False) -> Record:
        """What is known when a request is placed; ``with_costs``: with what the strategy made of each candidate."""
        route, target, choice = decision.route, decision.target, decision.choice
        policy, replica, keys = route.policy, target.replica, decision.keys
        return Record(
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
            keys.prompt_tokens,
            replica.block_tokens,
            keys.tier1,
            keys.blocks,
            decision.candidate_costs(MAX_CANDIDATES) if with_costs else decision.candidate_loads(MAX_CANDIDATES),
            choice.hit_tokens,
            target.rank,
            route.arm,
            keys.block_tokens,
        )

    def on_retry(self, decision: Decision) -> None:
        """The replica before failed; this one is next."""
        self.retries += 1
        self.replica = decision.replica.name
        self.rank = decision.target.rank
        self.reason = decision.choice.reason
        self.block_tokens = decision.replica.block_tokens
        self.candidates = decision.candidate_loads(MAX_CANDIDATES)
        self.hit_tokens = decision.choice.hit_tokens

    def on_first_byte(self, status: int, *, is_streamed: bool) -> None:
        """The first byte of the answer's body is here; of a streamed one also the first token, at most endpoints."""
        self.status = status
        self.is_streamed = is_streamed

    def add_usage(self, usage: Usage | None) -> None:
        """What the answer said about its tokens."""
        if usage is not None:
            self.prompt_tokens, self.cached_tokens = prompt_and_cached(usage)
            self.lacks_details = self.prompt_tokens is not None and usage.lacks_details

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
            "prefix": format_hash(self.prefix),
            **self._shown_blocks(ratio),
            "hash_tokens": self.hash_tokens,
            "candidates": self.candidates.as_json(),
            "hit_tokens": self.hit_tokens,
            "retries": self.retries,
            "status": self.status,
            "streamed": self.is_streamed,
            "ttft_s": self.ttft_s,
            "latency_s": self.latency_s,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "opening": msgspec.json.decode(self.structure) if self.structure else None,
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
        below = bound(ratio)
        kept = [(place, block) for place, block in enumerate(blocks) if block < below]
        return {
            "blocks": [f"{block:016x}" for _, block in kept],
            "positions": [place for place, _ in kept],
            "block_count": self.block_count,
        }


def format_hash(value: int | None) -> str | None:
    """A hash as people copy it: 16 hexadecimal digits."""
    return None if value is None else f"{value:016x}"
