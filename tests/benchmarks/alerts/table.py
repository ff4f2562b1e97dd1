"""Prints the classifier's table and its goals."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from tests.benchmarks.alerts.classifier import GOAL_S, Outcome
from tests.benchmarks.alerts.incidents import USUAL_S

FOUND, FIRST, FIRST_TWO, ALARMS_A_WEEK = 0.95, 0.9, 0.98, 1.0  # goals
NONE = float("nan")


def print_table(outcomes: Sequence[Outcome]) -> None:
    """One line per kind, and totals.

    ``count`` are drops of at least 10 points. Of these: detected in time, seconds to the alert, and the correct cause
    first, or among the first two, a minute after the alert; ``now``: first when the alert fired.
    """
    heads = f"{'played':>6} {'drop':>6} {'count':>5} {'found':>5} {'median':>7} {'max':>6} {'first':>5} {'two':>5}"
    print(f"{'kind':<20} {heads} {'now':>5}")
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kind].append(outcome)
    for kind, of_kind in (*by_kind.items(), ("all", list(outcomes))):
        drops = [outcome for outcome in of_kind if outcome.must_be_found]
        delays = [outcome.delay_s for outcome in drops if outcome.delay_s is not None]
        found = sum(outcome.is_found for outcome in drops)
        size = statistics.median(outcome.drop for outcome in of_kind) * 100 if of_kind else 0.0
        print(
            f"{kind:<20} {len(of_kind):>6} {size:>6.1f} {len(drops):>5} {found:>5} "
            f"{statistics.median(delays) if delays else NONE:>7.0f} {max(delays, default=NONE):>6.0f} "
            f"{sum(outcome.is_first for outcome in drops):>5} {sum(outcome.is_among_two for outcome in drops):>5} "
            f"{sum(outcome.is_first_at_alarm for outcome in drops):>5}"
        )


def print_goals(outcomes: Sequence[Outcome], quiet: Sequence[int]) -> None:
    """Each goal with its figure, and pass or miss."""
    drops = [outcome for outcome in outcomes if outcome.must_be_found]
    detected = [outcome for outcome in drops if outcome.delay_s is not None]
    mixes = [outcome for outcome in outcomes if not outcome.is_drop]
    print()
    _goal(
        f"drops of 10 points or more detected within {GOAL_S:.0f} s",
        sum(outcome.is_found for outcome in drops),
        len(drops),
        FOUND,
    )
    _goal(
        "correct cause first, a minute after the alarm",
        sum(outcome.is_first for outcome in detected),
        len(detected),
        FIRST,
    )
    _goal(
        "correct cause among the first two", sum(outcome.is_among_two for outcome in detected), len(detected), FIRST_TWO
    )
    if quiet:
        rate = sum(quiet) / len(quiet)
        result = "pass" if rate <= ALARMS_A_WEEK else "MISS"
        print(f"{result}: {sum(quiet)} false alarms in {len(quiet)} quiet pool-weeks (goal: at most 1 a week)")
    at_alarm = sum(outcome.is_first_at_alarm for outcome in detected)
    print(f"      correct cause first when the alarm began: {at_alarm} of {len(detected)}")
    print(f"      alarms in the {len(outcomes) * USUAL_S / 3600:.1f} h before the incidents: "
          f"{sum(outcome.early for outcome in outcomes)}")  # fmt: skip
    print(f"      changes of mix: {sum(outcome.mix_reported for outcome in mixes)} of {len(mixes)} reported as such, "
          f"{sum(mix.must_be_found or mix.delay_s is not None for mix in mixes)} raised an alarm")  # fmt: skip


def _goal(description: str, count: int, total: int, goal: float) -> None:
    result = "pass" if total and count >= goal * total else "MISS"
    print(f"{result}: {description}: {count} of {total} ({count / max(total, 1):.1%}; goal {goal:.0%})")
