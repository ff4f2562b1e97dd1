"""Replaying each pool's decisions minute by minute: the ladder's bins, and the caches to go on with.

Theory of operation. A minute is settled once it has been over for ``SETTLES``. What is settled is replayed once: the
caches after it, and what the minutes of its bin came to, are kept in PostgreSQL, and every run begins with the newest
of these. It replays the minutes since, keeps the caches after the last settled one, and writes the bins that it touched
anew, so that the bin of now is there too. Kept are the caches after the newest settled minute, and those at the
beginning of some bins before, with how many decisions these bins had: where many more came late, the run goes back
there. Without any, after an absence or where bytes are of another form, the replay begins cold, as far back as
``REBUILD``. The sampled part only falls while a replay lives, so it begins anew when decisions carry many more blocks
and there is room for them.

Hit rate against room, from a pool's latest decisions.
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
from telemetry.lab.capacity import CapacityCurve as Reckoned
from telemetry.lab.chains import Prompts, Requests
from telemetry.lab.ladder import BIN, MINUTE, bin_start
from telemetry.lab.replay import MAX_ENTRIES, MOST_BLOCKS_PER_MINUTE, Replay, StateError, Tally, dump, load
from telemetry.models import CapacityCurve, DecisionCursor, LadderBin, ReplayState
from telemetry.storage import decisions
from telemetry.storage.decisions import latest_requests
from telemetry.storage.locks import LADDER, advisory_lock

log = logging.getLogger(__name__)
SETTLES = timedelta(minutes=2)  # after a minute's end: requests are told when they end, not when they are placed
REBUILD = timedelta(hours=1)  # of decisions that a new replay begins with
KEPT_STATES = 6  # beginnings of a pool's bins: half an hour to go back
LATE_RATIO = 0.01  # of a bin's decisions that came late: as many are worth going back for
MOST_REQUESTS = 20_000  # of a minute; what goes beyond is left out of it
FINER = 4  # times as many blocks are worth beginning anew for
BLOCK_BYTES = 8  # of a replay's bytes
RUN_S = 20.0  # after which a run begins no further bin


@dataclass(frozen=True, slots=True)
class Rooms:
    """The caches of a pool: tokens by name. None, with the reason, where they are not all known."""

    tokens: dict[str, int] | None
    reason: str = ""


@dataclass(slots=True)
class Stand:
    """How far a pool is replayed, and what it takes to go on."""

    pool: Pool
    at: datetime
    replay: Replay
    tally: Tally  # of the bin
    decisions: int = 0  # that the bin had

    @property
    def bin(self) -> datetime:
        """Where the bin of the minute before began."""
        return bin_start(self.at - MINUTE)

    @property
    def ends_bin(self) -> bool:
        """Whether the bin is replayed whole."""
        return self.at == self.bin + BIN


def replay_pools(now: datetime) -> int:
    """Bring every pool's ladder up to date; how many bins were written. One worker at a time for each pool."""
    ends_s = time.monotonic() + RUN_S
    written = 0
    with isolated_items(PeriodicTask.LADDERS) as item:
        for pool in Pool.objects.order_by("pk"):
            with advisory_lock(LADDER + pool.pk) as ours:
                if ours:
                    with item(pool.name):
                        written += replay_pool(pool, now, ends_s=ends_s)
    LadderBin.objects.filter(at__lt=now - timedelta(days=settings.READINGS_RETENTION_DAYS)).delete()
    return written


def replay_pool(pool: Pool, now: datetime, *, ends_s: float | None = None) -> int:
    """One pool's; how many bins were written."""
    stand = _beginning(pool, now)
    written = 0
    while stand is not None and stand.at < now and (ends_s is None or time.monotonic() < ends_s):
        is_settled = stand.at <= _settled(now) - MINUTE
        _replay_until(stand, min(bin_start(stand.at) + BIN, _settled(now) if is_settled else now))
        with transaction.atomic():
            if stand.ends_bin or stand.at >= now:
                _write_bin(stand)
                written += 1
            if is_settled:
                _keep(stand)
        if stand.ends_bin:
            stand.tally, stand.decisions = Tally(), 0
    return written


def rooms_of(pool: Pool, used: set[str]) -> Rooms:
    """The room of each cache that requests go to, or went to (``used``)."""
    rooms: dict[str, int] = {}
    for replica in Replica.objects.filter(pool=pool).exclude(state=ReplicaState.DISABLED):
        ranks = replica.data_parallel_size
        names = [replica.name] if ranks == 1 else [f"{replica.name}#{rank}" for rank in range(ranks)]
        if replica.capacity_blocks and replica.block_tokens:
            rooms |= dict.fromkeys(names, replica.capacity_blocks * replica.block_tokens // ranks)
        elif used.intersection(names):
            return Rooms(None, f"The size of {replica.name}'s cache is not known: its engine has not told it.")
    return Rooms(rooms) if rooms else Rooms(None, "No replica has told the size of its cache.")


def _beginning(pool: Pool, now: datetime) -> Stand | None:
    """Where to go on; None where there is nothing to replay."""
    states = list(ReplayState.objects.filter(pool=pool).defer("state"))
    if states and states[-1].at >= now - REBUILD and not _can_be_finer(pool, states[-1], now):
        start = _first_late(pool, states) or states[-1].at
        ReplayState.objects.filter(pool=pool, at__gt=start).delete()
        had = next((state.decisions for state in states if state.at == bin_start(start) < start), None)
        try:
            return Stand(pool, start, *load(bytes(ReplayState.objects.get(pool=pool, at=start).state)), had or 0)
        except StateError as error:
            log.info("a replay begins anew: %s", error)
    ReplayState.objects.filter(pool=pool).delete()
    first = decisions.first_at(pool.name, now - REBUILD, now)
    return None if first is None else _cold(pool, bin_start(first))


def _cold(pool: Pool, at: datetime) -> Stand:
    """With empty caches, which are kept to go back to."""
    stand = Stand(pool, at, Replay(None), Tally())
    ReplayState.objects.create(pool=pool, at=at, state=dump(stand.replay, stand.tally))
    return stand


def _first_late(pool: Pool, states: list[ReplayState]) -> datetime | None:
    """The first bin to whose settled minutes many more decisions came since."""
    counted = decisions.counts(pool.name, states[0].at, states[-1].at, MINUTE) if len(states) > 1 else {}
    found: Counter[datetime] = Counter()
    for minute, count in counted.items():
        found[bin_start(minute)] += min(count, MOST_REQUESTS)
    for state in states:
        if state.decisions is not None and found[state.at] > (1 + LATE_RATIO) * state.decisions:
            return state.at
    return None


def _can_be_finer(pool: Pool, newest: ReplayState, now: datetime) -> bool:
    """Whether decisions carry many more blocks than the replay goes by, and it has room for them. Once an hour."""
    if newest.at.minute:
        return False
    bins = LadderBin.objects.filter(pool=pool, at__gte=now - REBUILD).aggregate(ratio=Min("sample_ratio"))
    told = DecisionCursor.objects.filter(router__lost_at=None).aggregate(
        ratio=Min("sample_ratio"), blocks_per_s=Sum("blocks_per_s")
    )
    if bins["ratio"] is None or told["ratio"] is None or told["ratio"] < FINER * bins["ratio"]:
        return False
    if told["blocks_per_s"] * 60 * FINER * bins["ratio"] > MOST_BLOCKS_PER_MINUTE:
        return False
    sized = ReplayState.objects.filter(pk=newest.pk).annotate(size=Length("state")).values_list("size", flat=True)
    return int(sized[0]) * FINER < BLOCK_BYTES * MAX_ENTRIES


def _replay_until(stand: Stand, end: datetime) -> None:
    """Replay what was decided up to then, minute by minute read: an array of PostgreSQL holds 1 GB at most."""
    begun, parts = stand.at, []
    while stand.at < end:
        start, stand.at = stand.at, stand.at + MINUTE
        parts.append(decisions.requests_between(stand.pool.name, start, stand.at, at_most=MOST_REQUESTS))
        stand.decisions += len(parts[-1])
    requests = Requests.together(parts)
    rooms = rooms_of(stand.pool, set(requests.replicas.names))
    stand.replay.resize(rooms.tokens)
    stand.replay.learn(requests, (stand.at - begun) / MINUTE)
    stand.replay.use(requests, stand.tally)
    stand.tally.reason = stand.tally.reason or rooms.reason


def _write_bin(stand: Stand) -> None:
    """The bin's rows instead of those that it had."""
    replay, tally = stand.replay, stand.tally
    LadderBin.objects.filter(pool=stand.pool, at=stand.bin).delete()
    LadderBin.objects.bulk_create(
        LadderBin(
            at=stand.bin, pool=stand.pool, group=group, sample_ratio=replay.ratio, reason=tally.reason, **asdict(sums)
        )
        for group, sums in tally.settled(replay.ratio).items()
    )


def _keep(stand: Stand) -> None:
    """The caches of now, instead of those within their bin; and no more of former ones than are gone back to."""
    states = ReplayState.objects.filter(pool=stand.pool)
    states.filter(at=stand.bin).update(decisions=stand.decisions)
    states.filter(at__gt=stand.bin).delete()
    tally = Tally() if stand.ends_bin else stand.tally
    ReplayState.objects.create(pool=stand.pool, at=stand.at, state=dump(stand.replay, tally))
    oldest = stand.bin - (KEPT_STATES - 1) * BIN
    states.filter(at__lt=oldest).delete()


def _settled(now: datetime) -> datetime:
    """Up to when minutes are settled."""
    return (now - SETTLES).replace(second=0, microsecond=0)


EVERY = timedelta(minutes=10)
SPAN = timedelta(hours=1)  # of decisions
MOST_CURVE_REQUESTS = 40_000
MOST_BLOCKS = 80_000  # in all their prompts: a block takes some 10 us
WARM_PART = 1 / 3  # of the requests, which fill the caches and are not counted
FEW = 50


def update_curves(now: datetime) -> None:
    """Reckon the curves that are due. One worker at a time, as replays are."""
    fresh = set(CapacityCurve.objects.filter(at__gt=now - EVERY).values_list("pool_id", flat=True))
    with isolated_items(PeriodicTask.CAPACITY_CURVES) as item:
        for pool in Pool.objects.exclude(pk__in=fresh):
            with item(pool.name):
                update_curve(pool, now)


def update_curve(pool: Pool, now: datetime) -> CapacityCurve:
    """One pool's curve, without points, and with the reason, where there can be none."""
    requests = latest_requests(pool.name, now - SPAN, now, at_most=MOST_CURVE_REQUESTS)
    rooms = rooms_of(pool, set(requests.replicas.names))
    reason = rooms.reason or ("" if len(requests) >= FEW else f"There were fewer than {FEW} requests in an hour.")
    told = {"at": now, "reason": reason, "points": [], "requests": 0, "since": None, "room_tokens": None}
    if not reason and rooms.tokens:
        told |= _reckoned(requests, rooms.tokens)
    return CapacityCurve.objects.update_or_create(pool=pool, defaults=told)[0]


def _reckoned(requests: Requests, rooms: dict[str, int]) -> dict[str, object]:
    ratio = float(requests.sample_ratios.min())
    while requests.block_counts.sum() * ratio > MOST_BLOCKS:
        ratio /= 2
    replay = Replay(None, ratio)
    replay.learn(requests, SPAN / MINUTE)
    requests = requests.thinned(ratio)
    prompts = Prompts.of(requests, replay.tokens_of(requests), ratio)
    bases = prompts.held(np.zeros(len(requests), np.int64)).tolist()
    blocks, gains = requests.blocks.tolist(), prompts.gains().tolist()
    curve, warm, begin = Reckoned(), int(WARM_PART * len(requests)), 0
    for number, (end, tokens) in enumerate(zip(requests.ends.tolist(), prompts.tokens.tolist(), strict=True)):
        replica = requests.replicas.names[requests.replicas.codes[number]]
        counted = tokens if number >= warm else None
        curve.use(replica, blocks[begin:end], gains[begin:end], counted, bases[number])
        begin = end
    points = curve.points({name: replay.room(tokens) for name, tokens in rooms.items()})
    return {
        "points": [asdict(point) for point in points],
        "requests": curve.requests,
        "since": datetime.fromtimestamp(requests.at_s[warm], UTC),
        "sample_ratio": ratio,
        "room_tokens": sum(rooms.values()) // len(rooms),
        "replicas": len(rooms),
    }
