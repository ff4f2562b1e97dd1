"""Incidents of 13 kinds on three shapes of traffic, each with a seeded start and a known cause."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from routing.balancing.placement import Placement
from routing.schema import LowestCostSettings, PrefixHashSettings, RandomSettings, SessionAffinitySettings, Settings
from tests.benchmarks.alerts.fleet import MemoryFleet
from tests.telemetry.causes.scenarios import APPS, Traffic, _document

RATE = 5.0  # requests/s
USUAL_S, DROP_S = 600.0, 180.0  # before and after an incident begins
Begin = Callable[[MemoryFleet, Traffic], Iterator[None] | None]


@dataclass(frozen=True)
class Incident:
    """A change, its accepted causes (the exact one first), and the fleet in which it happens."""

    kind: str
    causes: tuple[str, ...]
    begin: Begin
    settings: Settings = field(default_factory=LowestCostSettings)
    count: int = 4  # replicas
    blocks: int = 1500  # of each replica
    live: int = 40  # conversations in progress
    spread: int | None = None
    drift: float = 0.0
    is_drop: bool = True  # False: a change of mix, which must not be reported as a drop


@dataclass(frozen=True)
class Shape:
    """Traffic: conversations, with documents in between, or in waves."""

    name: str
    documents: float = 0.0
    wave: float = 0.0  # of the rate
    live: float = 1.0


SHAPES = (Shape("conversations"), Shape("documents", documents=0.2), Shape("waves", wave=0.4, live=1.5))


def play(incident: Incident, shape: Shape, seed: int) -> MemoryFleet:
    rng = random.Random(f"{incident.kind} {shape.name} {seed}")
    groups = dict.fromkeys(APPS, None) | {"batch": None}
    fleet = MemoryFleet(incident.settings, count=incident.count, blocks=incident.blocks, groups=groups)
    traffic = Traffic(rng, round(incident.live * shape.live))
    traffic.rate = RATE
    if shape.documents:
        traffic.newcomers, traffic.newcomers_share = _document(traffic), shape.documents
    traffic.spread, traffic.drift = incident.spread or len(traffic.talks), incident.drift
    _run(fleet, traffic, shape, USUAL_S, None)
    _run(fleet, traffic, shape, USUAL_S + DROP_S, incident.begin(fleet, traffic))
    return fleet


def _run(fleet: MemoryFleet, traffic: Traffic, shape: Shape, until_s: float, ongoing: Iterator[None] | None) -> None:
    rng = traffic.rng
    while True:
        wave = 1 + shape.wave * (1 if int(fleet.now_s / 90) % 2 else -1)
        at_s = fleet.now_s + rng.expovariate(traffic.rate * wave)
        if at_s >= until_s:
            break
        fleet.advance(at_s)
        if ongoing is not None:
            next(ongoing, None)
        group, body = traffic.request(at_s)
        fleet.send(body, group, rng.randint(20, 80))
    fleet.advance(until_s)


# --- incidents ---


def _publish(settings: Settings) -> Begin:
    def begin(fleet: MemoryFleet, _: Traffic) -> None:
        fleet.revision += 1
        fleet.settings = settings
        fleet.happens("policy_published", revision=fleet.revision)
        fleet.configure()

    return begin


def _busiest(fleet: MemoryFleet) -> Any:
    return max(fleet.replicas, key=lambda replica: replica.engine.statistics.hits)


def _lose(fleet: MemoryFleet, _: Traffic) -> None:
    """Two of three replicas fail at once, like a rack."""
    busiest = sorted(fleet.replicas, key=lambda replica: replica.engine.statistics.hits)[len(fleet.replicas) // 2 :]
    for replica in busiest:
        fleet.kill(replica)
        fleet.happens("replica_down", replica.row.name)


def _hang(fleet: MemoryFleet, _: Traffic) -> None:
    """A replica stops responding, its circuit breaker opens, and its metrics are unavailable."""
    replica = _busiest(fleet)
    fleet.kill(replica)
    fleet.happens("replica_ejected", replica.row.name)


def _restart(fleet: MemoryFleet, _: Traffic) -> None:
    busiest = sorted(fleet.replicas, key=lambda replica: replica.engine.statistics.hits)[-3:]
    for replica in busiest:
        fleet.restart(replica)
        fleet.happens("replica_restarted", replica.row.name)


def _add(fleet: MemoryFleet, _: Traffic) -> None:
    for _number in range(3):
        fleet.add(fleet.replicas[0].blocks)
        fleet.happens("replica_added", fleet.replicas[-1].row.name)


def _timestamp(_: MemoryFleet, traffic: Traffic) -> None:
    traffic.changed = APPS
    traffic.head = lambda now_s: f"Now: {int(now_s) // 3600:02}:{int(now_s) // 60 % 60:02}:{now_s % 60:06.3f}\n"


def _tools(_: MemoryFleet, traffic: Traffic) -> None:
    names = [traffic.words.text(12).strip() for _ in range(8)]
    tools = [{"type": "function", "function": {"name": name, "description": traffic.words.text(200)}} for name in names]
    for app in APPS:
        traffic.tools[app] = lambda: traffic.rng.sample(tools, k=len(tools))


def _template(_: MemoryFleet, traffic: Traffic) -> None:
    """A chat template that puts a request number before the prompt."""
    traffic.changed = APPS
    traffic.head = lambda _: f"<|{traffic.rng.getrandbits(64):016x}|>"


def _old_talks(_: MemoryFleet, traffic: Traffic) -> None:
    traffic.spread = len(traffic.talks)


def _hot_prefix(_: MemoryFleet, traffic: Traffic) -> None:
    """One system prompt gets most of the traffic, much more than before."""
    traffic.rate = 6 * RATE


def _mix(_: MemoryFleet, traffic: Traffic) -> None:
    """Unique documents of a separate task group become half of the requests."""
    traffic.newcomers, traffic.newcomers_share = _document(traffic), 0.55


def _reset(fleet: MemoryFleet, traffic: Traffic) -> Iterator[None]:
    """Caches are cleared repeatedly, as when new weights are loaded."""
    due_s: dict[str, float] = {}
    while True:
        for replica in fleet.replicas:
            if fleet.now_s >= due_s.get(replica.row.name, 0.0) and replica.engine.pool.reset():
                due_s[replica.row.name] = fleet.now_s + 20 + 10 * traffic.rng.random()
        yield


def _old_router(fleet: MemoryFleet, traffic: Traffic) -> Iterator[None]:
    """A second router joins with an outdated configuration, random placement, and gets most requests."""
    current = fleet.placement
    fleet.revision, usual = 0, fleet.settings
    fleet.settings = RandomSettings()
    fleet.configure()
    outdated = fleet.placement
    fleet.revision, fleet.settings = 1, usual
    assert isinstance(outdated, Placement)
    while True:
        fleet.placement = outdated if traffic.rng.random() < 0.6 else current
        yield


MANY_CONVERSATIONS: dict[str, Any] = {
    "live": 220,
    "blocks": 8000,
}  # conversations that come back rarely: caches fill slowly
INCIDENTS = (
    Incident("bad policy", ("revision",), _publish(RandomSettings())),
    Incident("replica lost", ("replica_lost",), _lose, PrefixHashSettings(), count=3, **MANY_CONVERSATIONS),
    Incident("replica added", ("replica_added",), _add, SessionAffinitySettings(), count=2, **MANY_CONVERSATIONS),
    Incident("replica restarted", ("replica_restarted",), _restart, **MANY_CONVERSATIONS),
    Incident("replica hung", ("replica_lost",), _hang, count=2, **MANY_CONVERSATIONS),
    Incident("timestamp in front", ("prompt_changed",), _timestamp),
    Incident("tools reordered", ("prompt_changed",), _tools),
    Incident("template changed", ("prompt_changed",), _template),
    Incident("working set", ("capacity",), _old_talks, blocks=500, live=170, spread=25, drift=0.5),
    Incident("hot prefix", ("overflow",), _hot_prefix, PrefixHashSettings(slack_s=0.0)),
    Incident("mix change", ("workload_changed",), _mix, is_drop=False),
    Incident("cache reset", ("index_stale",), _reset),
    Incident("old configuration", ("revision",), _old_router),
)
