"""Template filters for decisions."""

from __future__ import annotations

from collections.abc import Iterator

from django import template

from telemetry.lab.chains import format_hash
from telemetry.lint import PromptStructure, Segment, Volatile
from telemetry.models import Decision
from telemetry.web import reasons
from telemetry.web.reasons import place_of

register = template.Library()
register.filter("reason_label", reasons.reason_label)
register.filter("place", place_of)
register.filter("shown_hash", format_hash)


@register.filter
def cached_ratio(one: Decision) -> float | None:
    """What came from the cache / the prompt; None where the answer did not say."""
    return one.cached_tokens / one.prompt_tokens if one.prompt_tokens and one.cached_tokens is not None else None


@register.filter
def predicted_ratio(one: Decision) -> float | None:
    """What was expected to; None where the strategy does not ask."""
    estimate = one.prompt_tokens_estimate
    return min(1.0, one.hit_tokens / estimate) if one.hit_tokens is not None and estimate else None


@register.filter
def with_volatile(opening: PromptStructure) -> Iterator[tuple[Segment, list[Volatile]]]:
    """Each segment with what changes in it."""
    for segment in opening.segments:
        end = segment.at + segment.length
        yield segment, [token for token in opening.volatile if segment.at <= token.at < end]
