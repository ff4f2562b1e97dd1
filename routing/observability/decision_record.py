"""One placement decision with its outcome, as hashes without prompt text.

A reader may ask for a sample of the block hashes of every record: those below that fraction of their range. Whether a
hash is in the sample depends on the block, not on the prompt, so whoever replays the records sees the same blocks
recur (SHARDS: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015). A smaller sample is a subset of
a larger one.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec

from routing.http.usage import lacks_details, prompt_and_cached
from routing.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from routing.balancing.placement import CandidateLoads, Decision
    from routing.http.response_json import Usage


MAX_CANDIDATES: Final = 8  # loads in a record: the chosen replica, the preferred ones that were skipped, others
_HASHES: Final = 1 << 64


def sampled_blocks(blocks: Iterable[int], ratio: float) -> dict[str, Any]:
    """The blocks of a sample, 0 <= ``ratio`` < 1, and their positions in the prompt, from 0 on."""
    limit = round(ratio * _HASHES)
    sample = [(position, block) for position, block in enumerate(blocks) if block < limit]
    return {"blocks": [format_hash(block) for _, block in sample], "positions": [position for position, _ in sample]}


def with_block_sample(row: dict[str, Any], ratio: float) -> dict[str, Any]:
    """A record's JSON that has all block hashes, with a sample of them."""
    if ratio >= 1:
        return row
    return row | sampled_blocks((int(block, 16) for block in row["blocks"]), ratio)


class Record:
    """One decision. Tokens and seconds; None is unknown."""

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
        self.blocks = blocks  # in parts that records share
        self.candidates = candidates  # with costs if the prompt structure is recorded
        self.hit_tokens = hit_tokens  # predicted, of the estimated prompt; None if the strategy predicts none
        self.retries = 0
        self.status: int | None = None
        self.is_streamed: bool | None = None  # whether the response is an event stream; None: there was no response
        self.ttft_s: float | None = None  # of streamed responses only: the first byte of others is their last token
        self.latency_s: float | None = None  # last byte of the request to last byte of a complete response
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.lacks_details = False  # the engine reported usage, but not how many tokens were cached
        self.rank = rank  # data-parallel rank of the replica; None: it has only one
        self.arm = arm  # whether the active or the canary revision placed the request; None: there is no canary
        self.structure: bytes | None = None  # JSON of a ``PromptStructure``, of a few requests (decision_log.py)

    @classmethod
    def from_decision(cls, decision: Decision, request_id: str, *, with_costs: bool = False) -> Record:
        """The record of a request that is being placed; ``with_costs``: of each candidate, by the strategy."""
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
        """The request goes to another replica, because the previous one failed."""
        self.retries += 1
        self.replica = decision.replica.name
        self.rank = decision.target.rank
        self.reason = decision.choice.reason
        self.block_tokens = decision.replica.block_tokens
        self.candidates = decision.candidate_loads(MAX_CANDIDATES)
        self.hit_tokens = decision.choice.hit_tokens

    def on_first_byte(self, status: int, *, is_streamed: bool) -> None:
        """The first byte of the response's body arrived; at most endpoints a stream's is its first token."""
        self.status = status
        self.is_streamed = is_streamed

    def add_usage(self, usage: Usage | None) -> None:
        """Record the usage that the response reports."""
        if usage is not None:
            self.prompt_tokens, self.cached_tokens = prompt_and_cached(usage)
            self.lacks_details = self.prompt_tokens is not None and lacks_details(usage)

    def as_json(self, seq: int | None = None, ratio: float = 1.0) -> dict[str, Any]:
        """The record in the format of the admin port, with a sample of its block hashes if ``ratio`` < 1."""
        blocks = chain.from_iterable(self.blocks)
        return {
            **({} if seq is None else {"seq": seq}),
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
            **(sampled_blocks(blocks, ratio) if ratio < 1 else {"blocks": [f"{block:016x}" for block in blocks]}),
            "block_count": self.block_count,
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

    @property
    def block_count(self) -> int:
        """Blocks of the prompt."""
        return sum(map(len, self.blocks))


def format_hash(value: int | None) -> str | None:
    """A hash in the form used everywhere: 16 hexadecimal digits."""
    return None if value is None else f"{value:016x}"
