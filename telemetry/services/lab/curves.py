"""Hit rate against room, from a pool's latest decisions."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from controlplane.models import Pool
from telemetry.lab.capacity import CapacityCurve as Reckoned
from telemetry.lab.chains import Request, thinned
from telemetry.lab.replay import Prompt, Replay
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
    for pool in Pool.objects.exclude(pk__in=fresh):
        update_curve(pool, now)


def update_curve(pool: Pool, now: datetime) -> CapacityCurve:
    """One pool's curve, without points, and with the reason, where there can be none."""
    requests = latest_requests(pool.name, now - SPAN, now, at_most=MOST_REQUESTS)
    rooms = rooms_of(pool, {request.replica for request in requests})
    reason = rooms.reason or ("" if len(requests) >= FEW else f"There were fewer than {FEW} requests in an hour.")
    told = {"at": now, "reason": reason, "points": [], "requests": 0, "since": None, "room_tokens": None}
    if not reason and rooms.tokens:
        told |= _reckoned(requests, rooms.tokens)
    return CapacityCurve.objects.update_or_create(pool=pool, defaults=told)[0]


def _reckoned(requests: list[Request], rooms: dict[str, int]) -> dict[str, object]:
    ratio = min(request.sample_ratio for request in requests)
    while sum(request.block_count for request in requests) * ratio > MOST_BLOCKS:
        ratio /= 2
    replay = Replay(None, ratio)
    replay.learn(requests)
    curve, warm = Reckoned(), int(WARM_PART * len(requests))
    for number, request in enumerate(requests):
        chain, positions = thinned(request, ratio)
        prompt = Prompt.of(request, positions, replay.tokens_of(request), ratio)
        held = [prompt.held(matched) for matched in range(len(chain) + 1)]
        gains = [more - less for less, more in pairwise(held)]
        curve.use(request.replica, chain, gains, prompt.tokens if number >= warm else None, held[0])
    points = curve.points({name: replay.room(tokens) for name, tokens in rooms.items()})
    return {
        "points": [asdict(point) for point in points],
        "requests": curve.requests,
        "since": datetime.fromtimestamp(requests[warm].at_s, UTC),
        "sample_ratio": ratio,
        "room_tokens": sum(rooms.values()) // len(rooms),
        "replicas": len(rooms),
    }
