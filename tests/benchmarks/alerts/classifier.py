"""Runs one incident through the detector and the cause analysis.

The detector gets the bins that a scraper would have stored. Causes are analysed twice: when the alert fires and a
minute later. No hit-rate ladder exists yet at either time.
"""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.alerts.detection import Detection, Detector, Sensitivity, State
from telemetry.causes import Evidence, rank
from telemetry.causes.evidence import find_change_point
from tests.benchmarks.alerts.fleet import BIN_S, MemoryFleet
from tests.benchmarks.alerts.incidents import DROP_S, INCIDENTS, SHAPES, USUAL_S, play
from tests.telemetry.causes.fleet import T0

WITHIN_S, LATENCY_S = 90.0, 12.0  # goal; until a reading is stored, its bin has ended and the rule is evaluated
LEAST_DROP, LASTED_S = 0.1, 120.0
JUDGED_S = 60.0  # after the alarm, when causes are judged anew
BEFORE_S = 0.4 * USUAL_S  # from which on the caches are warm


@dataclass(frozen=True)
class Outcome:
    kind: str
    drop: float  # of the hit rate at the old mix, over two minutes
    delay_s: float | None  # with the latency of scraping and evaluating; None: not found
    causes_at_alarm: tuple[str, ...]
    causes: tuple[str, ...]  # a minute after it
    right: tuple[str, ...]
    early: int  # alarms before it began
    is_drop: bool
    mix_told: bool

    @property
    def counts(self) -> bool:
        """Whether the drop is large enough that it must be detected."""
        return self.is_drop and self.drop >= LEAST_DROP

    @property
    def found(self) -> bool:
        return self.delay_s is not None and self.delay_s <= WITHIN_S

    @property
    def is_first(self) -> bool:
        """Whether the right cause ranked first, a minute after the alert."""
        return self.causes[:1] == self.right[:1]

    @property
    def is_first_at_alarm(self) -> bool:
        """Whether the right cause ranked first when the alert fired."""
        return self.causes_at_alarm[:1] == self.right[:1]

    @property
    def is_among_two(self) -> bool:
        """Whether the right cause ranked first or second, a minute after the alert."""
        return self.right[0] in self.causes[:2]


def judged(kind: int, shape: int, seed: int) -> Outcome:
    """Play an incident, given as indexes into ``INCIDENTS`` and ``SHAPES``, detect and explain it."""
    incident = INCIDENTS[kind]
    fleet = play(incident, SHAPES[shape], seed)
    found = _detections(fleet)
    states = [(one, before.state) for one, before in zip(found[1:], found, strict=False)]
    alarms = [one for one, before in states if one.state is State.DOWN is not before]
    after = [one for one in alarms if _second(one) > USUAL_S]
    delay = _second(after[0]) - USUAL_S + LATENCY_S if after else None
    start_s = (after[0].change_point - T0).total_seconds() if after and after[0].change_point else USUAL_S
    alarm_s = (delay or 0.0) + USUAL_S
    at_alarm, causes = (
        _causes(fleet, start_s, min(alarm_s + later_s, USUAL_S + DROP_S)) if after else ()
        for later_s in (0.0, JUDGED_S)
    )
    mix = any(one.mix_since is not None and _second(one) > USUAL_S for one in found)
    return Outcome(
        kind=incident.kind,
        drop=_drop(fleet),
        delay_s=delay,
        causes_at_alarm=at_alarm,
        causes=causes,
        right=incident.causes,
        early=len(alarms) - len(after),
        is_drop=incident.is_drop,
        mix_told=mix,
    )


def _detections(fleet: MemoryFleet) -> list[Detection]:
    detector = Detector(Sensitivity(bin_s=BIN_S))
    found, before = [], T0
    for one in fleet.bins():
        changes = [it.at for it in fleet.happenings if before < it.at <= one.end]
        found.append(detector.add(one, changes))
        before = one.end
    return found


def _second(one: Detection) -> float:
    return (one.at - T0).total_seconds()


def _causes(fleet: MemoryFleet, start_s: float, end_s: float) -> tuple[str, ...]:
    now, before = fleet.side(start_s, end_s), fleet.side(BEFORE_S, start_s)
    fell = find_change_point(fleet.series(BEFORE_S, end_s, BIN_S))
    return tuple(cause.kind for cause in rank(Evidence(now, before, fleet.happenings, fell)))


def _drop(fleet: MemoryFleet) -> float:
    """Drop of the groups' hit rates over the first two minutes, weighted by the mix before it."""
    before = fleet.side(USUAL_S - 240, USUAL_S)
    after = fleet.side(USUAL_S, USUAL_S + LASTED_S)
    groups = {route.group for route in before.routes}
    total = before.total.prompt or 1.0
    fallen = 0.0
    for group in groups:
        usual = sum((it.sums.prompt for it in before.routes if it.group == group), 0.0)
        rates = []
        for side in (before, after):
            mine = [it.sums for it in side.routes if it.group == group]
            tokens = sum(it.prompt for it in mine)
            rates.append(sum(it.cached for it in mine) / tokens if tokens else None)
        if None not in rates:
            fallen += usual / total * (rates[0] - rates[1])  # type: ignore[operator]
    return fallen
