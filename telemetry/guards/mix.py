"""What one request of the baseline stands for, so that its task groups weigh as the trial's do. Pure.

Theory of operation. A share of the prefixes takes in other prompts than the rest. Most of how these differ is their
task groups: what one group hits, another never does, and a trial that got more of the one would look better or worse
by that alone. So the baseline is weighed, group by group, until it has the trial's mix (direct standardization). What
the trial has of groups that the baseline hardly has stands beside the baseline as a whole, as all does where no group
is told or none is shared.
"""

from __future__ import annotations

from collections.abc import Mapping

LEAST_REQUESTS = 10  # of a group at the baseline: with fewer, chance would weigh as much as the group


def weights(trial: Mapping[str, float], baseline: Mapping[str, float], known: set[str]) -> dict[str, float]:
    """What one unit of each of the baseline's groups counts for; all of it counts for as much as before.

    Both sides are given as units, tokens say, by task group; ``known`` are the groups whose baseline can be relied on.
    """
    wanted, there = sum(trial.values()), sum(baseline.values())
    if not wanted or not there:
        return dict.fromkeys(baseline, 1.0)
    own = {group: trial.get(group, 0.0) / units for group, units in baseline.items() if group in known and units}
    rest = sum(units for group, units in trial.items() if group not in own) / there
    return {group: (own.get(group, 0.0) + rest) * there / wanted for group in baseline}
