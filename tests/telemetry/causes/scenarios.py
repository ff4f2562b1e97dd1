"""Scenarios: normal traffic of a stand-in fleet, and a change that causes a hit-rate drop, each by a seed."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from controlplane.models import EventKind, Pool
from controlplane.services.events import record_event
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from routing.schema import (
    LowestCostSettings,
    PrefixHashSettings,
    RandomSettings,
    RoundRobinSettings,
    SessionAffinitySettings,
    Settings,
)
from routing.simulation.engine import Sequence
from tests.telemetry.causes.fleet import T0, Fleet, Modelled, Words

USUAL_S, DROP_S = 330.0, 120.0  # how long before and after it happens
LONG_S = 600.0  # before it, so that the hit-rate breakdown has two bins
RATE = 4.0  # requests/s
TURNS = 6
APPS = ("chat", "coding", "support")
PROMPTS = 6  # of each app


@dataclass(eq=False)
class Talk:
    """A conversation."""

    app: str
    name: str
    system: str
    messages: list[dict[str, str]] = field(default_factory=list)


class Traffic:
    """Who asks what. Its knobs are what scenarios turn."""

    def __init__(self, rng: random.Random, live: int) -> None:
        self.rng, self.words = rng, Words(rng)
        self.rate = RATE
        self.systems = {app: [self.words.text(rng.randint(2500, 5000)) for _ in range(PROMPTS)] for app in APPS}
        self.weights = dict(zip(APPS, (0.4, 0.35, 0.25), strict=True))
        self.head: Callable[[float], str] | None = None  # what changed apps put before their prompts
        self.changed: tuple[str, ...] = ()
        self.tools: dict[str, Callable[[], list[Any]]] = {}
        self.newcomers: Callable[[], tuple[str, dict[str, Any]]] | None = None
        self.newcomers_share = 0.0
        self.spread = live  # conversations that requests are taken from: neighbours,
        self.drift = 0.0  # of which so many a second are left for the next ones
        self.talks = [self._talk() for _ in range(live)]

    def request(self, now_s: float) -> tuple[str, dict[str, Any]]:
        """The next request's task group and body."""
        if self.newcomers is not None and self.rng.random() < self.newcomers_share:
            return self.newcomers()
        place = (self.rng.randrange(min(self.spread, len(self.talks))) + int(self.drift * now_s)) % len(self.talks)
        talk = self.talks[place]
        if len(talk.messages) >= 2 * TURNS:
            talk = self.talks[place] = self._talk()
        if talk.messages:
            talk.messages.append({"role": "assistant", "content": self.words.text(700)})
        talk.messages.append({"role": "user", "content": self.words.text(self.rng.randint(300, 1200))})
        system = talk.system
        if self.head is not None and talk.app in self.changed:
            system = self.head(now_s) + system
        body: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "system", "content": system}, *talk.messages],
            "user": talk.name,
        }
        if talk.app in self.tools:
            body["tools"] = self.tools[talk.app]()
        return talk.app, body

    def _talk(self) -> Talk:
        app = self.rng.choices(list(self.weights), list(self.weights.values()))[0]
        return Talk(app, f"user-{self.rng.getrandbits(40)}", self.rng.choice(self.systems[app]))


@dataclass(frozen=True)
class Decoy:
    """Something else that happens before, and does not do it."""

    words: str
    begin: Callable[[Fleet, Traffic], None]
    ahead_s: float


@dataclass(frozen=True)
class Scenario:
    """One thing that happens, and how."""

    kind: str
    variation: str
    begin: Callable[[Fleet, Traffic], Iterator[None] | None]  # what is yielded goes on with each request
    settings: Settings = field(default_factory=LowestCostSettings)
    count: int = 4
    blocks: int = 1500
    live: int = 40
    spread: int | None = None
    drift: float = 0.0
    documents: float = 0.0  # usual part of requests with a document each, at the last two replicas
    decoy: Decoy | None = None

    @property
    def words(self) -> str:
        """Its variation, and what else happens."""
        return f"{self.variation}; {self.decoy.words}" if self.decoy else self.variation


@dataclass(frozen=True)
class Played:
    """When it happened."""

    start: datetime
    end: datetime
    before_start: datetime

    def as_spans(self) -> dict[str, datetime]:
        """As what explains it asks for it."""
        return {
            "start": self.start,
            "end": self.end,
            "baseline_start": self.before_start,
            "baseline_end": self.start,
        }


def play(
    scenario: Scenario, seed: int, pool: Pool, move_to: Callable[[datetime], None], usual_s: float = USUAL_S
) -> Played:
    """Usual traffic, then the scenario; everything is in the database when it returns."""
    rng = random.Random(f"{scenario.kind} {scenario.words} {seed}")
    fleet = Fleet(
        pool,
        scenario.settings,
        move_to,
        count=scenario.count,
        blocks=scenario.blocks,
        groups=dict.fromkeys(APPS, None) | {"batch": 2 if scenario.documents else None},
    )
    traffic = Traffic(rng, scenario.live)
    if scenario.documents:
        traffic.newcomers, traffic.newcomers_share = _document(traffic), scenario.documents
    traffic.spread, traffic.drift = scenario.spread or scenario.live, scenario.drift
    if scenario.decoy is not None:
        _run(fleet, traffic, max(usual_s - scenario.decoy.ahead_s, 0.0), None)
        scenario.decoy.begin(fleet, traffic)
    _run(fleet, traffic, usual_s, None)
    going_on = scenario.begin(fleet, traffic)
    _run(fleet, traffic, usual_s + DROP_S, going_on)
    start = T0 + timedelta(seconds=usual_s)
    return Played(start, start + timedelta(seconds=DROP_S), T0 + timedelta(seconds=0.4 * usual_s))


def _run(fleet: Fleet, traffic: Traffic, until_s: float, going_on: Iterator[None] | None) -> None:
    rng = traffic.rng
    while (at_s := fleet.now_s + rng.expovariate(traffic.rate)) < until_s:
        fleet.advance(at_s)
        if going_on is not None:
            next(going_on, None)
        group, body = traffic.request(at_s)
        fleet.send(body, group, rng.randint(20, 80))
    fleet.advance(until_s)
    fleet.collect()
    fleet.set_clock()


# --- what may happen ---


def _new_head(make: Callable[[random.Random, float], str], apps: int) -> Callable[[Fleet, Traffic], None]:
    def begin(_: Fleet, traffic: Traffic) -> None:
        traffic.changed = APPS[:apps]
        traffic.head = lambda now_s: make(traffic.rng, now_s)

    return begin


def _moment(now_s: float) -> datetime:
    return T0 + timedelta(seconds=now_s)


def _shuffled_tools(_: Fleet, traffic: Traffic) -> None:
    names = [traffic.words.text(12).strip() for _ in range(8)]
    tools = [{"type": "function", "function": {"name": name, "description": traffic.words.text(200)}} for name in names]
    for app in APPS[:2]:
        traffic.tools[app] = lambda: traffic.rng.sample(tools, k=traffic.rng.randint(4, 8))


def _documents(_: Fleet, traffic: Traffic) -> None:
    """Documents to summarise, each once, beside what is usual."""
    traffic.newcomers_share, traffic.rate = 0.5, 1.6 * RATE
    traffic.newcomers = _document(traffic)


def _document(traffic: Traffic) -> Callable[[], tuple[str, dict[str, Any]]]:
    def one() -> tuple[str, dict[str, Any]]:
        text = traffic.words.text(traffic.rng.randint(6000, 9000))
        return "batch", {"model": "m", "messages": [{"role": "user", "content": text}]}

    return one


def _long_questions(_: Fleet, traffic: Traffic) -> None:
    """One question each with a long text of its own, of the same app and prompt."""
    traffic.newcomers_share = 0.6

    def one() -> tuple[str, dict[str, Any]]:
        app = traffic.rng.choice(APPS)
        messages = [{"role": "system", "content": traffic.rng.choice(traffic.systems[app])}]
        messages.append({"role": "user", "content": traffic.words.text(traffic.rng.randint(6000, 9000))})
        return app, {"model": "m", "messages": messages, "user": str(traffic.rng.random())}

    traffic.newcomers = one


def _old_talks(_: Fleet, traffic: Traffic) -> None:
    """People come back to all conversations of before, not to the latest alone."""
    traffic.spread = len(traffic.talks)


def _restart(count: int) -> Callable[[Fleet, Traffic], None]:
    def begin(fleet: Fleet, _: Traffic) -> None:
        busiest = sorted(fleet.replicas, key=lambda it: it.engine.statistics.hits)
        for replica in busiest[-count:]:
            fleet.restart(replica)

    return begin


def _switch_off(count: int) -> Callable[[Fleet, Traffic], None]:
    """Replicas come back with prefix caching switched off."""

    def begin(fleet: Fleet, _: Traffic) -> None:
        for replica in sorted(fleet.replicas, key=lambda it: it.engine.statistics.hits)[-count:]:
            replica.caches_prefixes = False
            fleet.restart(replica)

    return begin


def _kill(fleet: Fleet, _: Traffic) -> None:
    fleet.kill(max(fleet.replicas, key=lambda it: it.engine.statistics.hits))


def _add(count: int) -> Callable[[Fleet, Traffic], None]:
    def begin(fleet: Fleet, _: Traffic) -> None:
        for _ in range(count):
            fleet.add(fleet.replicas[0].blocks)

    return begin


def publish(fleet: Fleet, settings: Settings, document: dict[str, Any]) -> None:
    """Another revision of the pool's policy, at the router at once."""
    policy = fleet.pool.policies.get(group=None)
    draft = save_draft(policy, document)
    publish_revision(draft.pk)
    fleet.revision, fleet.settings = draft.number, settings
    fleet.configure()


def _publish(settings: Settings, document: dict[str, Any]) -> Callable[[Fleet, Traffic], None]:
    def begin(fleet: Fleet, _: Traffic) -> None:
        publish(fleet, settings, document)

    return begin


def _surge(factor: float) -> Callable[[Fleet, Traffic], None]:
    def begin(_: Fleet, traffic: Traffic) -> None:
        traffic.rate = factor * RATE

    return begin


def _bypass(fleet: Fleet, traffic: Traffic) -> Iterator[None]:
    """Somebody uses the engines directly: what routers believe is there is evicted."""
    while True:
        replica = traffic.rng.choice(fleet.replicas)
        keys = [traffic.rng.getrandbits(60) for _ in range(60)]
        fleet.submit(replica, Sequence(keys, 60 * 64 + 5, 10, fleet.now_s))
        yield


def _resets(fleet: Fleet, traffic: Traffic) -> Iterator[None]:
    """Somebody clears the engines' caches again and again, as new weights are loaded."""
    due_s: dict[Modelled, float] = {}
    while True:
        for replica in fleet.replicas:
            if fleet.now_s >= due_s.get(replica, 0.0) and replica.engine.pool.reset():
                due_s[replica] = fleet.now_s + 20 + 10 * traffic.rng.random()
        yield


def _silence(*, usage: bool) -> Callable[[Fleet, Traffic], None]:
    """The replicas that hit most were updated, and no longer tell what their caches do."""

    def begin(fleet: Fleet, _: Traffic) -> None:
        def rate(replica: Modelled) -> float:
            return replica.engine.statistics.hits / max(replica.engine.statistics.queries, 1)

        for replica in sorted(fleet.replicas, key=rate)[len(fleet.replicas) // 2 :]:
            replica.hides = ("vllm:prefix_cache_hits", "vllm:prefix_cache_queries")
            replica.tells_usage = usage

    return begin


# --- what happens as well, and does not do it ---


def _same_again(fleet: Fleet, _: Traffic) -> None:
    """Another revision that decides as the one before."""
    publish(fleet, fleet.settings, {"strategy": fleet.settings.name})


def _restart_idle(fleet: Fleet, _: Traffic) -> None:
    """The replica that hit least restarts."""
    fleet.restart(min(fleet.replicas, key=lambda it: it.engine.statistics.hits))


def _restart_elsewhere(fleet: Fleet, _: Traffic) -> None:
    """A replica of another pool restarts."""
    replica = add_replica(create_pool("batch", models=["other"]), name="other-1", url="http://10.9.0.1:8000")
    summary = "Replica other-1 restarted: its counters began anew."
    record_event(EventKind.REPLICA_RESTARTED, summary, replica=replica)


def _edited(_: Fleet, traffic: Traffic) -> None:
    """Some prompts get another opening, once and for good."""
    line = f"Edition {traffic.rng.getrandbits(32)}.\n"
    traffic.changed, traffic.head = APPS[2:], lambda _: line


def _busier(_: Fleet, traffic: Traffic) -> None:
    traffic.rate = 1.4 * RATE


SAME_AGAIN = "a revision that changed nothing, two minutes before"
LONG_AGO = "a restart, eight minutes before"
SCENARIOS = (
    Scenario("prompt_changed", "a date and time", _new_head(lambda _, s: f"Now: {_moment(s):%Y-%m-%d %H:%M:%S}\n", 3)),
    Scenario("prompt_changed", "a UUID", _new_head(lambda r, _: f"Request {uuid.UUID(int=r.getrandbits(128))}.\n", 2)),
    Scenario("prompt_changed", "epoch seconds", _new_head(lambda _, s: f"ts={_moment(s).timestamp():.3f}\n", 3),
          PrefixHashSettings()),
    Scenario("prompt_changed", "a counter",
          _new_head(lambda r, _: f"This is request {r.randrange(10**6)} today.\n", 2)),
    Scenario("prompt_changed", "another tool list each time", _shuffled_tools),
    Scenario("workload_changed", "documents, each once", _documents),
    Scenario("workload_changed", "long questions, each once", _long_questions),
    Scenario("workload_changed", "documents, hashed", _documents, PrefixHashSettings()),
    Scenario("capacity", "old conversations", _old_talks, blocks=500, live=170, spread=25, drift=0.5),
    Scenario("capacity", "old conversations, hashed", _old_talks, PrefixHashSettings(), blocks=500, live=170, spread=25,
          drift=0.5),
    Scenario("replica_restarted", "one", _restart(1), live=60),
    Scenario("replica_restarted", "two", _restart(2), PrefixHashSettings(), live=60),
    Scenario("caching_off", "one", _switch_off(1), live=60),
    Scenario("caching_off", "two", _switch_off(2), PrefixHashSettings(), live=60),
    Scenario("replica_added", "one", _add(1), PrefixHashSettings(), live=60, count=3),
    Scenario("replica_added", "two", _add(2), SessionAffinitySettings(), live=60, count=2),
    Scenario("replica_lost", "one of four", _kill, PrefixHashSettings(), live=60),
    Scenario("replica_lost", "one of three", _kill, live=60, count=3),
    Scenario("revision", "round robin", _publish(RoundRobinSettings(), {"strategy": "round_robin"})),
    Scenario("revision", "random", _publish(RandomSettings(), {"strategy": "random"}), PrefixHashSettings()),
    Scenario("overflow", "a surge", _surge(6.0), PrefixHashSettings(slack_s=0.0)),
    Scenario("overflow", "a surge, by cost", _surge(6.0), LowestCostSettings(alpha=0.1), live=60),
    Scenario("index_stale", "caches are cleared", _resets),
    Scenario("index_stale", "engines used directly", _bypass, blocks=700),
    Scenario("engine_silent", "by metrics", _silence(usage=True), PrefixHashSettings(), documents=0.35),
    Scenario("engine_silent", "by metrics and answers", _silence(usage=False), documents=0.35),
    Scenario("prompt_changed", "a date and time", _new_head(lambda _, s: f"Now: {_moment(s):%Y-%m-%d %H:%M:%S}\n", 3),
          decoy=Decoy(SAME_AGAIN, _same_again, 120)),
    Scenario("prompt_changed", "a UUID", _new_head(lambda r, _: f"Request {uuid.UUID(int=r.getrandbits(128))}.\n", 2),
          decoy=Decoy("more requests, a minute before", _busier, 60)),
    Scenario("workload_changed", "documents, each once", _documents, decoy=Decoy(SAME_AGAIN, _same_again, 120)),
    Scenario("workload_changed", "documents, hashed", _documents, PrefixHashSettings(),
          decoy=Decoy(LONG_AGO, _restart_idle, 480)),
    Scenario("capacity", "old conversations", _old_talks, blocks=500, live=170, spread=25, drift=0.5,
          decoy=Decoy(SAME_AGAIN, _same_again, 120)),
    Scenario("replica_restarted", "one", _restart(1), live=60, decoy=Decoy(SAME_AGAIN, _same_again, 45)),
    Scenario("replica_lost", "one of four", _kill, PrefixHashSettings(), live=60,
          decoy=Decoy("prompts edited four minutes before", _edited, 240)),
    Scenario("revision", "random", _publish(RandomSettings(), {"strategy": "random"}), PrefixHashSettings(),
          decoy=Decoy("a restart in another pool, a minute before", _restart_elsewhere, 60)),
    Scenario("revision", "round robin", _publish(RoundRobinSettings(), {"strategy": "round_robin"}),
          decoy=Decoy("prompts edited four minutes before", _edited, 240)),
    Scenario("overflow", "a surge", _surge(6.0), PrefixHashSettings(slack_s=0.0),
          decoy=Decoy(SAME_AGAIN, _same_again, 120)),
    Scenario("index_stale", "caches are cleared", _resets, decoy=Decoy(SAME_AGAIN, _same_again, 45)),
)  # fmt: skip
