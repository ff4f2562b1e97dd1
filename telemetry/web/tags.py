"""Template tags and filters of telemetry's pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from django import template
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from controlplane.web.tags import percent
from telemetry.lab.chains import format_hash
from telemetry.lint import PromptStructure, Segment, Volatile
from telemetry.metrics.windows import PointState
from telemetry.services.alerts.previews import Episode
from telemetry.services.figures.engine import Reconciled
from telemetry.services.figures.replicas import CELLS, HeatStrip
from telemetry.web import decisions
from telemetry.web.charts import absence, figure_text

register = template.Library()
register.filter("reason_label", decisions.reason_label)
register.filter("place", decisions.place_of)
register.filter("cached_ratio", decisions.cached_ratio)
register.filter("predicted_ratio", decisions.predicted_ratio)
register.filter("block_limit_ratio", decisions.block_limit_ratio)
register.filter("format_hash", format_hash)
register.filter("in_unit", figure_text)

_RESULTS = {"ok": ("OK", "good"), "breach": ("firing", "bad"), "no_data": ("no data", "warn")}
_NO_DATA_REASONS = {
    "no_readings": "no successful scrape recently",
    "not_reported": "the engines do not report this metric",
    "unread": "scrapes fail, but not for long enough to alert",
    "little_traffic": "not enough traffic",
    "little_history": "not enough history for a baseline",
    "starting": "replicas are starting and have not been scraped yet",
    "nobody": "nothing to evaluate",
    "failed": "the evaluation failed; see the worker's log",
}
_AGREEMENTS = {
    "agree": ("agree", "good"),
    "disagree": ("differ", "bad"),
    "too_few": ("too few requests", ""),
    "not_reported": ("not reported", ""),
}


@register.simple_tag
def absence_word(state: PointState | str) -> str:
    """Why there is no figure, in a few words."""
    return absence(state)


@register.simple_tag
def agreement_badge(agreement: str) -> SafeString:
    """The result of comparing three hit rates (H17)."""
    return format_html('<span class="badge {1}">{0}</span>', *_AGREEMENTS[agreement])


@register.simple_tag
def notes_of(rows: Iterable[Reconciled]) -> list[tuple[str, list[str]]]:
    """Each note about engines once, with the replicas that it applies to."""
    notes: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes.notes:
            notes.setdefault(note, []).append(row.replica)
    return list(notes.items())


@register.simple_tag
def verdict_words(verdict: dict[str, Any]) -> SafeString:
    """The result of a rule's last evaluation."""
    label, colour = _RESULTS.get(verdict.get("answer", ""), ("not evaluated yet", ""))
    unit, value, limit = verdict.get("unit", "ratio"), verdict.get("value"), verdict.get("limit")
    text = _NO_DATA_REASONS.get(verdict.get("reason", ""), "")
    if value is not None and limit is not None:
        text = f"{figure_text(value, unit)}, limit {figure_text(limit, unit)}"
    return format_html('<span class="badge {}">{}</span> <span class="small muted">{}</span>', colour, label, text)


@register.simple_tag
def accounted(share: float | None) -> SafeString:
    """The share of responses that reported cached tokens, unless all did."""
    if share is None or share >= 0.9995:
        return SafeString("")
    return format_html('<span class="muted small">of {} of responses</span>', percent(share))


@register.simple_tag
def heat_strip(strips: dict[str, HeatStrip], name: str) -> SafeString:
    """A replica's hit rate over time as a strip in a table."""
    return _strip(strips[name]) if name in strips else SafeString("")


@register.simple_tag
def heat_strip_of(strip: HeatStrip, name: str) -> SafeString:
    """A replica's hit rate over time as a strip of full width."""
    return format_html('<div class="strip-wide" id="strip-{}">{}</div>', name, _strip(strip))


def _strip(strip: HeatStrip) -> SafeString:
    label = "hit rate unknown"
    if strip.lowest_ratio is not None:
        label = f"hit rate between {percent(strip.lowest_ratio)} and {percent(strip.highest_ratio)}"
    cells = format_html_join(
        "", '<rect x="{}" width="{}" height="1" class="{}"/>', ((run.first, run.cells, run.style) for run in strip.runs)
    )
    return format_html(
        '<svg class="strip" viewBox="0 0 {} 1" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>',
        CELLS,
        label,
        cells,
    )


@register.filter
def two_errors(standard_error: float) -> str:
    """Half the width of the 95 % interval of a ratio, in percentage points."""
    return f"{200 * standard_error:.1f}"


@register.filter
def lasted(episode: Episode, now: datetime) -> float:
    """The duration of an episode in seconds."""
    return episode.length_s(now)


@register.filter
def from_json(text: str | None) -> datetime | None:
    """A time from a JSON document."""
    return datetime.fromisoformat(text) if text else None


@register.filter
def with_volatile(structure: PromptStructure) -> Iterator[tuple[Segment, list[Volatile]]]:
    """Each segment of a prompt with its varying parts."""
    for segment in structure.segments:
        end = segment.at + segment.length
        yield segment, [token for token in structure.volatile if segment.at <= token.at < end]
