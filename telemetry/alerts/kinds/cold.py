"""A drop that is a restarted replica's alone (H18): found, and not told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from telemetry.alerts.past import Seen, WindowSum
from telemetry.alerts.verdict import Answer, Verdict

MUTED = "restarted"  # the figure by which telling knows


def unless_cold(verdict: Verdict, seen: Seen, warm_up_s: float, judge: Callable[[WindowSum], Verdict]) -> Verdict:
    """The verdict, with the restarted replicas among its figures where without them there would be no breach."""
    cold = seen.restarted(warm_up_s) if verdict.answer is Answer.BREACH else {}
    if not cold or judge(seen.newest_without(cold)).answer is Answer.BREACH:
        return verdict
    until = max(cold.values()) + timedelta(seconds=warm_up_s)
    return replace(verdict, figures={**verdict.figures, MUTED: sorted(cold), "warm_at": until.isoformat()})
