"""Template tags for figures that are not there."""

from __future__ import annotations

from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from controlplane.web.tags import percent
from telemetry.metrics.windows import PointState
from telemetry.web.sentences import absence

register = template.Library()

_ANSWERS = {"ok": ("well", "good"), "breach": ("below", "bad"), "no_data": ("cannot tell", "warn")}
_REASONS = {
    "no_readings": "nothing was scraped lately",
    "little_traffic": "too little traffic to tell",
    "little_history": "too little history for a baseline",
}


@register.simple_tag
def absence_word(state: PointState | str) -> str:
    """Why there is no figure, in a word or two."""
    return absence(state)


@register.simple_tag
def verdict_words(verdict: dict[str, Any]) -> SafeString:
    """What a rule's last evaluation found, and why."""
    answer, reason = verdict.get("answer", ""), verdict.get("reason", "")
    label, tone = _ANSWERS.get(answer, ("not looked yet", ""))
    value, baseline = verdict.get("value_ratio"), verdict.get("baseline_ratio")
    words = _REASONS.get(reason, "")
    if value is not None and baseline is not None:
        words = f"{percent(value)} against {percent(baseline)}"
    return format_html('<span class="badge {}">{}</span> <span class="small muted">{}</span>', tone, label, words)
