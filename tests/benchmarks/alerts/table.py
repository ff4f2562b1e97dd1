"""Prints the classifier's table and its goals."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from tests.benchmarks.alerts.classifier import WITHIN_S, Outcome
from tests.benchmarks.alerts.incidents import USUAL_S

FOUND, FIRST, TWO, ALARMS_A_WEEK = 0.95, 0.9, 0.98, 1.0  # goals
NONE = float("nan")


def print_table(outcomes: Sequence[Outcome]) -> None:
    """One line per kind, and totals.

    ``count`` are drops of at least 10 points. Of these: detected in time, seconds to the alert, and the right cause
    first, or among the first two, a minute after the alert; ``now``: first when the alert fired.
    """
    heads = f"{'played':>6} {'drop':>6} {'count':>5} {'found':>5} {'median':>7} {'max':>6} {'first':>5} {'two':>5}"
    print(f"{'kind':<20} {heads} {'now':>5}")
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        by_kind[one.kind].append(one)
    for kind, several in (*by_kind.items(), ("all", list(outcomes))):
        drops = [one for one in several if one.counts]
        delays = [one.delay_s for one in drops if one.delay_s is not None]
        size = statistics.median(one.drop for one in several) * 100 if several else 0.0
        print(
            f"{kind:<20} {len(several):>6} {size:>6.1f} {len(drops):>5} {sum(one.found for one in drops):>5} "
            f"{statistics.median(delays) if delays else NONE:>7.0f} {max(delays, default=NONE):>6.0f} "
            f"{sum(one.is_first for one in drops):>5} {sum(one.is_among_two for one in drops):>5} "
            f"{sum(one.is_first_at_alarm for one in drops):>5}"
        )


def print_goals(outcomes: Sequence[Outcome], quiet: Sequence[int]) -> None:
    """Each goal with its figure, and pass or miss."""
    drops = [one for one in outcomes if one.counts]
    told = [one for one in drops if one.delay_s is not None]
    mixes = [one for one in outcomes if not one.is_drop]
    print()
    _goal(
        f"drops of 10 points or more found within {WITHIN_S:.0f} s", sum(one.found for one in drops), len(drops), FOUND
    )
    _goal("right cause first, a minute after the alarm", sum(one.is_first for one in told), len(told), FIRST)
    _goal("right cause among the first two", sum(one.is_among_two for one in told), len(told), TWO)
    if quiet:
        rate = sum(quiet) / len(quiet)
        word = "pass" if rate <= ALARMS_A_WEEK else "MISS"
        print(f"{word}: {sum(quiet)} false alarms in {len(quiet)} quiet pool-weeks (goal: at most 1 a week)")
    print(f"      right cause first when the alarm began: {sum(one.is_first_at_alarm for one in told)} of {len(told)}")
    print(f"      alarms in the {len(outcomes) * USUAL_S / 3600:.1f} h before the incidents: "
          f"{sum(one.early for one in outcomes)}")  # fmt: skip
    print(f"      changes of mix: {sum(one.mix_told for one in mixes)} of {len(mixes)} reported as such, "
          f"{sum(one.counts or one.delay_s is not None for one in mixes)} raised an alarm")  # fmt: skip


def _goal(words: str, count: int, of: int, goal: float) -> None:
    word = "pass" if of and count >= goal * of else "MISS"
    print(f"{word}: {words}: {count} of {of} ({count / max(of, 1):.1%}; goal {goal:.0%})")
