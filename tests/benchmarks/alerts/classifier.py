"""Runs one incident through the detector and the cause analysis.

The detector gets the bins that a scraper would have stored. Causes are analysed twice: when the alert fires and a
minute later. No hit-rate breakdown exists yet at either time.
"""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.alerts.detection import Detection, Detector, Sensitivity, State
from telemetry.causes import Evidence, rank
from telemetry.causes.evidence import find_change_point
from tests.benchmarks.alerts.fleet import BIN_S, MemoryFleet
from tests.benchmarks.alerts.incidents import DROP_S, INCIDENTS, SHAPES, USUAL_S, play
from tests.telemetry.causes.fleet import T0

GOAL_S = 90.0  # time in which a drop should be detected
LATENCY_S = 12.0  # until a reading is stored, its bin has ended and the rule is evaluated
MIN_DROP, DROP_WINDOW_S = 0.1, 120.0
SECOND_ANALYSIS_S = 60.0  # after the alarm
WARM_S = 0.4 * USUAL_S  # from then on the caches are warm


@dataclass(frozen=True)
class Outcome:
    kind: str
    drop: float  # of the hit rate at the old mix, over two minutes
    delay_s: float | None  # with the latency of scraping and evaluating; None: not detected
    causes_at_alarm: tuple[str, ...]
    causes: tuple[str, ...]  # a minute after the alarm
    expected: tuple[str, ...]  # accepted causes
    early: int  # alarms before the incident began
    is_drop: bool
    mix_reported: bool

    @property
    def must_be_found(self) -> bool:
        """Whether the drop is large enough that it must be detected."""
        return self.is_drop and self.drop >= MIN_DROP

    @property
    def is_found(self) -> bool:
        return self.delay_s is not None and self.delay_s <= GOAL_S

    @property
    def is_first(self) -> bool:
        """Whether the right cause ranked first, a minute after the alert."""
        return self.causes[:1] == self.expected[:1]

    @property
    def is_first_at_alarm(self) -> bool:
        """Whether the right cause ranked first when the alert fired."""
        return self.causes_at_alarm[:1] == self.expected[:1]

    @property
    def is_among_two(self) -> bool:
        """Whether the right cause ranked first or second, a minute after the alert."""
        return self.expected[0] in self.causes[:2]


def play_and_judge(kind: int, shape: int, seed: int) -> Outcome:
    """Play an incident, given as indexes into ``INCIDENTS`` and ``SHAPES``, detect and explain it."""
    incident = INCIDENTS[kind]
    fleet = play(incident, SHAPES[shape], seed)
    detections = _detections(fleet)
    states = [(after, before.state) for after, before in zip(detections[1:], detections, strict=False)]
    alarms = [detection for detection, before in states if detection.state is State.DOWN is not before]
    on_time = [detection for detection in alarms if _second(detection) > USUAL_S]
    delay = _second(on_time[0]) - USUAL_S + LATENCY_S if on_time else None
    start_s = (on_time[0].change_point - T0).total_seconds() if on_time and on_time[0].change_point else USUAL_S
    alarm_s = (delay or 0.0) + USUAL_S
    at_alarm, causes = (
        _causes(fleet, start_s, min(alarm_s + later_s, USUAL_S + DROP_S)) if on_time else ()
        for later_s in (0.0, SECOND_ANALYSIS_S)
    )
    mix = any(detection.mix_since is not None and _second(detection) > USUAL_S for detection in detections)
    return Outcome(
        kind=incident.kind,
        drop=_drop(fleet),
        delay_s=delay,
        causes_at_alarm=at_alarm,
        causes=causes,
        expected=incident.causes,
        early=len(alarms) - len(on_time),
        is_drop=incident.is_drop,
        mix_reported=mix,
    )


def _detections(fleet: MemoryFleet) -> list[Detection]:
    detector = Detector(Sensitivity(bin_s=BIN_S))
    detections, previous_end = [], T0
    for hit_bin in fleet.bins():
        changes = [event.at for event in fleet.events if previous_end < event.at <= hit_bin.end]
        detections.append(detector.add(hit_bin, changes))
        previous_end = hit_bin.end
    return detections


def _second(detection: Detection) -> float:
    return (detection.at - T0).total_seconds()


def _causes(fleet: MemoryFleet, start_s: float, end_s: float) -> tuple[str, ...]:
    current, baseline = fleet.period(start_s, end_s), fleet.period(WARM_S, start_s)
    change_point = find_change_point(fleet.series(WARM_S, end_s, BIN_S))
    return tuple(cause.kind for cause in rank(Evidence(current, baseline, fleet.events, change_point)))


def _drop(fleet: MemoryFleet) -> float:
    """Drop of the groups' hit rates over the first two minutes, weighted by the mix before it."""
    before = fleet.period(USUAL_S - 240, USUAL_S)
    after = fleet.period(USUAL_S, USUAL_S + DROP_WINDOW_S)
    groups = {route.group for route in before.routes}
    total = before.total.prompt or 1.0
    drop = 0.0
    for group in groups:
        usual = sum((route.sums.prompt for route in before.routes if route.group == group), 0.0)
        rates = []
        for period in (before, after):
            route_sums = [route.sums for route in period.routes if route.group == group]
            tokens = sum(sums.prompt for sums in route_sums)
            rates.append(sum(sums.cached for sums in route_sums) / tokens if tokens else None)
        if None not in rates:
            drop += usual / total * (rates[0] - rates[1])  # type: ignore[operator]
    return drop
