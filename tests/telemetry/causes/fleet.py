"""A fleet in virtual time: the router's own placement, records and figures, modelled engines, and the real scraper.

Requests are JSON bodies that go through the router's parsing, hashing and strategy objects; engines are those of the
simulation, with their own expositions. What both say is read, folded and stored by what scrapes and collects in
production. Only sockets and waiting are left out.
"""

from __future__ import annotations

import heapq
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from controlplane.models import Pool, Replica, Router
from controlplane.services.fleet.replicas import add_replica, record_engine_facts
from controlplane.services.routers import announce
from routing.balancing.load_tracker import LoadTracker, Ticket
from routing.balancing.placement import Placement
from routing.balancing.replicas import HealthRegistry
from routing.balancing.request import PlacementRequest
from routing.balancing.residency import Residency
from routing.observability.decision_log import DecisionRing, Record, StructureSampler, structure_json
from routing.observability.metrics import PREFIX, Metrics, Outcome
from routing.prompt.canonical import canonical_prompt
from routing.prompt.parsing import parse_body, session_key
from routing.schema import PolicyConfig, PoolConfig, ReplicaConfig, RouterConfig, Settings, TaskGroupConfig
from routing.simulation.engine import Engine, EngineConfig, Sequence, Step
from routing.standin.metrics import page
from routing.types import ReplicaId
from telemetry.metrics.engine import read_replica
from telemetry.metrics.router import read_router
from telemetry.models import DecisionCursor
from telemetry.scraping.decision_records import Progress, read_page, record_page
from telemetry.scraping.merge import ScrapeFailure, ScrapeResult
from telemetry.scraping.record import ReplicaScrape, RouterScrape, record_scrapes
from tests.routing.proxy.harness import decision_page

T0 = datetime(2031, 3, 4, 12, tzinfo=UTC)
PATH = "/v1/chat/completions"
BLOCK = 64  # tokens, of engines and of the router's hashes
SCRAPE_S = 30.0


@dataclass
class Asked:
    """A request as the sampler of openings sees it."""

    arrived_at: float
    body: bytes

    @property
    def head(self) -> Any:
        return self

    path = PATH.encode()


@dataclass(eq=False)
class Modelled:
    """A replica: an engine, and what it tells."""

    row: Replica
    blocks: int
    engine: Engine = field(init=False)
    started_s: float = field(init=False)
    is_down: bool = False
    caches_prefixes: bool = True
    hides: tuple[str, ...] = ()  # beginnings of metrics that it does not tell
    tells_usage: bool = True

    def __post_init__(self) -> None:
        self.start()

    @property
    def config(self) -> ReplicaConfig:
        return ReplicaConfig(name=self.row.name, url=self.row.url, block_tokens=BLOCK, capacity_blocks=self.blocks)

    def start(self) -> None:
        """Begin anew, with nothing cached."""
        config = EngineConfig(blocks=self.blocks, block_tokens=BLOCK, caches_prefixes=self.caches_prefixes)
        self.engine = Engine(config)
        self.started_s = time.time()

    def text(self) -> str:
        lines = page(self.engine, "m", self.started_s).decode().split("\n")
        return "\n".join(it for it in lines if not it.startswith(self.hides)) if self.hides else "\n".join(lines)


class Fleet:
    """Replicas, a router and a clock."""

    def __init__(
        self, pool: Pool, settings: Settings, move_to: Callable[[datetime], None], *, count: int, blocks: int,
        groups: dict[str, int | None],
    ) -> None:  # fmt: skip
        self.pool = pool
        self.now_s = 0.0
        self._move_to = move_to
        move_to(T0)
        self.replicas = [self._replica(f"r{number + 1}", blocks) for number in range(count)]
        self.router: Router = announce(name="router-1", boot="b1", version="1", admin_url="http://10.1.0.1:8081")
        self.groups = groups
        self.policy = pool.policies.get(group=None).name
        self.revision, self.settings = 1, settings
        self.health, self.loads, self.residency = HealthRegistry(), LoadTracker(lambda: self.now_s), Residency()
        self.figures, self.ring, self.sampler = Metrics(), DecisionRing(), StructureSampler()
        self._steps: list[tuple[float, int, Modelled, Engine, Step]] = []
        self._busy: set[Engine] = set()
        self._running: dict[Sequence, tuple[Record, Ticket, Modelled]] = {}
        self._numbers = 0
        self._scraped_s = 0.0
        self.configure()

    def _replica(self, name: str, blocks: int) -> Modelled:
        row = add_replica(self.pool, name=name, url=f"http://10.0.0.{name[1:]}:8000")
        record_engine_facts(row, block_tokens=BLOCK, capacity_blocks=blocks)
        row.refresh_from_db()  # so that scrapes report nothing new
        return Modelled(row, blocks)

    # --- what operators do ---

    def configure(self) -> None:
        """Give the router a configuration of what there is."""
        policy = PolicyConfig(name=self.policy, revision=self.revision, settings=self.settings)
        names = [replica.row.name for replica in self.replicas]
        groups = tuple(
            TaskGroupConfig(name=name, replicas=None if last is None else tuple(names[-last:]))
            for name, last in self.groups.items()
        )
        members = tuple(replica.config for replica in self.replicas)
        pool = PoolConfig(name=self.pool.name, policy=policy, replicas=members, groups=groups)
        before = getattr(self, "placement", None)
        config = RouterConfig(hash_secret="5ec2e7" * 8, pools=(pool,))
        self.placement = Placement(config, self.loads, residency=self.residency, router="router-1")
        if before is not None:
            self.placement.carry_over(before)

    def add(self, blocks: int) -> None:
        self.replicas.append(self._replica(f"r{len(self.replicas) + 1}", blocks))
        self.configure()

    def kill(self, replica: Modelled) -> None:
        """Nobody listens there any more."""
        replica.is_down = True
        self.health.mark(ReplicaId(replica.row.name), up=False)
        self._drop(replica)

    def restart(self, replica: Modelled) -> None:
        self._drop(replica)
        replica.start()

    def _drop(self, replica: Modelled) -> None:
        """What runs there ends without an answer."""
        for sequence, (record, ticket, at) in list(self._running.items()):
            if at is replica:
                del self._running[sequence]
                ticket.end()
                record.status = 502
                self._told(record, Outcome.REPLICA_ERROR)

    # --- requests ---

    def send(self, body: dict[str, Any], group: str, output_tokens: int) -> None:
        """A request arrives now."""
        raw = json.dumps(body).encode()
        parsed = parse_body(PATH, raw)
        prompt = canonical_prompt(parsed)
        decision = self.placement.decide(PlacementRequest("m", group, session_key(parsed), prompt), self.health)
        self._numbers += 1
        record = Record.from_decision(decision, f"q{self._numbers}")
        record.at = T0.timestamp() + self.now_s
        if self.sampler.should_sample(decision, self.now_s):
            record.structure = structure_json(decision, Asked(self.now_s, raw))  # type: ignore[arg-type]
        ticket = self.placement.dispatch(decision)
        replica = next(it for it in self.replicas if it.row.name == decision.replica.name)
        sequence = Sequence(decision.keys.chain, decision.keys.prompt_tokens, output_tokens, self.now_s)
        self._running[sequence] = record, ticket, replica
        self.submit(replica, sequence)

    def submit(self, replica: Modelled, sequence: Sequence) -> None:
        """Give an engine work, a router's or somebody else's."""
        replica.engine.submit(sequence)
        self._begin(replica, replica.engine, self.now_s)

    def set_clock(self) -> None:
        """Let everybody's clock show what the fleet's does."""
        self._move_to(T0 + timedelta(seconds=self.now_s))

    def advance(self, to_s: float) -> None:
        """Let the time until then go by; scrapes come when they are due."""
        while self._scraped_s + SCRAPE_S <= to_s:
            due_s = self._scraped_s + SCRAPE_S
            self._take_steps(due_s)
            self.now_s = self._scraped_s = due_s
            self._scrape()
        self._take_steps(to_s)
        self.now_s = to_s

    def _take_steps(self, until_s: float) -> None:
        while self._steps and self._steps[0][0] <= until_s:
            end_s, _, replica, engine, step = heapq.heappop(self._steps)
            self.now_s = end_s
            outcome = engine.finish(step)
            self._busy.discard(engine)
            if engine is not replica.engine:
                continue  # it restarted meanwhile
            for sequence in outcome.first:
                self._first_token(sequence)
            for sequence in outcome.finished:
                self._finished(sequence)
            self._begin(replica, engine, end_s)

    def _begin(self, replica: Modelled, engine: Engine, now_s: float) -> None:
        if engine in self._busy or replica.is_down:
            return
        step = engine.plan_step(now_s, now_s + 0.25)
        if step is not None:
            self._busy.add(engine)
            self._numbers += 1
            heapq.heappush(self._steps, (step.end_s, self._numbers, replica, engine, step))

    def _first_token(self, sequence: Sequence) -> None:
        if sequence in self._running:
            record, ticket, _ = self._running[sequence]
            record.status, record.is_streamed = 200, True
            record.ttft_s = self.now_s - sequence.arrived_s
            ticket.record_first_byte()

    def _finished(self, sequence: Sequence) -> None:
        if sequence not in self._running:
            return
        record, ticket, replica = self._running.pop(sequence)
        if replica.tells_usage:
            record.prompt_tokens, record.cached_tokens = sequence.prompt_tokens, sequence.cached_tokens
            ticket.record_response(record.ttft_s, record.prompt_tokens, record.cached_tokens)
        ticket.end()
        self._told(record, Outcome.OK)

    def _told(self, record: Record, outcome: Outcome) -> None:
        self.figures.count_placed(record, outcome)
        self.ring.add(record)

    # --- what telemetry does ---

    def _scrape(self) -> None:
        due = T0 + timedelta(seconds=self.now_s)
        self._move_to(due)
        replicas = [ReplicaScrape(it.row, self._of(it, due)) for it in self.replicas]
        record_scrapes(
            replicas, [RouterScrape(self.router, ScrapeResult(due.timestamp(), self._router_sample()))], due=due
        )

    def _of(self, replica: Modelled, due: datetime) -> Any:
        if replica.is_down:
            return ScrapeFailure("connection refused", refused=True)
        return ScrapeResult(due.timestamp(), read_replica(replica.text()))

    def _router_sample(self) -> Any:
        info = f'{PREFIX}info{{boot="b1",version="1"}} 1'
        return read_router("\n".join([info, *self.figures.lines(), ""]))

    def collect(self) -> None:
        """Store what was decided so far."""
        due = T0 + timedelta(seconds=self.now_s)
        cursor, _ = DecisionCursor.objects.get_or_create(router=self.router)
        more = True
        progress = Progress(self.router, cursor, rows_left=10**6, candidates_left=0)
        while more:
            page = {"boot": "b1", **decision_page(self.ring, cursor.seq, 1000, 0.25)}
            more = record_page(progress, read_page(msgspec.json.encode(page)), ratio=0.25, now=due)


class Words:
    """Text, as much as one wants."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        letters = "abcdefghijklmnoprstuvwy"
        vocabulary = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(800)]
        self._sentences = [f"{' '.join(rng.choices(vocabulary, k=11)).capitalize()}. " for _ in range(600)]

    def text(self, size: int) -> str:
        """About so many bytes, in lines."""
        found: list[str] = []
        length = 0
        while length < size:
            sentence = self.rng.choice(self._sentences)
            found.append(sentence if self.rng.random() < 0.7 else f"{sentence}\n")
            length += len(sentence)
        return "".join(found)
