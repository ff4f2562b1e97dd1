"""One evaluation from end to end: judge the rules, look for causes, tell what is due."""

from __future__ import annotations

from datetime import datetime

from telemetry.alerts.pipeline import evaluate_rules
from telemetry.alerts.telling import tell_due
from telemetry.services.alerts.explanations import explain_drops
from telemetry.storage.locks import EVALUATE, only_one


def evaluate_alerts(now: datetime) -> bool:
    """Do all of it; False where another evaluator is at it.

    Each part works off what the database says, so one that is cut short is completed by the next.
    """
    with only_one(EVALUATE) as ours:
        if ours:
            verdicts = evaluate_rules(now)
            explain_drops(now)
            tell_due(now, verdicts)
        return ours
