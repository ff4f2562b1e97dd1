"""Decision records and their log: the latest placement decisions of a router process, as hashes without text.

The log is bounded in records and in bytes, because a record of a long prompt has thousands of block hashes. A record is
added when its request has ended. A reader requests the records after the last sequence number that it has read; the
response says how many records were dropped since then. Pages are bounded too, because a page is encoded as a whole.

Describing a prompt structure costs a millisecond. So one request per second and task group is described, at most
``MAX_PER_S`` of all groups; other requests only compare the time. After a request whose group was described recently,
the next lookup is a moment later, so that each group is sampled as often as its traffic allows.

A reader may ask for a sample of the block hashes of every record: those below that fraction of their range. Whether a
hash is in the sample depends on the block, not on the prompt, so a replay of the records sees the same blocks recur
(SHARDS: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015). A smaller sample is a subset of
a larger one.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
from xxhash import xxh3_64_intdigest

from routing.http.usage import cached_of, generated_tokens, prompt_and_cached
from routing.log import defect
from routing.prompt.parsing import parse_body
from routing.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from routing.balancing.placement import CandidateLoads, Decision
    from routing.http.request import Request
    from routing.http.response_json import Usage


MAX_CANDIDATES: Final = 8  # loads in a record: the chosen replica, skipped preferred replicas, other candidates
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


class LegOutcome(StrEnum):
    """How the prefill by another replica ended."""

    USED = "used"  # the decode replica got the parameters of the transfer
    SKIPPED = "skipped"
    FAILED = "failed"
    CANCELLED = "cancelled"  # the client disconnected


class PrefillRecord:
    """Whether another replica prefilled a request's prompt, in a pool whose replicas have roles."""

    def __init__(self, uncached_tokens: int) -> None:
        self.outcome = LegOutcome.SKIPPED
        self.replica: str | None = None  # the last one that got the prompt
        self.cause: str | None = None  # why it was skipped or failed
        self.uncached_tokens = uncached_tokens  # estimated, at the decode replica
        self.hit_tokens: int | None = None  # predicted cached tokens at the prefill replica
        self.cached_tokens: int | None = None  # as it reports
        self.duration_s: float | None = None  # of all attempts

    @property
    def is_used(self) -> bool:
        """Whether the decode replica got the KV blocks."""
        return self.outcome is LegOutcome.USED

    def as_json(self) -> dict[str, Any]:
        """As JSON values for the admin port."""
        return {
            "outcome": self.outcome,
            "replica": self.replica,
            "cause": self.cause,
            "uncached_tokens": self.uncached_tokens,
            "duration_s": self.duration_s,
        }


class Record:
    """One decision. Tokens and seconds; None is unknown."""

    __slots__ = (
        "arm",
        "at",
        "block_tokens",
        "blocks",
        "cached_tokens",
        "candidates",
        "continued_after",
        "digest_ratio",
        "generated_tokens",
        "group",
        "hash_tokens",
        "hit_tokens",
        "is_streamed",
        "lacks_details",
        "latency_s",
        "matched_by",
        "objective_ms",
        "outcome",
        "policy",
        "pool",
        "prefill",
        "prefill_s",
        "prefix",
        "prompt_tokens",
        "prompt_tokens_estimate",
        "rank",
        "reason",
        "replica",
        "request_digest",
        "request_id",
        "retries",
        "revision",
        "session",
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
        session: int | None = None,
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
        self.session = session  # hash of the session key; None if the request has none
        self.hash_tokens = hash_tokens  # estimated mean of ``blocks``: estimate / this is the prompt's length in blocks
        self.blocks = blocks  # in parts that records share
        self.candidates = candidates  # with costs if the prompt structure is recorded
        self.hit_tokens = hit_tokens  # predicted; None if the strategy predicts none
        self.retries = 0
        self.continued_after: tuple[tuple[str, int], ...] = ()  # failed replicas, and tokens that the client had then
        self.status: int | None = None
        self.outcome: str | None = None  # a metrics.Outcome, once the request has ended
        self.is_streamed: bool | None = None  # whether the response is an event stream; None: there was no response
        self.ttft_s: float | None = None  # of streamed responses only: the first byte of others is their last token
        self.objective_ms: int | None = None  # for TTFT; None: none
        self.prefill_s: float | None = None  # from sending the request to the replica that responded to its first token
        self.latency_s: float | None = None  # last byte of the request to last byte of a complete response
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.generated_tokens: int | None = None
        self.lacks_details = False  # the engine reported usage, but not how many tokens were cached
        self.rank = rank  # data-parallel rank of the replica; None: it has only one
        self.arm = arm  # whether the active or the canary revision placed the request; None: there is no canary
        self.prefill: PrefillRecord | None = None  # None: no replica of the pool has a role
        self.request_digest: int | None = None  # of its entry in an exact cache; None: not cacheable, or not sampled
        self.digest_ratio: float | None = None  # part of the prompts that are sampled for digests
        self.structure: bytes | None = None  # JSON of a ``PromptStructure``, of a few requests (decision_log.py)

    @classmethod
    def from_decision(cls, decision: Decision, request_id: str, *, with_costs: bool = False) -> Record:
        """The record of a request that is being placed; ``with_costs``: with the cost of each candidate."""
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
            keys.hash_tokens,
            keys.session,
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

    def add_usage(self, usage: Usage, *, omits_zero: bool = False) -> None:
        """Record the usage that the response reports.

        ``omits_zero``: the engine reports details, so where they are missing, no token was cached. vLLM before about
        0.23 leaves them out then.
        """
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens = prompt_and_cached(usage)
        self.generated_tokens = generated = generated_tokens(usage)
        is_unknown = prompt_tokens is not None and cached_tokens is None
        self.lacks_details = is_unknown and bool(generated) and cached_of(usage) is None
        if self.lacks_details and omits_zero and usage.prompt_tokens is not None:
            self.cached_tokens, self.lacks_details = 0, False

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
            "session": format_hash(self.session),
            **(sampled_blocks(blocks, ratio) if ratio < 1 else {"blocks": [f"{block:016x}" for block in blocks]}),
            "block_count": self.block_count,
            "hash_tokens": self.hash_tokens,
            "candidates": self.candidates.as_json(),
            "hit_tokens": self.hit_tokens,
            "prefill": None if self.prefill is None else self.prefill.as_json(),
            "retries": self.retries,
            "continued_after": [{"replica": replica, "tokens": tokens} for replica, tokens in self.continued_after],
            "status": self.status,
            "outcome": self.outcome,
            "streamed": self.is_streamed,
            "ttft_s": self.ttft_s,
            "objective_ms": self.objective_ms,
            "objective_kept": self.keeps_objective,
            "prefill_s": self.prefill_s,
            "latency_s": self.latency_s,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "request_digest": format_hash(self.request_digest),
            "digest_ratio": self.digest_ratio,
            "prompt_structure": msgspec.json.decode(self.structure) if self.structure else None,
        }

    @property
    def keeps_objective(self) -> bool | None:
        """Whether the objective for TTFT was kept; None without one, or without a first token."""
        if self.objective_ms is None or self.ttft_s is None:
            return None
        return self.ttft_s * 1000 <= self.objective_ms

    @property
    def block_count(self) -> int:
        """Blocks of the prompt."""
        return sum(map(len, self.blocks))


def format_hash(value: int | None) -> str | None:
    """A hash in the form used everywhere: 16 hexadecimal digits."""
    return None if value is None else f"{value:016x}"


MAX_RECORDS: Final = 20_000
MAX_BYTES: Final = 32 << 20
MAX_SHOWN_BLOCKS: Final = 16_384  # block hashes of a page with several records: encoding so many takes 3 ms
_RECORD_UNITS: Final = 25  # time to encode a record without blocks, in units of that of one block hash
_SCAN_UNITS: Final = 0.2  # time to compare a block hash with the limit of a sample
RECORD_BYTES: Final = 1000  # memory of a record without its blocks
CANDIDATE_BYTES: Final = 56

GROUP_S = 1.0  # minimum time between two described requests of one task group
MAX_PER_S = 8.0  # described requests of all groups together
LOOKUP_S = 0.02  # pause after a lookup that found a recently described group
MAX_BODY_BYTES = 1 << 20  # maximum body of a request whose tools are described
MAX_GROUPS = 4096  # maximum number of groups whose times are kept

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the latest records, in order. Records no longer change, so they may be encoded later."""

    start: int  # sequence number of the first record
    records: list[Record]
    ratio: float
    next: int  # where the next page starts
    dropped: int  # records before these that are no longer available

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each record in the format of the admin port, computed lazily."""
        for seq, record in enumerate(self.records, self.start):
            yield record.as_json(seq, self.ratio)

    def as_json(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole page with its ``rows``."""
        return {"decisions": rows, "next": self.next, "dropped": self.dropped}


class DecisionRing:
    """The latest records, oldest first."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self.bytes = 0  # approximate memory of the records
        self.last = 0  # sequence number of the newest record; the first one ever is 1
        self._records: deque[tuple[Record, int]] = deque()  # with the bytes of each
        self._max_records = max_records
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._records)

    @property
    def first(self) -> int:
        """Sequence number of the oldest available record; of the next one if there is none."""
        return self.last - len(self._records) + 1

    def add(self, record: Record) -> None:
        """Add a record, and drop the oldest ones beyond the limits."""
        size = RECORD_BYTES + 8 * record.block_count + CANDIDATE_BYTES * len(record.candidates)
        if record.structure is not None:
            size += len(record.structure)
        self._records.append((record, size))
        self.last += 1
        self.bytes += size
        while len(self._records) > self._max_records or self.bytes > self._max_bytes:
            self.bytes -= self._records.popleft()[1]

    def page(self, seq: int, limit: int, ratio: float = 1.0) -> Page:
        """At most ``limit`` records after ``seq``, with a sample ``ratio`` of their blocks.

        A page has at most ``MAX_SHOWN_BLOCKS`` hashes, or one record. Sampled pages have more records, as many as take
        the same time to encode.
        """
        first = self.first
        start = max(seq + 1, first)
        records: list[Record] = []
        units = 0.0
        for record, _ in islice(self._records, start - first, start - first + limit):
            units += record.block_count if ratio >= 1 else _RECORD_UNITS + (_SCAN_UNITS + ratio) * record.block_count
            if records and units > MAX_SHOWN_BLOCKS:
                break
            records.append(record)
        next_ = start + len(records) - 1 if records else max(0, min(seq, self.last))
        return Page(start, records, ratio, next_, max(0, first - seq - 1))


class StructureSampler:
    """Chooses the requests to describe. Times are of the clock of ``Request.arrived_at``."""

    def __init__(self) -> None:
        self.due_at = 0.0  # when the next request's group is looked up
        self._described_at: dict[tuple[str, str], float] = {}

    def should_sample(self, decision: Decision, now: float) -> bool:
        """Whether to describe this request; if so, the time of its group is recorded."""
        if now < self.due_at:
            return False
        group = (decision.pool, decision.group)
        if now - self._described_at.get(group, -GROUP_S) < GROUP_S:
            self.due_at = now + LOOKUP_S
            return False
        self.due_at = now + 1 / MAX_PER_S
        if len(self._described_at) >= MAX_GROUPS:
            self._described_at.clear()
        self._described_at[group] = now
        return True


MAX_DIGESTED_PER_S: Final = 50.0  # requests of a process whose digests are computed, at 30 us each
DIGEST_PERIOD_S: Final = 10.0
MAX_DIGEST_LEVEL: Final = 20


class DigestSampler:
    """Chooses the requests of which decision records have a digest, at most about ``MAX_DIGESTED_PER_S``.

    Not at random, which would hide repeats: the hash of the prompt decides, so that all requests with one prompt have a
    digest or none has. The part of the prompts is 2 ** -``level``.
    """

    def __init__(self, seed: int) -> None:
        self.level = 0
        self._seed = seed
        self._digested = 0  # since the period began
        self._period_began_at = 0.0

    def should_digest(self, prompt: bytes, now: float) -> bool:
        """Whether requests with this prompt have digests now. ``now``: a monotonic time."""
        if now - self._period_began_at >= DIGEST_PERIOD_S:
            if self.level and self._digested < MAX_DIGESTED_PER_S * DIGEST_PERIOD_S / 4:
                self.level -= 1
            self._digested, self._period_began_at = 0, now
        if self.level and self.level_of(prompt) < self.level:
            return False
        self._digested += 1
        if self._digested >= MAX_DIGESTED_PER_S * DIGEST_PERIOD_S:
            self.level = min(self.level + 1, MAX_DIGEST_LEVEL)
            self._digested, self._period_began_at = 0, now
        return True

    def level_of(self, prompt: bytes) -> int:
        """The highest level at which requests with this prompt have digests: one more for half of the prompts."""
        return 64 - xxh3_64_intdigest(prompt, self._seed).bit_length()


def structure_json(decision: Decision, request: Request) -> bytes | None:
    """The prompt structure of a request as JSON; None for a prompt without segments. Takes 1 ms: call after sending."""
    try:
        structure = decision.keys.structure(_tools(request))
    except Exception as error:  # noqa: BLE001 - a failed description must not fail the request
        defect(logger, error, "prompt structure")
        return None
    return _encode(structure) if structure.segments else None


def _tools(request: Request) -> Any:
    """The tools as the client sent them, which the canonical prompt does not contain; None without tools."""
    body = request.body
    if b'"tools"' not in body or len(body) > MAX_BODY_BYTES:
        return None
    return getattr(parse_body(request.head.path.decode(), body), "tools", None)
