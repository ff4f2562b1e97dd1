"""Template tags for figures that are not there."""

from __future__ import annotations

from django import template

from telemetry.metrics.windows import PointState
from telemetry.web.sentences import absence

register = template.Library()


@register.simple_tag
def absence_word(state: PointState | str) -> str:
    """Why there is no figure, in a word or two."""
    return absence(state)
