"""The text of a message, for every channel that shows one: lines of label and value, and links. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from telemetry.channels.base import Message
from telemetry.metrics.rates import NEARLY_ALL

MAX_VALUE = 500  # characters
MAX_CAUSES = 3
ZERO_WIDTH = "\u200b"
_STATES = {"firing": "FIRING", "repeated": "STILL FIRING", "acknowledged": "ACKNOWLEDGED", "resolved": "RESOLVED"}
_LINKS = (
    ("alert", "Open alert"),
    ("remedy", "Remedy"),
    ("runbook", "Runbook"),
    ("rollout", "Open rollout"),
    ("revision", "Show revision"),
    ("silence", "Silence"),
    ("pool", "Open pool"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a message in a chat: a value, often with a label, sometimes with the page it leads to."""

    label: str
    value: str
    url: str = ""

    @property
    def text(self) -> str:
        return f"{self.label}: {self.value}" if self.label else self.value


def message_lines(message: Message, site: str, *, title_limit: int | None = None) -> list[Line]:
    """What a message shows below its title: the facts of one alert; each of several with its most likely cause.

    The summary is the first line if the title is longer than ``title_limit``.
    """
    is_cut = title_limit is not None and len(title(message.data)) > title_limit
    shown = [Line("", one_line(message.data.get("summary")))] if is_cut else []
    if len(message.alerts) < 2:
        data = message.alerts[0] if message.alerts else message.data
        return [*shown, *(Line(label, value) for label, value in lines(data))]
    for alert in message.alerts:
        address = next((address for _, address in links(alert, site)), "")
        shown.append(Line("", one_line(alert.get("summary")), address))
        if causes := alert.get("causes"):
            shown.append(Line("Cause", one_line(cause_line(causes[0]))))
    return shown


def fitting(shown: Sequence[Line], compose: Callable[[Sequence[Line]], bytes], fits: Callable[[bytes], bool]) -> bytes:
    """What ``compose`` makes of as many lines as fit; a last line says how many were left out."""

    def without(omitted: int) -> bytes:
        note = [Line("", f"{omitted} more lines were left out.")] if omitted else []
        return compose([*shown[: len(shown) - omitted], *note])

    return without(bisect_left(range(len(shown)), True, key=lambda omitted: fits(without(omitted))))


def inert(text: str) -> str:
    """A text with no mention, no URL with a scheme and no tag, because a zero-width character is in each."""
    return text.replace("@", f"@{ZERO_WIDTH}").replace("://", f":{ZERO_WIDTH}//").replace("<", f"<{ZERO_WIDTH}")


def title(data: Mapping[str, Any]) -> str:
    """The state and the summary on one line."""
    state = str(data.get("state", ""))
    return f"[{_STATES.get(state, state.upper())}] {one_line(data.get('summary'))}"


def one_line(value: Any) -> str:
    """A value on one line, of limited length."""
    return cut("".join(character if character.isprintable() else " " for character in str(value or "")), MAX_VALUE)


def cut(text: str, limit: int) -> str:
    """A text of at most ``limit`` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def lines(alert: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The known facts of an alert as (label, value), each label once."""
    return [(label, one_line(value)) for label, value in _lines(alert) if value not in (None, "")]


def _lines(alert: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    labels: Mapping[str, Any] = alert.get("labels") or {}
    yield "Pool", alert.get("pool")
    yield "Task group", labels.get("group")
    yield "Replica", labels.get("replica")
    yield "Rule", alert.get("rule")
    yield "Severity", labels.get("severity")
    unit = str(alert.get("unit") or "ratio")
    for name in ("value", "limit", "baseline"):
        yield name.capitalize(), figure(alert.get(name, alert.get(f"{name}_ratio")), unit)
    detail: Mapping[str, Any] = alert.get("detail") or {}
    yield "Responses accounted for", figure(detail.get("accounted_ratio"), "ratio")
    yield "Reachable hit rate", _reachable(detail.get("reachable"))
    extra = detail.get("extra_recomputed_tokens")
    yield "Extra recomputed", f"{extra:,} tokens" if isinstance(extra, int) else None
    for label, name in (("Replicas", "top_replicas"), ("Task groups", "top_groups")):
        yield label, ", ".join(_hit_rate_of(line) for line in detail.get(name) or [])
    for number, cause in enumerate(list(alert.get("causes") or [])[:MAX_CAUSES], 1):
        yield f"Cause {number}" if number > 1 else "Cause", cause_line(cause)
    yield "Replaces the cause", alert.get("replaced_cause")
    yield from alert.get("facts") or ()  # of a message that is no alert
    yield "Started", time_text(detail.get("onset"))
    yield "Firing since", time_text(alert.get("fired_at") or alert.get("started_at"))
    yield "Resolved", time_text(alert.get("resolved_at"))


def _hit_rate_of(line: Mapping[str, Any]) -> str:
    rate, share = figure(line.get("hit_rate_ratio"), "ratio"), line.get("accounted_ratio")
    basis = f" of {figure(share, 'ratio')} of responses" if share is not None and share < NEARLY_ALL else ""
    return f"{line['name']} ({rate}{basis})" if rate else str(line["name"])


def _reachable(share: Mapping[str, Any] | None) -> str | None:
    """The reachable share with its uncertainty (two standard errors) and its time range; None if unknown."""
    if share is None:
        return None
    period = " to ".join(time_text(share[edge]) or "" for edge in ("from", "to"))
    points = 2 * share["standard_error"] * 100
    return f"{figure(share['ratio'], 'ratio')} ± {points:.1f} points, {share['requests']:,} requests, {period}"


def cause_line(cause: Mapping[str, Any]) -> str:
    """A cause, its confidence, and what to do."""
    confidence = cause.get("confidence")
    text = f" (confidence {confidence * 100:.0f} %)" if isinstance(confidence, float | int) else ""
    return f"{cause.get('summary', cause.get('kind', ''))}{text} {cause.get('advice') or ''}".strip()


def figure(value: Any, unit: str) -> str | None:
    """A number with its unit; None if unknown."""
    if not isinstance(value, float | int):
        return None
    if unit == "ratio":
        return f"{value * 100:.1f} %"
    return f"{value:.3g} s" if unit == "seconds" else f"{value:,.6g}"


def time_text(text: Any) -> str | None:
    """An ISO time as readable UTC text; None for an invalid one."""
    try:
        return f"{datetime.fromisoformat(str(text)):%Y-%m-%d %H:%M:%S} UTC" if text else None
    except ValueError:
        return None


def links(data: Mapping[str, Any], site: str) -> list[tuple[str, str]]:
    """(label, URL) of the pages of an alert; none without the site's URL."""
    paths: Mapping[str, Any] = data.get("links") or {}
    remedy = {"remedy": one_line(data["remedy"])} if data.get("remedy") else {}
    named = [(remedy.get(name, label), paths[name]) for name, label in _LINKS if paths.get(name)]
    if not named and data.get("path"):
        named = [("Open in Warmpath", data["path"])]
    urls = [(label, f"{site}{path}" if str(path).startswith("/") else str(path)) for label, path in named]
    return [(label, address) for label, address in urls if site and address.startswith(("http://", "https://"))]
