"""A drop that is a restarted replica's alone (H18): found, and not told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from telemetry.alerts.past import Seen, WindowSum
from telemetry.alerts.verdict import Answer, Verdict

MUTED = "restarted"  # the figure by which telling knows
OTHERS = "others"  # and what the answer would be without those replicas


def unless_cold(verdict: Verdict, seen: Seen, warm_up_s: float, judge: Callable[[WindowSum], Verdict]) -> Verdict:
    """The verdict, with the restarted replicas among its figures where without them there would be no breach."""
    cold = seen.restarted(warm_up_s) if verdict.answer is Answer.BREACH else {}
    if not cold or (others := judge(seen.newest_without(cold)).answer) is Answer.BREACH:
        return verdict
    found = muted(verdict, cold, warm_up_s)
    return replace(found, figures={**found.figures, OTHERS: others})


def muted(verdict: Verdict, since: Mapping[str, datetime], warm_up_s: float) -> Verdict:
    """The verdict, as one that is due to what happened to some replicas, each at a moment."""
    until = max(since.values()) + timedelta(seconds=warm_up_s)
    return replace(verdict, figures={**verdict.figures, MUTED: sorted(since), "warm_at": until.isoformat()})
