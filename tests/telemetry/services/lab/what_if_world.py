"""A modelled fleet that serves seeded traffic under a policy, step by step, and stores its decisions.

Predictions are compared with what this fleet does under the candidate. It shares the strategies with the replay, but
its engines have blocks of 16 tokens, cache generated tokens, reserve no output and are simulated step by step
(``routing/simulation``), and its routers see blocks of 64 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import quantiles

import msgspec

from controlplane.models import Pool, Router
from controlplane.services.fleet.replicas import add_replica, record_engine_facts
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.snapshots import single_snapshot
from routing.replay.fast_engine import FastEngineConfig, ModelledRequest
from routing.replay.routed import StrategyPlacer
from routing.schema import Settings
from routing.simulation.engine import EngineConfig, Sequence
from routing.traffic.columns import Columns
from telemetry.models import Decision
from telemetry.storage.partitions import ensure_days
from tests.routing.simulation.stepwise import TimedPrompt, replay
from tests.telemetry.stored_decisions import a_router, decision

ENGINE_BLOCK, HASH_BLOCK = 16, 64
CACHE_TOKENS = 60_000  # of a replica
PREFIX_BLOCKS = 4  # of a tier-1 prefix by the default boundary, 1 KiB
SPREAD = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True, eq=False)
class Traffic:
    """Requests in order of time, as chains of 16-token block ids of prompt and response."""

    prompts: list[TimedPrompt]
    groups: list[str]


@dataclass(frozen=True)
class Served:
    """What a fleet did: the results by request."""

    placed: list[int]
    sequences: list[Sequence]

    def hit_rate(self, since_s: float) -> float:
        counted = [row for row in self.sequences if row.arrived_s >= since_s]
        return sum(row.cached_tokens or 0 for row in counted) / sum(row.prompt_tokens for row in counted)

    def ttft_s(self, since_s: float, q: float) -> float:
        counted = [row for row in self.sequences if row.arrived_s >= since_s]
        return quantiles([(row.first_token_s or 0) - row.arrived_s for row in counted], n=100)[round(100 * q) - 1]


def add_fleet(pool: Pool) -> Pool:
    """Add four replicas of 60,000 tokens."""
    with single_snapshot(reason="a fleet"):
        for number in range(4):
            replica = add_replica(pool, name=f"r{number}", url=f"http://r{number}")
            record_engine_facts(replica, block_tokens=ENGINE_BLOCK, capacity_blocks=CACHE_TOKENS // ENGINE_BLOCK)
    return pool


def traffic(seed: int, *, seconds: float = 480, rate: float = 4.0, prompts: int = 24, turns: int = 4) -> Traffic:
    """Conversations on shared system prompts of 1,000 to 5,000 tokens; a turn adds 200 to 1,500 tokens."""
    rng = random.Random(seed)
    serial = iter(range(10**9))
    shared = [[next(serial) for _ in range(rng.randint(64, 320))] for _ in range(prompts)]
    rows: list[tuple[float, str, list[int], int, int]] = []
    starts = rate / turns
    at_s = -120.0  # conversations of before are going on
    while at_s < seconds:
        at_s += rng.expovariate(starts)
        prompt = min(int(rng.expovariate(3 / prompts)), prompts - 1)
        ids, turn_s = list(shared[prompt]), at_s
        for _ in range(turns):
            ids = ids + [next(serial) for _ in range(rng.randint(13, 94))]
            tokens, output = len(ids) * ENGINE_BLOCK + 7, rng.randint(32, 160)
            response = [next(serial) for _ in range((7 + output) // ENGINE_BLOCK)]
            rows.append((turn_s, f"g{prompt % 3}", ids + response, tokens, output))
            ids, turn_s = ids + response, turn_s + rng.uniform(10, 40)
    rows = sorted(row for row in rows if 0 <= row[0] < seconds)
    return Traffic(
        [TimedPrompt(at, tokens, output, tuple(keys)) for at, _, keys, tokens, output in rows], [row[1] for row in rows]
    )


def serve(
    traffic_: Traffic,
    settings: Settings,
    *,
    replicas: int = 4,
    cache_tokens: int = CACHE_TOKENS,
    prefill_rate: float = 8000.0,
) -> Served:
    """Serve the traffic by one router under a policy."""
    columns = Columns(HASH_BLOCK)
    for row in traffic_.prompts:
        columns.append(row.at_s, row.prompt_tokens, row.output_tokens, hash_blocks(row))
    router = _ObservedRouter(
        StrategyPlacer(settings, columns, FastEngineConfig(cache_tokens // HASH_BLOCK, HASH_BLOCK), replicas)
    )
    engine = EngineConfig(cache_tokens // ENGINE_BLOCK, ENGINE_BLOCK, prefill_rate)
    result = replay(traffic_.prompts, engine, replicas, router.choose, observe=router.observe)
    return Served(result.placed, result.sequences)


def hash_blocks(row: TimedPrompt) -> list[int]:
    """The router's block ids of a prompt, with the partial one: each the last of the engine's ids in it."""
    per_block = HASH_BLOCK // ENGINE_BLOCK
    count = -(-row.prompt_tokens // HASH_BLOCK)
    return [row.keys[min((number + 1) * per_block, len(row.keys)) - 1] for number in range(count)]


class _ObservedRouter:
    """Tells the strategies' loads and residency what the engines did since the last arrival."""

    def __init__(self, routed: StrategyPlacer) -> None:
        self._routed = routed
        self._open: dict[int, ModelledRequest] = {}
        self._count = 0

    def choose(self, row: TimedPrompt, _engines: object) -> int:
        request = ModelledRequest(self._count, row.at_s, row.prompt_tokens, row.output_tokens)
        self._open[self._count] = request
        self._count += 1
        return self._routed.place(request, [], row.at_s)

    def observe(self, sequences: SequenceOf[Sequence], _now_s: float) -> None:
        for index, request in list(self._open.items()):
            sequence = sequences[index]
            if sequence.first_token_s is not None and not request.first_token_s:
                request.first_token_s = sequence.first_token_s
                self._routed.on_first_token(request, sequence.first_token_s)
            if sequence.finished_s is not None:
                request.cached_tokens = sequence.cached_tokens or 0
                self._routed.on_ended(request, sequence.finished_s)
                del self._open[index]


def store(
    traffic_: Traffic,
    served: Served,
    router: Router,
    start: datetime,
    *,
    policy: str,
    revision: int,
    ratio: float = 1.0,
) -> None:
    """Store the decisions of the fleet from a time on, with a share of their block hashes."""
    ensure_days([start.date(), (start + timedelta(hours=1)).date()])
    rows = []
    for seq, (row, group, sequence, engine) in enumerate(
        zip(traffic_.prompts, traffic_.groups, served.sequences, served.placed, strict=True), 1
    ):
        hashes = [block * SPREAD % 2**64 for block in hash_blocks(row)[: row.prompt_tokens // HASH_BLOCK]]
        kept = [number for number, value in enumerate(hashes) if value < ratio * 2**64]
        first_s, finished_s = sequence.first_token_s or 0.0, sequence.finished_s or 0.0
        rows.append(
            decision(
                router,
                start + timedelta(seconds=row.at_s),
                seq,
                group=group,
                policy=policy,
                revision=revision,
                replica=f"r{engine}",
                ttft_s=first_s - row.at_s,
                latency_s=finished_s - row.at_s,
                streamed=True,
                prompt_tokens_estimate=row.prompt_tokens,
                prompt_tokens=row.prompt_tokens,
                cached_tokens=sequence.cached_tokens,
                generated_tokens=row.output_tokens,
                prefix=_signed(hashes[PREFIX_BLOCKS - 1]),
                blocks=[_signed(hashes[number]) for number in kept],
                positions=None if ratio == 1 else kept,
                block_count=len(hashes),
                sample_ratio=ratio,
            )
        )
    Decision.objects.bulk_create(rows)


def publish_and_store(
    pool: Pool,
    traffic_: Traffic,
    settings: Settings,
    start: datetime,
    *,
    served: Served | None = None,
    ratio: float = 1.0,
) -> None:
    """Publish the settings, serve the traffic under them, and store the decisions from a time on."""
    policy = pool.policies.get(group=None)
    draft = save_draft(policy, msgspec.to_builtins(settings))
    publish_revision(draft.pk)
    store(
        traffic_,
        served or serve(traffic_, settings),
        a_router(),
        start,
        policy=policy.name,
        revision=draft.number,
        ratio=ratio,
    )


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
