"""Replaying each pool's decisions minute by minute: the ladder's bins, and the caches to go on with.

Theory of operation. A replay's caches are kept in PostgreSQL as they were at the beginning of a bin. Every run begins
with the newest ones, replays what was decided since and writes those bins anew, so that the bin of now is there too.
Once a bin has been over for ``SETTLES`` the caches at its end are kept, with how many decisions it had, and it is not
replayed again, unless many more came late: then the run goes back to the caches before. Without any, after an absence
or where bytes are of another form, the replay begins cold, as far back as ``REBUILD``. The sampled part only falls
while a replay lives, so it begins anew when decisions carry many more blocks and there is room for them.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Min, Sum
from django.db.models.functions import Length

from controlplane.models import Pool, Replica, ReplicaState
from telemetry.lab.chains import Request
from telemetry.lab.ladder import ADDED, Sums, settled
from telemetry.lab.replay import MAX_ENTRIES, MOST_BLOCKS, Replay
from telemetry.lab.state import StateError, dump, load
from telemetry.models import DecisionCursor, LadderBin, ReplayState
from telemetry.storage import decisions
from telemetry.storage.locks import LADDER, only_one

log = logging.getLogger(__name__)
BIN = timedelta(minutes=5)
SETTLES = timedelta(minutes=2)  # after its end: requests are told when they end, not when they are placed
REBUILD = timedelta(hours=1)  # of decisions that a new replay begins with
KEPT_STATES = 6  # of a pool: half an hour to go back
LATE_RATIO = 0.01  # of a bin's decisions that came late: as many are worth going back for
MOST_REQUESTS = 150_000  # of a bin; what goes beyond is left out of it
FINER = 4  # times as many blocks are worth beginning anew for
BLOCK_BYTES = 8  # of a replay's bytes
RUN_S = 20.0  # after which a run begins no further bin


@dataclass(frozen=True, slots=True)
class Rooms:
    """The caches of a pool: tokens by name. None, with the reason, where they are not all known."""

    tokens: dict[str, int] | None
    reason: str = ""


def replay_pools(now: datetime) -> int:
    """Bring every pool's ladder up to date; how many bins were written. One worker at a time for each pool."""
    ends_s = time.monotonic() + RUN_S
    written = 0
    for pool in Pool.objects.order_by("pk"):
        with only_one(LADDER + pool.pk) as ours:
            if ours:
                written += replay_pool(pool, now, ends_s=ends_s)
    LadderBin.objects.filter(at__lt=now - timedelta(days=settings.READINGS_RETENTION_DAYS)).delete()
    return written


def replay_pool(pool: Pool, now: datetime, *, ends_s: float | None = None) -> int:
    """One pool's; how many bins were written."""
    start, state = _beginning(pool, now)
    if start is None:
        return 0
    written = 0
    replay: Replay | None = None
    while start < now and (ends_s is None or time.monotonic() < ends_s):
        requests = decisions.requests_between(pool.name, start, start + BIN, at_most=MOST_REQUESTS)
        rooms = rooms_of(pool, {request.replica for request in requests})
        replay = _begun(pool, start, state, rooms, requests) if replay is None else replay
        sums = _replayed(replay, rooms, requests)
        is_settled = start + BIN + SETTLES <= now
        _write(pool, start, sums, replay, rooms, settled_with=len(requests) if is_settled else None)
        written += 1
        start += BIN
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


def _beginning(pool: Pool, now: datetime) -> tuple[datetime | None, bytes | None]:
    """Which bin to begin with, and the caches then; None where there is nothing to replay."""
    states = list(ReplayState.objects.filter(pool=pool).defer("state"))
    if states and states[-1].at >= now - REBUILD and not _can_be_finer(pool, states[-1], now):
        start = _first_late(pool, states) or states[-1].at
        ReplayState.objects.filter(pool=pool, at__gt=start).delete()
        return start, bytes(ReplayState.objects.get(pool=pool, at=start).state)
    first = decisions.first_at(pool.name, now - REBUILD, now)
    ReplayState.objects.filter(pool=pool).delete()
    return (None if first is None else bin_start(first)), None


def _first_late(pool: Pool, states: list[ReplayState]) -> datetime | None:
    """The first settled bin to which many more decisions came since."""
    found = decisions.counts(pool.name, states[0].at, states[-1].at, BIN) if len(states) > 1 else {}
    for state in states:
        here = min(found.get(state.at, 0), MOST_REQUESTS)
        if state.decisions is not None and here > (1 + LATE_RATIO) * state.decisions:
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
    if told["blocks_per_s"] * BIN.total_seconds() * FINER * bins["ratio"] > MOST_BLOCKS:
        return False
    sized = ReplayState.objects.filter(pk=newest.pk).annotate(size=Length("state")).values_list("size", flat=True)
    return int(sized[0]) * FINER < BLOCK_BYTES * MAX_ENTRIES


def _begun(pool: Pool, at: datetime, state: bytes | None, rooms: Rooms, requests: list[Request]) -> Replay:
    """The replay with the caches of then; a cold one where there are none, which is kept to go back to."""
    if state is not None:
        try:
            return load(state, rooms.tokens)
        except StateError as error:
            log.info("a replay begins anew: %s", error)
    replay = Replay(rooms.tokens, min((request.sample_ratio for request in requests), default=1.0))
    ReplayState.objects.update_or_create(pool=pool, at=at, defaults={"state": dump(replay), "decisions": None})
    return replay


def _replayed(replay: Replay, rooms: Rooms, requests: list[Request]) -> dict[str, Sums]:
    """Sums by task group."""
    replay.resize(rooms.tokens)
    replay.learn(requests)
    found: dict[str, Sums] = {}
    for request in requests:
        sums = found.get(request.group)
        if sums is None:
            sums = found[request.group] = Sums()
        replay.add(request, sums)
    return {group: settled(sums, replay.ratio) for group, sums in found.items()}


@transaction.atomic
def _write(
    pool: Pool, at: datetime, sums: dict[str, Sums], replay: Replay, rooms: Rooms, *, settled_with: int | None
) -> None:
    """A bin's rows instead of those that it had; the caches at its end once it is settled."""
    LadderBin.objects.filter(pool=pool, at=at).delete()
    LadderBin.objects.bulk_create(
        LadderBin(
            at=at,
            pool=pool,
            group=group,
            sample_ratio=replay.ratio,
            reason=rooms.reason,
            **{name: getattr(one, name) for name in ADDED},
        )
        for group, one in sums.items()
    )
    if settled_with is None:
        return
    ReplayState.objects.filter(pool=pool, at=at).update(decisions=settled_with)
    ReplayState.objects.update_or_create(pool=pool, at=at + BIN, defaults={"state": dump(replay), "decisions": None})
    kept = ReplayState.objects.filter(pool=pool).order_by("-at").values("pk")[:KEPT_STATES]
    ReplayState.objects.filter(pool=pool).exclude(pk__in=[row["pk"] for row in kept]).delete()


def bin_start(at: datetime) -> datetime:
    """When the bin began that holds this moment."""
    return datetime.fromtimestamp(at.timestamp() // BIN.total_seconds() * BIN.total_seconds(), UTC)
