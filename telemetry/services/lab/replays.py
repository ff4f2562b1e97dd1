"""Periodic replay of each pool's decisions: writes the breakdown's bins and the hit rate by cache size.

Theory of operation. A minute is complete ``SETTLE_DELAY`` after its end. Complete minutes are replayed once: the model
caches after the newest one, and the sums of its bin, are stored in PostgreSQL, and the next run continues from there. A
run also replays the incomplete minutes and writes the bins that it touched, so that the current bin exists, but stores
no caches of it. States at the start of earlier bins are kept with the number of decisions that the bins had; if many
more arrive late, the run restarts from that state. Without a state, after an outage or a change of format, the replay
starts cold, at most ``COLD_START_SPAN`` ago. The sampling ratio never increases within a replay, so it also restarts
when decisions carry many more blocks and memory allows them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
from django.conf import settings
from django.db import transaction
from django.db.models import Min, Sum
from django.db.models.functions import Length

from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask, Pool, Replica, ReplicaState
from routing.schema import ReplicaRole
from telemetry.lab.breakdown import BIN, MINUTE, bin_start
from telemetry.lab.cache_grid import CacheGrid
from telemetry.lab.captured import fit_engine
from telemetry.lab.chains import Requests
from telemetry.lab.replay import MAX_BLOCKS_PER_MINUTE, MAX_ENTRIES, BinSums, Replay, StateError, dump, load
from telemetry.lab.shared_cache import Gaps
from telemetry.metrics.windows import Window
from telemetry.models import BreakdownBin, CapacityCurve, DecisionCursor, ReplayState
from telemetry.services.lab.costs import learnt_rate
from telemetry.storage import decisions
from telemetry.storage.decisions import captured_between
from telemetry.storage.locks import BREAKDOWN, advisory_lock

log = logging.getLogger(__name__)
SETTLE_DELAY = timedelta(minutes=2)  # after a minute's end, because decisions are recorded when requests end
COLD_START_SPAN = timedelta(hours=1)  # of decisions that a cold replay starts with
MAX_STATES = 6  # at starts of bins: a replay can restart from up to half an hour ago
LATE_RATIO = 0.01  # share of late decisions in a bin that restarts the replay there
MAX_REQUESTS = 20_000  # per minute; further ones are left out
MIN_RATIO_INCREASE = 4  # increase of the sampling ratio that is worth a cold restart
BLOCK_BYTES = 8  # of a serialized replay
RUN_S = 20.0  # a run starts no further bin after this


@dataclass(frozen=True, slots=True)
class Capacities:
    """Cache sizes of a pool in tokens, by replica or rank; None, with the reason, if not all are known."""

    tokens: dict[str, int] | None
    reason: str = ""


@dataclass(slots=True)
class Progress:
    """Progress of one pool's replay."""

    pool: Pool
    at: datetime
    replay: Replay
    sums: BinSums  # of the bin
    decisions: int = 0  # of the bin

    @property
    def bin(self) -> datetime:
        """Start of the bin of the last replayed minute."""
        return bin_start(self.at - MINUTE)

    @property
    def is_bin_complete(self) -> bool:
        """Whether the bin is complete."""
        return self.at == self.bin + BIN


def replay_pools(now: datetime) -> int:
    """Update every pool's breakdown; returns the number of bins written. Locked by pool."""
    ends_s = time.monotonic() + RUN_S
    written = 0
    with isolated_items(PeriodicTask.BREAKDOWNS) as item:
        for pool in Pool.objects.order_by("pk"):
            with advisory_lock(BREAKDOWN + pool.pk) as is_locked:
                if is_locked:
                    with item(pool.name):
                        written += replay_pool(pool, now, ends_s=ends_s)
    # As long as the rollups of the same length, so that a chart that has a hit rate has the reachable one beside it.
    BreakdownBin.objects.filter(at__lt=now - timedelta(days=settings.ROLLUP_RETENTION_DAYS[300])).delete()
    return written


def replay_pool(pool: Pool, now: datetime, *, ends_s: float | None = None) -> int:
    """Update one pool's breakdown; returns the number of bins written."""
    progress = _resume(pool, now)
    written = 0
    while progress is not None and progress.at < now and (ends_s is None or time.monotonic() < ends_s):
        is_complete = progress.at <= _complete_until(now) - MINUTE
        _replay_until(progress, min(bin_start(progress.at) + BIN, _complete_until(now) if is_complete else now))
        with transaction.atomic():
            if progress.is_bin_complete or progress.at >= now:
                _write_bin(progress)
                written += 1
            if is_complete:
                _store_state(progress)
        if progress.is_bin_complete:
            progress.sums, progress.decisions = BinSums(), 0
    return written


def capacities_of(pool: Pool, used: set[str]) -> Capacities:
    """Capacity of each cache that requests go to, or went to (``used``)."""
    capacities: dict[str, int] = {}
    serving = Replica.objects.filter(pool=pool).exclude(state=ReplicaState.DISABLED).exclude(role=ReplicaRole.PREFILL)
    for replica in serving:
        ranks = replica.data_parallel_size
        names = [replica.name] if ranks == 1 else [f"{replica.name}#{rank}" for rank in range(ranks)]
        if replica.capacity_blocks and replica.block_tokens:
            capacities |= dict.fromkeys(names, replica.capacity_blocks * replica.block_tokens // ranks)
        elif used.intersection(names):
            return Capacities(None, f"The cache size of {replica.name} is unknown: its engine does not report it.")
    return Capacities(capacities) if capacities else Capacities(None, "No replica reports its cache size.")


def _resume(pool: Pool, now: datetime) -> Progress | None:
    """The state to continue from; None if there is nothing to replay."""
    states = list(ReplayState.objects.filter(pool=pool).defer("state"))
    if states and states[-1].at >= now - COLD_START_SPAN and not _can_sample_more(pool, states[-1], now):
        start = _first_bin_with_late_decisions(pool, states) or states[-1].at
        ReplayState.objects.filter(pool=pool, at__gt=start).delete()
        decisions_before = next((state.decisions for state in states if state.at == bin_start(start) < start), None)
        try:
            return Progress(
                pool, start, *load(bytes(ReplayState.objects.get(pool=pool, at=start).state)), decisions_before or 0
            )
        except StateError as error:
            log.info("a replay restarts cold: %s", error)
    ReplayState.objects.filter(pool=pool).delete()
    first = decisions.first_at(pool.name, now - COLD_START_SPAN, now)
    return None if first is None else _start_cold(pool, bin_start(first))


def _start_cold(pool: Pool, at: datetime) -> Progress:
    """A cold replay, stored as a state to restart from."""
    progress = Progress(pool, at, Replay(None), BinSums())
    ReplayState.objects.create(pool=pool, at=at, state=dump(progress.replay, progress.sums))
    return progress


def _first_bin_with_late_decisions(pool: Pool, states: list[ReplayState]) -> datetime | None:
    """The first bin whose complete minutes got many late decisions."""
    counted = decisions.counts(pool.name, states[0].at, states[-1].at, MINUTE) if len(states) > 1 else {}
    counts_by_bin: Counter[datetime] = Counter()
    for minute, count in counted.items():
        counts_by_bin[bin_start(minute)] += min(count, MAX_REQUESTS)
    for state in states:
        if state.decisions is not None and counts_by_bin[state.at] > (1 + LATE_RATIO) * state.decisions:
            return state.at
    return None


def _can_sample_more(pool: Pool, newest: ReplayState, now: datetime) -> bool:
    """Whether decisions have many more blocks than the replay samples, and memory allows more. Checked hourly."""
    if newest.at.minute:
        return False
    bins = BreakdownBin.objects.filter(pool=pool, at__gte=now - COLD_START_SPAN).aggregate(ratio=Min("sample_ratio"))
    cursors = DecisionCursor.objects.filter(router__lost_at=None).aggregate(
        ratio=Min("sample_ratio"), blocks_per_s=Sum("blocks_per_s")
    )
    if bins["ratio"] is None or cursors["ratio"] is None or cursors["ratio"] < MIN_RATIO_INCREASE * bins["ratio"]:
        return False
    if cursors["blocks_per_s"] * 60 * MIN_RATIO_INCREASE * bins["ratio"] > MAX_BLOCKS_PER_MINUTE:
        return False
    sizes = ReplayState.objects.filter(pk=newest.pk).annotate(size=Length("state")).values_list("size", flat=True)
    return int(sizes[0]) * MIN_RATIO_INCREASE < BLOCK_BYTES * MAX_ENTRIES


def _replay_until(progress: Progress, end: datetime) -> None:
    """Replay the decisions up to ``end``; read by minute, because an array of PostgreSQL is at most 1 GB."""
    started_at, parts = progress.at, []
    while progress.at < end:
        start, progress.at = progress.at, progress.at + MINUTE
        parts.append(decisions.requests_between(progress.pool.name, start, progress.at, at_most=MAX_REQUESTS))
        progress.decisions += len(parts[-1])
    requests = Requests.concatenated(parts)
    capacities = capacities_of(progress.pool, set(requests.replicas.names))
    progress.replay.resize(capacities.tokens)
    progress.replay.learn(requests, (progress.at - started_at) / MINUTE)
    progress.replay.use(requests, progress.sums)
    progress.sums.reason = progress.sums.reason or capacities.reason


def _write_bin(progress: Progress) -> None:
    """Replace the bin's rows."""
    replay, bin_sums = progress.replay, progress.sums
    BreakdownBin.objects.filter(pool=progress.pool, at=progress.bin).delete()
    BreakdownBin.objects.bulk_create(
        BreakdownBin(
            at=progress.bin,
            pool=progress.pool,
            group=group,
            sample_ratio=replay.ratio,
            reason=bin_sums.reason,
            **asdict(sums),
        )
        for group, sums in bin_sums.result(replay.ratio).items()
    )


def _store_state(progress: Progress) -> None:
    """Store the current state in place of earlier ones of its bin; delete states beyond ``MAX_STATES``."""
    states = ReplayState.objects.filter(pool=progress.pool)
    states.filter(at=progress.bin).update(decisions=progress.decisions)
    states.filter(at__gt=progress.bin).delete()
    bin_sums = BinSums() if progress.is_bin_complete else progress.sums
    ReplayState.objects.create(pool=progress.pool, at=progress.at, state=dump(progress.replay, bin_sums))
    oldest = progress.bin - (MAX_STATES - 1) * BIN
    states.filter(at__lt=oldest).delete()


def _complete_until(now: datetime) -> datetime:
    return (now - SETTLE_DELAY).replace(second=0, microsecond=0)


CURVE_INTERVAL = timedelta(minutes=10)
CURVE_SPAN = timedelta(hours=1)  # of decisions
MAX_CURVE_REQUESTS = 40_000
MAX_CURVE_BLOCKS = 80_000  # in all prompts, for figures that need many replays
MAX_LENGTH_BLOCKS = 500_000  # for lengths of lost prefixes, each of which has the error of sampling
WARM_UP_RATIO = 1 / 3  # of the requests, which only warm the caches
MIN_CURVE_REQUESTS = 50


def update_curves(now: datetime) -> None:
    """Compute the curves that are due."""
    fresh = set(CapacityCurve.objects.filter(at__gt=now - CURVE_INTERVAL).values_list("pool_id", flat=True))
    with isolated_items(PeriodicTask.CAPACITY_CURVES) as item:
        for pool in Pool.objects.exclude(pk__in=fresh):
            with item(pool.name):
                update_curve(pool, now)


def update_curve(pool: Pool, now: datetime) -> CapacityCurve:
    """Compute one pool's curve; without points, and with a reason, if that is impossible."""
    traffic = captured_between(pool.name, now - CURVE_SPAN, now, at_most=MAX_CURVE_REQUESTS)
    requests, fit = traffic.requests, fit_engine(traffic, np.arange(len(traffic)))
    capacities = capacities_of(pool, set(requests.replicas.names))
    reason = capacities.reason or (
        "" if len(requests) >= MIN_CURVE_REQUESTS else f"Fewer than {MIN_CURVE_REQUESTS} requests in an hour."
    )
    values = {"at": now, "reason": reason, "points": [], "requests": 0, "since": None, "cache_tokens": None}
    values |= {"placements": None, "working_set": None}
    window = Window(now - CURVE_SPAN, now, CURVE_SPAN.total_seconds())
    values |= {"fitted_requests": fit.requests, "gaps": None, **learnt_rate(pool, fit, window)}
    if not reason and capacities.tokens:
        warm = int(WARM_UP_RATIO * len(requests))
        grid = CacheGrid(requests, capacities.tokens, warm=warm, most_blocks=MAX_CURVE_BLOCKS)
        placements, working_set = grid.placements(), grid.working_set()
        lengths = CacheGrid(requests, capacities.tokens, warm=warm, most_blocks=MAX_LENGTH_BLOCKS)
        values |= {
            "points": [asdict(point) for point in grid.points()],
            "placements": placements and asdict(placements),
            "working_set": working_set and asdict(working_set),
            "gaps": Gaps.of(lengths.lost_tokens(), lengths.prompt_tokens, lengths.length_error()).as_json(),
            "requests": len(requests) - warm,
            "since": datetime.fromtimestamp(requests.at_s[warm], UTC),
            "sample_ratio": grid.ratio,
            "cache_tokens": sum(capacities.tokens.values()) // len(capacities.tokens),
            "replicas": len(capacities.tokens),
        }
    return CapacityCurve.objects.update_or_create(pool=pool, defaults=values)[0]
