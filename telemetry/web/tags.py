"""Template tags for figures that are not there."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django import template
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from controlplane.web.tags import percent
from telemetry.metrics.windows import PointState
from telemetry.services.alerts.previews import Episode
from telemetry.services.figures.engine import Reconciled
from telemetry.services.figures.replicas import CELLS, HeatStrip
from telemetry.web.charts import absence, figure_words

register = template.Library()

_ANSWERS = {"ok": ("well", "good"), "breach": ("broken", "bad"), "no_data": ("cannot tell", "warn")}
_REASONS = {
    "no_readings": "nothing was scraped lately",
    "not_reported": "the engines do not report it",
    "unread": "scrapes fail, not for long enough to tell",
    "little_traffic": "too little traffic to tell",
    "little_history": "too little history for a baseline",
    "starting": "replicas are starting: none was read yet",
    "nobody": "nothing to look at",
    "failed": "the evaluation failed: see the worker's log",
}


@register.simple_tag
def absence_word(state: PointState | str) -> str:
    """Why there is no figure, in a word or two."""
    return absence(state)


_AGREEMENTS = {
    "agree": ("agree", "good"),
    "disagree": ("disagree", "bad"),
    "too_few": ("too few", ""),
    "not_reported": ("not reported", ""),
}


@register.simple_tag
def agreement_badge(agreement: str) -> SafeString:
    """What came of holding three hit rates against each other (H17)."""
    return format_html('<span class="badge {1}">{0}</span>', *_AGREEMENTS[agreement])


@register.simple_tag
def notes_of(rows: Iterable[Reconciled]) -> list[tuple[str, list[str]]]:
    """What must be known of some engines, each sentence once, with the replicas that it is about."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes.notes:
            found.setdefault(note, []).append(row.replica)
    return list(found.items())


@register.simple_tag
def verdict_words(verdict: dict[str, Any]) -> SafeString:
    """What a rule's last evaluation found, and why."""
    answer, reason = verdict.get("answer", ""), verdict.get("reason", "")
    label, tone = _ANSWERS.get(answer, ("not looked yet", ""))
    unit, value, limit = verdict.get("unit", "ratio"), verdict.get("value"), verdict.get("limit")
    words = _REASONS.get(reason, "")
    if value is not None and limit is not None:
        words = f"{figure_words(value, unit)} against {figure_words(limit, unit)}"
    return format_html('<span class="badge {}">{}</span> <span class="small muted">{}</span>', tone, label, words)


@register.simple_tag
def heat_strip(strips: dict[str, HeatStrip], name: str) -> SafeString:
    """A replica's strip in a table: how warm it was, step by step; what it says stands beside it for those who hear."""
    return _strip(strips[name]) if name in strips else SafeString("")


@register.simple_tag
def heat_strip_of(strip: HeatStrip, name: str) -> SafeString:
    """One replica's strip by itself."""
    return format_html('<div class="strip-wide" id="strip-{}">{}</div>', name, _strip(strip))


def _strip(strip: HeatStrip) -> SafeString:
    said = "hit rate unknown"
    if strip.lowest_ratio is not None:
        said = f"hit rate from {percent(strip.lowest_ratio)} to {percent(strip.highest_ratio)}"
    cells = format_html_join(
        "", '<rect x="{}" width="{}" height="1" class="{}"/>', ((run.first, run.cells, run.look) for run in strip.runs)
    )
    return format_html(
        '<svg class="strip" viewBox="0 0 {} 1" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>',
        CELLS,
        said,
        cells,
    )


@register.filter
def in_unit(value: float | None, unit: str) -> str:
    """A figure with its unit."""
    return figure_words(value, unit)


@register.filter
def two_errors(standard_error: float) -> str:
    """Twice a ratio's standard error, in points of 100: the half width of its 95 % interval."""
    return f"{200 * standard_error:.1f}"


@register.filter
def lasted(episode: Episode, now: datetime) -> float:
    """How long an episode lasted, in seconds."""
    return episode.length_s(now)


@register.filter
def from_json(text: str | None) -> datetime | None:
    """A time that JSON holds; None for none."""
    return datetime.fromisoformat(text) if text else None
