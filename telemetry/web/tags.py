"""Template tags and filters of telemetry's pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from controlplane.errors import InvalidError
from controlplane.models import Rollout
from controlplane.web.navigation import may_open
from controlplane.web.tags import MINUS, NOTHING, badge, count, percent, seconds
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.message import headline, revision_path
from telemetry.causes import CauseKind
from telemetry.causes.evidence import evidence_lines
from telemetry.lab.chains import format_hash
from telemetry.lab.predictions import Verdict
from telemetry.lab.shared_cache import Advice
from telemetry.lint.structure import PromptStructure, Segment, Volatile
from telemetry.metrics.rates import UPPER_BOUND
from telemetry.metrics.windows import PointState
from telemetry.models import Alert, AlertRule, AlertState, RuleKind
from telemetry.services.alerts.previews import Episode
from telemetry.services.figures.engine import Reconciled
from telemetry.services.figures.replicas import CELLS, HeatStrip
from telemetry.services.lab.value import Amount, hours_text
from telemetry.services.setup import SETUP_COOKIE, Step, setup_steps
from telemetry.web import decisions, pages, rollout_figures
from telemetry.web.charts import absence, figure_text
from telemetry.web.what_if_figures import VERDICTS

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
    "no_readings": "nothing was measured in its window: no scrape, or no request yet",
    "not_reported": "no engine or router reports this figure",
    "scrapes_fail": "scrapes fail, but not for long enough to alert",
    "serving": "metrics cannot be read, but routers report it up",
    "little_traffic": "not enough traffic",
    "little_history": "not enough history for a baseline",
    "starting": "replicas are starting and have not been scraped yet",
    "no_replicas": "nothing to evaluate, or too few to compare",
    "no_cache": "no response cache is in use",
    "failed": "the evaluation failed; see the worker's log",
}
_AGREEMENTS = {
    "agree": ("agree", "good"),
    "disagree": ("differ", "bad"),
    "too_few": ("too few requests", ""),
    "not_reported": ("not reported", ""),
}


@register.simple_tag(takes_context=True)
def status_strip(context: template.Context) -> SafeString:
    """What every page says about alerts, telemetry and rollouts; rendered with escapes by its own template."""
    return SafeString(pages.strip_html(context["request"]))


@register.filter
def figure(document: dict[str, Any] | None, name: str) -> Any:
    """A figure of a document that may be missing; None: unknown."""
    return (document or {}).get(name)


@register.simple_tag(takes_context=True)
def open_steps(context: dict[str, Any]) -> list[Step]:
    """The open steps of a new installation, for administrators who did not dismiss them. One query."""
    request = context["request"]
    if request.COOKIES.get(SETUP_COOKIE) == "off" or not may_open(request, "controlplane:users"):
        return []
    return [step for step in setup_steps(request.user, timezone.now()) if not step.done]


@register.simple_tag
def canary_analysis(rollout: Rollout) -> rollout_figures.CanaryAnalysis:
    """Charts of a canary, and what the next verdict needs."""
    return rollout_figures.canary_analysis(rollout, timezone.now())


@register.simple_tag
def absence_word(state: PointState | str) -> str:
    """Why there is no figure, in a few words."""
    return absence(state)


@register.simple_tag
def agreement_badge(agreement: str) -> SafeString:
    """The result of comparing three hit rates."""
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
def verdict_words(rule: AlertRule, state: str) -> SafeString:
    """The result of a rule's last evaluation; ``state`` is that of its alerts: firing, pending or "" for none."""
    verdict = rule.verdict or {}
    label, colour = _RESULTS.get(verdict.get("result", ""), ("not evaluated yet", ""))
    if verdict.get("result") == "breach" and state == AlertState.PENDING:
        label, colour = "pending", "warn"
    unit, value, limit = verdict.get("unit", "ratio"), verdict.get("value"), verdict.get("limit")
    text = _NO_DATA_REASONS.get(verdict.get("reason", ""), "")
    if value is not None and limit is not None:
        text = f"{_value_name(rule, unit)} {figure_text(value, unit)}, limit {figure_text(limit, unit)}"
    return format_html('<span class="badge {}">{}</span> <span class="small muted">{}</span>', colour, label, text)


@register.filter
def value_name(alert: Alert) -> str:
    """What the value of an alert measures."""
    return _value_name(alert.rule, alert.unit)


def _value_name(rule: AlertRule, unit: str) -> str:
    if rule.kind == RuleKind.KV_PRESSURE and unit == "count":
        return "Preemptions per minute"
    kind = KINDS.get(rule.kind)  # None: of a later release
    return kind.figure if kind else "Value"


@register.filter
def value_is_current(alert: Alert) -> bool:
    """Whether the value of an open alert is that of the newest evaluation; otherwise it is that of the last breach."""
    at = alert.rule.evaluated_at
    return alert.state != AlertState.RESOLVED and (at is None or at <= alert.last_breach_at)


@register.filter
def newer_evaluation(alert: Alert) -> dict[str, Any] | None:
    """The newest evaluation of an open alert after its last breach; None if there is none.

    A rule stores only the result of its worst replica, so None also for an alert about one replica.
    """
    if alert.state == AlertState.RESOLVED or alert.subject or value_is_current(alert):
        return None
    verdict = alert.rule.verdict or {}
    return {
        "at": alert.rule.evaluated_at,
        "value": verdict.get("value"),
        "unit": verdict.get("unit", alert.unit),
        "reason": _NO_DATA_REASONS.get(verdict.get("reason", ""), "no result"),
        "resolves_at": _resolves_at(alert) if verdict.get("result") == "ok" else None,
    }


def _resolves_at(alert: Alert) -> datetime | None:
    try:
        settings = KINDS[alert.rule.kind].read(alert.rule.settings)
    except (InvalidError, KeyError):
        return None
    return alert.last_breach_at + timedelta(seconds=settings.keep_firing_s)


@register.filter
def of_longest(value: float | None, compared: Iterable[tuple[str, Any]]) -> float:
    """A TTFT p50 relative to the longest of the compared rows, 0 to 1, as the length of a bar."""
    known = [row.figures["ttft_p50_s"] for _, row in compared if row.figures and row.figures["ttft_p50_s"]]
    return (value or 0.0) / max(known, default=1.0)


@register.filter
def likelihood(confidence: float) -> str:
    """A confidence in words, with its number."""
    words = next(words for least, words in _LIKELIHOODS if confidence >= least)
    return f"{words} ({confidence * 100:.0f} %)"


_LIKELIHOODS = ((0.8, "very likely"), (0.5, "likely"), (0.2, "possible"), (0.0, "unlikely"))


@register.simple_tag
def cause_url(cause: dict[str, Any], policy_ids: dict[str, int]) -> str:
    """The revision that a cause names, first in its policy's history; "" for any other cause."""
    if cause.get("kind") != CauseKind.REVISION or cause["evidence"].get("policy") not in policy_ids:
        return ""
    return revision_path(policy_ids[cause["evidence"]["policy"]], cause["evidence"]["revision"])


register.filter("headline", headline)
register.filter("evidence_lines", evidence_lines)


@register.simple_tag
def accounted(share: float | None) -> SafeString:
    """The share of responses that reported cached tokens, unless all did."""
    if share is None or share >= 0.9995:
        return SafeString("")
    text = '<span class="muted small">of {} of responses, <abbr title="{}">at most</abbr></span>'
    return format_html(text, percent(share), UPPER_BOUND)


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
def money(value: float | None, currency: str = "") -> str:
    """An amount with its currency; a dash for an unknown one."""
    return NOTHING if value is None else f"{value:,.2f} {currency}".rstrip()


@register.filter
def amount(value: Amount) -> str:
    """Hours of GPUs or replicas; tokens where the rate is unknown, a dash where these are unknown too."""
    if value.tokens is None:
        return NOTHING
    return f"{value.tokens:,.0f} tokens" if value.hours is None else f"{hours_text(value.hours)} {value.unit}"


@register.filter
def hours(value: float | None) -> str:
    """Seconds as hours; below ten hours in smaller units too."""
    return NOTHING if value is None else f"{value / 3600:,.1f} h" if value >= 36_000 else seconds(value)


@register.filter
def hours_of(value: float | None, whole_h: float) -> str:
    """Seconds of replicas, of all the hours that they have, such as: 31 of 96 replica-hours."""
    return "replica-hours unknown" if value is None else f"{value / 3600:,.3g} of {whole_h:,.0f} replica-hours"


@register.filter
def whole(value: float | None) -> str:
    """A number rounded to a whole one."""
    return NOTHING if value is None else f"{value:,.0f}"


@register.filter
def interval(bounds: dict[str, float], unit: str) -> str:
    """The 95 % interval of a difference, such as -3 to +1 points."""
    return f"{100 * bounds['low']:+.0f} to {100 * bounds['high']:+.0f} {unit}".replace("-", MINUS)


@register.simple_tag
def advice_badge(name: str) -> SafeString:
    """The advice on a cache tier as a badge."""
    tones = {Advice.WORTH_IT: "good", Advice.UNCERTAIN: "warn"}
    return badge(name.replace("_", " "), tones.get(Advice(name), "idle"))


@register.simple_tag
def sweep_verdict(name: str) -> SafeString:
    """The verdict on a size as a badge."""
    return badge(*VERDICTS[Verdict(name)])


@register.simple_tag
def report_value(value: float | None, unit: str, currency: str = "") -> str:
    """A figure of a report in its unit; "unknown" for an unknown one."""
    return "unknown" if value is None else _REPORT_UNITS[unit](value, currency)


@register.simple_tag
def report_change(value: float | None, unit: str, currency: str = "") -> str:
    """A difference in a report, with its sign; of ratios in points."""
    if value is None:
        return "unknown"
    text = f"{100 * abs(value):.1f} points" if unit == "percent" else _REPORT_UNITS[unit](abs(value), currency)
    return f"{'-' if value < 0 else '+'}{text}"


_REPORT_UNITS: dict[str, Callable[[float, str], str]] = {
    "count": lambda value, _: count(value),
    "percent": lambda value, _: percent(value),
    "seconds": lambda value, _: seconds(value),
    "hours": lambda value, _: hours(value),
    "number": lambda value, _: f"{value:.2f}",
    "money": money,
}


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
