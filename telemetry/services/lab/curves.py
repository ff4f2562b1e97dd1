"""Hit rate against room, from a pool's latest decisions."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import numpy as np

from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask, Pool
from telemetry.lab.bins import MINUTE
from telemetry.lab.capacity import CapacityCurve as Reckoned
from telemetry.lab.chains import Prompts, Requests
from telemetry.lab.replay import Replay
from telemetry.models import CapacityCurve
from telemetry.services.lab.replays import rooms_of
from telemetry.storage.decisions import latest_requests

EVERY = timedelta(minutes=10)
SPAN = timedelta(hours=1)  # of decisions
MOST_REQUESTS = 40_000
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
    requests = latest_requests(pool.name, now - SPAN, now, at_most=MOST_REQUESTS)
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
