"""An in-memory stand-in fleet with the data that telemetry would have read from it.

Requests go through the router's parsing, hashing, strategy and residency objects and through modelled engines in
virtual time. Bins, routes and prefixes are sums over the router's records of completed requests, as scraped readings
and collected decisions would hold them; engine counters are those of the engines.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.replicas import HealthRegistry
from routing.balancing.residency import Residency
from routing.observability.decision_log import Record, StructureSampler
from routing.observability.metrics import Outcome
from routing.schema import Settings
from telemetry.alerts.detection import Bin, GroupBin
from telemetry.causes.evidence import Bin as OnsetBin
from telemetry.causes.evidence import DescribedPrompt, EngineSums, Period, Prefix, RelatedEvent, Route, Sums
from telemetry.lint.structure import PromptStructure
from tests.telemetry.causes.fleet import T0, Fleet, Modelled

BIN_S = 10.0
SCRAPE_S = 5.0


@dataclass(slots=True)
class CompletedRequest:
    at_s: float
    record: Record


@dataclass(slots=True)
class EngineScrape:
    at_s: float
    replica: str
    queries: float
    hits: float


class MemoryFleet(Fleet):
    """A fleet that keeps the data telemetry would have read."""

    def __init__(self, settings: Settings, *, count: int, blocks: int, groups: dict[str, int | None]) -> None:
        self.pool = SimpleNamespace(name="chat")  # type: ignore[assignment]
        self.now_s, self._scraped_s, self._numbers = 0.0, 0.0, 0
        self._move_to = lambda _: None
        self.replicas = [self._replica(f"r{number + 1}", blocks) for number in range(count)]
        self.groups, self.policy, self.revision, self.settings = groups, "chat", 1, settings
        self.health, self.loads, self.residency = HealthRegistry(), LoadTracker(lambda: self.now_s), Residency()
        self.sampler = StructureSampler()
        self._steps, self._busy, self._running = [], set(), {}
        self.completed: list[CompletedRequest] = []
        self.engine_scrapes: list[EngineScrape] = []
        self.events: list[RelatedEvent] = []
        self.configure()

    def _replica(self, name: str, blocks: int) -> Modelled:
        row: Any = SimpleNamespace(name=name, url=f"http://10.0.0.{name[1:]}:8000")
        return Modelled(row, blocks)

    def _told(self, record: Record, outcome: Outcome) -> None:
        if outcome is Outcome.OK:
            self.completed.append(CompletedRequest(self.now_s, record))

    def advance(self, to_s: float) -> None:
        while self._scraped_s + SCRAPE_S <= to_s:
            due_s = self._scraped_s + SCRAPE_S
            self._take_steps(due_s)
            self.now_s = self._scraped_s = due_s
            self._count()
        self._take_steps(to_s)
        self.now_s = to_s

    def _count(self) -> None:
        for replica in self.replicas:
            if not replica.is_down:
                statistics = replica.engine.statistics
                self.engine_scrapes.append(
                    EngineScrape(self.now_s, replica.row.name, statistics.queries, statistics.hits)
                )

    def happens(self, kind: str, replica: str = "", revision: int | None = None) -> None:
        at = T0 + timedelta(seconds=self.now_s)
        self.events.append(
            RelatedEvent(at, kind, f"{kind} {replica}.", replica, revision, self.policy if revision else "")
        )

    # --- data as telemetry derives it ---

    def bins(self) -> list[Bin]:
        last = int(self.now_s // BIN_S)
        by_bin: list[dict[str, list[float]]] = [defaultdict(lambda: [0.0, 0.0, 0.0]) for _ in range(last)]
        for request in self.completed:
            index, record = int(request.at_s // BIN_S), request.record
            if index < last and record.prompt_tokens is not None and record.cached_tokens is not None:
                sums = by_bin[index][record.group]
                sums[0] += record.prompt_tokens
                sums[1] += record.cached_tokens
                sums[2] += 1
        return [
            Bin(T0 + timedelta(seconds=BIN_S * (index + 1)), {name: GroupBin(*sums) for name, sums in groups.items()})
            for index, groups in enumerate(by_bin)
        ]

    def series(self, start_s: float, end_s: float, step_s: float) -> list[OnsetBin]:
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for request in self._between(start_s, end_s):
            step_sums = sums[int((request.at_s - start_s) // step_s)]
            step_sums[0] += request.record.prompt_tokens or 0
            step_sums[1] += request.record.cached_tokens or 0
        return [OnsetBin(T0 + timedelta(seconds=start_s + step_s * n), *sums[n]) for n in sorted(sums)]

    def period(self, start_s: float, end_s: float, breakdown: Any = None) -> Period:
        routes: dict[tuple[str, str, str, int], Sums] = defaultdict(Sums)
        prefixes: dict[tuple[str, int | None, str], Sums] = defaultdict(Sums)
        early: set[tuple[str, int | None, str]] = set()
        prompts: list[DescribedPrompt] = []
        for request in self._between(start_s, end_s):
            record, sums = request.record, _sums(request.record)
            routes[record.group, record.replica, record.policy, record.revision] += sums
            key = (record.group, record.prefix, record.replica)
            prefixes[key] += sums
            if request.at_s < (start_s + end_s) / 2:
                early.add(key)
            structure = PromptStructure.read(json.loads(record.structure)) if record.structure else None
            if structure is not None:
                prompts.append(DescribedPrompt(record.group, T0 + timedelta(seconds=request.at_s), structure))
        return Period(
            T0 + timedelta(seconds=start_s),
            T0 + timedelta(seconds=end_s),
            routes=[Route(*key, sums) for key, sums in routes.items()],
            prefixes=[Prefix(*key, sums, key in early) for key, sums in prefixes.items()],
            engines=self._engines(start_s, end_s),
            prompts=prompts[-400:],
            breakdown=breakdown,
        )

    def _between(self, start_s: float, end_s: float) -> Iterable[CompletedRequest]:
        return (
            request
            for request in self.completed
            if start_s < request.at_s <= end_s
            and request.record.prompt_tokens
            and request.record.cached_tokens is not None
        )

    def _engines(self, start_s: float, end_s: float) -> list[EngineSums]:
        """Increases between scrapes; a counter that fell was reset."""
        last: dict[str, EngineScrape] = {}
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for scrape in self.engine_scrapes:
            before = last.get(scrape.replica)
            if before and start_s < scrape.at_s <= end_s and scrape.queries >= before.queries:
                sums[scrape.replica][0] += scrape.queries - before.queries
                sums[scrape.replica][1] += scrape.hits - before.hits
            last[scrape.replica] = scrape
        return [EngineSums(name, queries, hits) for name, (queries, hits) in sums.items()]


def _sums(record: Record) -> Sums:
    prompt, cached = float(record.prompt_tokens or 0), float(record.cached_tokens or 0)
    spilled = 1.0 if record.reason == "spill" else 0.0
    if record.hit_tokens is None:
        return Sums(1.0, prompt, cached, spilled)
    scale = prompt / max(record.prompt_tokens_estimate, 1)
    return Sums(1.0, prompt, cached, spilled, prompt, min(record.hit_tokens * scale, prompt), cached)
