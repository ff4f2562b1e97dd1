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
from telemetry.lint import PromptStructure
from tests.telemetry.causes.fleet import T0, Fleet, Modelled

BIN_S = 10.0
SCRAPE_S = 5.0


@dataclass(slots=True)
class Ended:
    at_s: float
    record: Record


@dataclass(slots=True)
class Counted:
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
        self.ended: list[Ended] = []
        self.counted: list[Counted] = []
        self.happenings: list[RelatedEvent] = []
        self.configure()

    def _replica(self, name: str, blocks: int) -> Modelled:
        row: Any = SimpleNamespace(name=name, url=f"http://10.0.0.{name[1:]}:8000")
        return Modelled(row, blocks)

    def _told(self, record: Record, outcome: Outcome) -> None:
        if outcome is Outcome.OK:
            self.ended.append(Ended(self.now_s, record))

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
                told = replica.engine.statistics
                self.counted.append(Counted(self.now_s, replica.row.name, told.queries, told.hits))

    def happens(self, kind: str, replica: str = "", revision: int | None = None) -> None:
        at = T0 + timedelta(seconds=self.now_s)
        self.happenings.append(
            RelatedEvent(at, kind, f"{kind} {replica}.", replica, revision, self.policy if revision else "")
        )

    # --- what telemetry makes of it ---

    def bins(self) -> list[Bin]:
        last = int(self.now_s // BIN_S)
        found: list[dict[str, list[float]]] = [defaultdict(lambda: [0.0, 0.0, 0.0]) for _ in range(last)]
        for one in self.ended:
            place, record = int(one.at_s // BIN_S), one.record
            if place < last and record.prompt_tokens is not None and record.cached_tokens is not None:
                sums = found[place][record.group]
                sums[0] += record.prompt_tokens
                sums[1] += record.cached_tokens
                sums[2] += 1
        return [
            Bin(T0 + timedelta(seconds=BIN_S * (place + 1)), {name: GroupBin(*sums) for name, sums in groups.items()})
            for place, groups in enumerate(found)
        ]

    def series(self, start_s: float, end_s: float, step_s: float) -> list[OnsetBin]:
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for one in self._between(start_s, end_s):
            part = sums[int((one.at_s - start_s) // step_s)]
            part[0] += one.record.prompt_tokens or 0
            part[1] += one.record.cached_tokens or 0
        return [OnsetBin(T0 + timedelta(seconds=start_s + step_s * n), *sums[n]) for n in sorted(sums)]

    def side(self, start_s: float, end_s: float, ladder: Any = None) -> Period:
        routes: dict[tuple[str, str, str, int], Sums] = defaultdict(Sums)
        prefixes: dict[tuple[str, int | None, str], Sums] = defaultdict(Sums)
        early: set[tuple[str, int | None, str]] = set()
        seen: list[DescribedPrompt] = []
        for one in self._between(start_s, end_s):
            record, sums = one.record, _sums(one.record)
            routes[record.group, record.replica, record.policy, record.revision] += sums
            key = (record.group, record.prefix, record.replica)
            prefixes[key] += sums
            if one.at_s < (start_s + end_s) / 2:
                early.add(key)
            opening = PromptStructure.read(json.loads(record.structure)) if record.structure else None
            if opening is not None:
                seen.append(DescribedPrompt(record.group, T0 + timedelta(seconds=one.at_s), opening))
        return Period(
            T0 + timedelta(seconds=start_s),
            T0 + timedelta(seconds=end_s),
            routes=[Route(*key, sums) for key, sums in routes.items()],
            prefixes=[Prefix(*key, sums, key in early) for key, sums in prefixes.items()],
            engines=self._engines(start_s, end_s),
            prompts=seen[-400:],
            ladder=ladder,
        )

    def _between(self, start_s: float, end_s: float) -> Iterable[Ended]:
        return (
            one
            for one in self.ended
            if start_s < one.at_s <= end_s and one.record.prompt_tokens and one.record.cached_tokens is not None
        )

    def _engines(self, start_s: float, end_s: float) -> list[EngineSums]:
        """Increases between scrapes; a counter that fell was reset."""
        last: dict[str, Counted] = {}
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for one in self.counted:
            before = last.get(one.replica)
            if before and start_s < one.at_s <= end_s and one.queries >= before.queries:
                sums[one.replica][0] += one.queries - before.queries
                sums[one.replica][1] += one.hits - before.hits
            last[one.replica] = one
        return [EngineSums(name, queries, hits) for name, (queries, hits) in sums.items()]


def _sums(record: Record) -> Sums:
    prompt, cached = float(record.prompt_tokens or 0), float(record.cached_tokens or 0)
    spilled = 1.0 if record.reason == "spill" else 0.0
    if record.hit_tokens is None:
        return Sums(1.0, prompt, cached, spilled)
    scale = prompt / max(record.prompt_tokens_estimate, 1)
    return Sums(1.0, prompt, cached, spilled, prompt, min(record.hit_tokens * scale, prompt), cached)
