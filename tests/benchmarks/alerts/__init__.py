"""Alerting as a classifier: ``python -m tests.benchmarks alerts [--seeds COUNT] [--only KIND] [--weeks COUNT]``.

Incidents of 13 kinds on three shapes of traffic, each by its seed, in the stand-in fleet (incidents.py); the real
detector on their bins and the real judges of causes on what telemetry would hold. Quiet pool-weeks come from a cheaper
generator (quiet.py). Goals: 95 % of drops of 10 points or more that last two minutes within 90 s, the right cause first
in 90 % and among the first two in 98 %, at most one false alarm in a pool-week.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from telemetry.alerts.detection import Detection, Detector, Sensitivity, State
from telemetry.causes import Evidence, rank
from telemetry.causes.onset import onset
from tests.benchmarks.alerts.fleet import BIN_S, MemoryFleet
from tests.benchmarks.alerts.incidents import DROP_S, INCIDENTS, SHAPES, USUAL_S, Incident, Shape, play
from tests.benchmarks.alerts.quiet import alarms_in_week
from tests.telemetry.causes.fleet import T0

FIRST_SEED = 3001
SEEDS, WEEKS = 2, 30
WITHIN_S, LATENCY_S = 90.0, 12.0  # goal; until a reading is stored, its bin has ended and the rule is evaluated
LEAST_DROP, LASTED_S = 0.1, 120.0
JUDGED_S = 60.0  # after the alarm, when causes are judged anew
BEFORE_S = 0.4 * USUAL_S  # from which on the caches are warm


@dataclass(frozen=True)
class Outcome:
    """What came of one incident."""

    kind: str
    drop: float  # of the hit rate at the old mix, over two minutes
    delay_s: float | None  # with the latency of scraping and evaluating; None: not found
    causes: tuple[str, ...]
    right: tuple[str, ...]
    early: int  # alarms before it began
    is_drop: bool
    mix_told: bool

    @property
    def counts(self) -> bool:
        """Whether it is a drop that has to be found."""
        return self.is_drop and self.drop >= LEAST_DROP

    @property
    def found(self) -> bool:
        """In time."""
        return self.delay_s is not None and self.delay_s <= WITHIN_S


def judged(incident: Incident, shape: Shape, seed: int) -> Outcome:
    """Play an incident, and have it detected and explained."""
    fleet = play(incident, shape, seed)
    found = _detections(fleet)
    states = [(one, before.state) for one, before in zip(found[1:], found, strict=False)]
    alarms = [one for one, before in states if one.state is State.DOWN is not before]
    after = [one for one in alarms if _second(one) > USUAL_S]
    delay = _second(after[0]) - USUAL_S + LATENCY_S if after else None
    start_s = (after[0].onset - T0).total_seconds() if after and after[0].onset else USUAL_S
    causes = _causes(fleet, start_s, min((delay or 0.0) + USUAL_S + JUDGED_S, USUAL_S + DROP_S)) if after else ()
    mix = any(one.mix_since is not None and _second(one) > USUAL_S for one in found)
    return Outcome(
        incident.kind, _drop(fleet), delay, causes, incident.causes, len(alarms) - len(after), incident.is_drop, mix
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
    fell = onset(fleet.series(BEFORE_S, end_s, BIN_S))
    return tuple(cause.kind for cause in rank(Evidence(now, before, fleet.happenings, fell)))


def _drop(fleet: MemoryFleet) -> float:
    """By how much the groups fell over the first two minutes, at the mix of before."""
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


def main(arguments: Sequence[str] = ()) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks alerts")
    parser.add_argument("--only", default="", help="play the kinds whose names hold this")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how often each kind is played on each shape")
    parser.add_argument("--weeks", type=int, default=WEEKS, help="quiet pool-weeks")
    parser.add_argument("--verbose", action="store_true", help="print each incident")
    given = parser.parse_args(arguments)
    begun = time.perf_counter()
    outcomes = []
    for incident in INCIDENTS:
        for shape in SHAPES if given.only in incident.kind else ():
            for seed in range(FIRST_SEED, FIRST_SEED + given.seeds):
                outcomes.append(judged(incident, shape, seed))
                if given.verbose:
                    print(shape.name, outcomes[-1], flush=True)
    print_table(outcomes)
    print_quiet([alarms_in_week(FIRST_SEED + number) for number in range(given.weeks)])
    print(f"{time.perf_counter() - begun:.0f} s")


def print_table(outcomes: Sequence[Outcome]) -> None:
    """A line for each kind, and all together."""
    heads = f"{'played':>6} {'drop':>6} {'count':>5} {'found':>5} {'median':>7} {'max':>6} {'first':>5} {'two':>5}"
    print(f"{'kind':<20} {heads}")
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        by_kind[one.kind].append(one)
    for kind, several in (*by_kind.items(), ("all", list(outcomes))):
        drops = [one for one in several if one.counts]
        delays = [one.delay_s for one in drops if one.delay_s is not None]
        told = [one for one in drops if one.delay_s is not None]
        first = sum(one.causes[:1] == one.right[:1] for one in told)
        two = sum(one.right[0] in one.causes[:2] for one in told)
        size = statistics.median(one.drop for one in several) * 100 if several else 0.0
        print(
            f"{kind:<20} {len(several):>6} {size:>6.1f} {len(drops):>5} {sum(one.found for one in drops):>5} "
            f"{statistics.median(delays) if delays else float('nan'):>7.0f} {max(delays, default=float('nan')):>6.0f} "
            f"{first:>5} {two:>5}"
        )
    mixes = [one for one in outcomes if not one.is_drop]
    print(f"changes of mix: {sum(one.mix_told for one in mixes)} of {len(mixes)} told apart, "
          f"{sum(one.delay_s is not None for one in mixes)} raised an alarm")  # fmt: skip
    print(f"alarms before the incident began: {sum(one.early for one in outcomes)}")


def print_quiet(alarms: Sequence[int]) -> None:
    """False alarms of quiet weeks."""
    if alarms:
        print(f"quiet: {sum(alarms)} false alarms in {len(alarms)} pool-weeks ({sum(alarms) / len(alarms):.2f} a week)")
