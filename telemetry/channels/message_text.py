"""What a message says to people, for every channel that has a text: lines of label and value, and links. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from telemetry.metrics.rates import ACCOUNTED

LONGEST = 500  # characters of one value
MOST_CAUSES = 3
_TAGS = {"firing": "FIRING", "repeated": "STILL FIRING", "acknowledged": "ACKNOWLEDGED", "resolved": "RESOLVED"}
_LINKS = (("alert", "Open the alert"), ("silence", "Silence it"), ("pool", "Open the pool"))


def title(data: Mapping[str, Any]) -> str:
    """One line: the state and the summary."""
    state = str(data.get("state", ""))
    return f"[{_TAGS.get(state, state.upper())}] {one_line(data.get('summary'))}"


def one_line(value: Any) -> str:
    """A value on one line, of bounded length."""
    line = "".join(character if character.isprintable() else " " for character in str(value or ""))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def lines(alert: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What an operator asks first of one alert, as (label, value), each label once; what is unknown is left out."""
    return [(label, one_line(value)) for label, value in _lines(alert) if value not in (None, "")]


def _lines(alert: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    labels: Mapping[str, Any] = alert.get("labels") or {}
    yield "Pool", alert.get("pool")
    yield "Task group", labels.get("group")
    yield "Replica", labels.get("replica")
    yield "Rule", alert.get("rule")
    yield "Severity", labels.get("severity")
    unit = str(alert.get("unit") or "ratio")
    for label, name in (("Value", "value"), ("Limit", "limit"), ("Baseline", "baseline")):
        yield label, figure(alert.get(name, alert.get(f"{name}_ratio")), unit)
    detail: Mapping[str, Any] = alert.get("detail") or {}
    yield "Responses accounted for", figure(detail.get("accounted_ratio"), "ratio")
    yield "Reachable", _reachable(detail.get("reachable"))
    yield from _places(detail)
    for place, cause in enumerate(list(alert.get("causes") or [])[:MOST_CAUSES], 1):
        yield f"Cause {place}" if place > 1 else "Cause", cause_line(cause)
    yield "Began", moment(detail.get("onset"))
    yield "Since", moment(alert.get("fired_at") or alert.get("started_at"))
    yield "Ended", moment(alert.get("resolved_at"))


def _places(detail: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    extra = detail.get("extra_recomputed_tokens")
    yield "Computed anew", f"{extra:,} tokens" if isinstance(extra, int) else None
    for label, name in (("Replicas", "top_replicas"), ("Task groups", "top_groups")):
        yield label, ", ".join(_place(one) for one in detail.get(name) or [])


def _place(line: Mapping[str, Any]) -> str:
    rate, share = figure(line.get("hit_rate_ratio"), "ratio"), line.get("accounted_ratio")
    basis = f" of {figure(share, 'ratio')} of responses" if share is not None and share < ACCOUNTED else ""
    return f"{line['name']} ({rate}{basis})" if rate else str(line["name"])


def _reachable(share: Mapping[str, Any] | None) -> str | None:
    """The reachable share with its uncertainty (two standard errors) and its time range; None where it is unknown."""
    if share is None:
        return None
    span = " to ".join(moment(share[edge]) or "" for edge in ("from", "to"))
    points = 2 * share["standard_error"] * 100
    return f"{figure(share['ratio'], 'ratio')} ± {points:.1f} points, {share['requests']:,} requests, {span}"


def cause_line(cause: Mapping[str, Any]) -> str:
    """What it is, how sure that is, and what to do."""
    confidence = cause.get("confidence")
    sure = f" ({confidence * 100:.0f} % sure)" if isinstance(confidence, float | int) else ""
    return f"{cause.get('summary', cause.get('kind', ''))}{sure} {cause.get('advice') or ''}".strip()


def figure(value: Any, unit: str) -> str | None:
    """A figure with its unit; None where it is unknown."""
    if not isinstance(value, float | int):
        return None
    if unit == "ratio":
        return f"{value * 100:.1f} %"
    return f"{value:.3g} s" if unit == "seconds" else f"{value:,.6g}"


def moment(text: Any) -> str | None:
    """A moment as people read it, in UTC."""
    try:
        return f"{datetime.fromisoformat(str(text)):%Y-%m-%d %H:%M:%S} UTC" if text else None
    except ValueError:
        return None


def links(data: Mapping[str, Any], site: str) -> list[tuple[str, str]]:
    """(label, URL) of the pages of an alert; none where it is not known what the site is called."""
    found: Mapping[str, Any] = data.get("links") or {}
    named = [(label, found[name]) for name, label in _LINKS if found.get(name)]
    if not named and data.get("path"):
        named = [("Open in Warmpath", data["path"])]
    return [(label, f"{site}{path}") for label, path in named if site and str(path).startswith("/")]
