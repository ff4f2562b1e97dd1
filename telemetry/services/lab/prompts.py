"""What keeps the prompts of each task group from sharing more of the caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from telemetry.lint.findings import Finding, lint
from telemetry.lint.openings import Opening
from telemetry.metrics.windows import Window
from telemetry.storage.additions import coverage, route_additions
from telemetry.storage.openings import newest_openings

LOOK_BACK = timedelta(minutes=15)
MOST = 60  # openings of a task group
FEW = 8  # of which nothing is said


@dataclass(frozen=True, slots=True)
class GroupPrompts:
    """One task group's openings, and what was found in them, worst first."""

    pool: str
    group: str  # "": requests of no task group
    openings: int  # that were compared
    messages: int  # of a prompt, at the median
    tokens: int  # estimated, of a prompt, at the median
    requests_per_s: float | None
    findings: tuple[Finding, ...]

    @property
    def is_thin(self) -> bool:
        """Whether there are too few openings to say anything."""
        return self.openings < FEW

    @property
    def tokens_per_day(self) -> float:
        """Lost to the worst finding: what they lose overlaps."""
        return max((it.tokens_per_day or 0.0 for it in self.findings), default=0.0)


def prompts_of(pools: Sequence[str] | None, now: datetime, *, group: str | None = None) -> list[GroupPrompts]:
    """Every task group of some pools (None: all), those that lose most first. 3 queries, 10 ms a group."""
    window = Window(now - LOOK_BACK, now, LOOK_BACK.total_seconds())
    found: dict[tuple[str, str], list[Opening]] = defaultdict(list)
    for pool, name, document in newest_openings(pools, window, most=MOST, group=group):
        if (opening := Opening.read(msgspec.json.decode(document))) is not None:
            found[pool, name].append(opening)
    paces = _paces(pools, window) if found else {}
    groups = [_prompts(*key, openings, paces.get(key)) for key, openings in found.items()]
    return sorted(groups, key=lambda it: (-it.tokens_per_day, not it.findings, it.pool, it.group))


def _prompts(pool: str, group: str, openings: list[Opening], pace: float | None) -> GroupPrompts:
    middle = len(openings) // 2
    return GroupPrompts(
        pool,
        group,
        len(openings),
        sorted(it.messages for it in openings)[middle],
        sorted(it.length for it in openings)[middle] // 4,
        pace,
        tuple(lint(openings, pace)) if len(openings) >= FEW else (),
    )


def _paces(pools: Sequence[str] | None, window: Window) -> dict[tuple[str, str], float]:
    """Requests a second by pool and task group."""
    covered = next(iter(coverage(window, whole=True)), None)
    if covered is None or not covered.covered_s:
        return {}
    rows = route_additions(pools, window, ("requests",), by=("pool", "group"), whole=True)
    seconds = covered.covered_s / covered.routers
    return {(row.key[0], row.key[1]): (row.get("requests") or 0) / seconds for row in rows}
