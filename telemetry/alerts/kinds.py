"""The kinds of rules: how each reads its settings, and how it looks at a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from controlplane.models import Pool
from telemetry.alerts.evaluate import DropSettings, Verdict, baseline_span, evaluate_drop
from telemetry.alerts.history import pool_windows
from telemetry.models import RuleKind


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of rule."""

    parse: Callable[[object], DropSettings]  # RuleError
    judge: Callable[[Pool, DropSettings, datetime, datetime | None], Verdict]  # (pool, settings, now, alert open since)


def judge_drop(pool: Pool, settings: DropSettings, now: datetime, opened_at: datetime | None) -> Verdict:
    """Compare a pool's newest window with its baseline. Two queries."""
    start, end = baseline_span(settings, now, opened_at)
    windows = pool_windows(pool, since=start, until=now, window_s=settings.window_s)
    length = timedelta(seconds=settings.window_s)
    return evaluate_drop(settings, windows[-1], [window for window in windows if window.start + length <= end])


KINDS: dict[str, Kind] = {RuleKind.HIT_RATE_DROP.value: Kind(DropSettings.parse, judge_drop)}
