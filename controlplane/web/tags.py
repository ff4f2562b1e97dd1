"""Template filters and tags that every page may use: figures with their units, times, badges.

Unknown stays unknown: a figure that is None becomes an en dash, never 0.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from django import template
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from controlplane.access.actor import actor_of
from controlplane.access.rules import needed_role, permits
from controlplane.accounts.sign_in_methods import is_connected, provider_name, sign_in_url

register = template.Library()
NOTHING = "\u2013"  # an en dash

_TONES = {
    "up": "good", "active": "good", "live": "ember", "complete": "good", "ack": "good", "delivered": "good",
    "resolved": "good", "in sync": "good", "enabled": "good", "ok": "good", "sent": "good",
    "starting": "warn", "draining": "warn", "stale": "warn", "pending": "warn", "progressing": "warn", "behind": "warn",
    "unknown": "",
    "draft": "warn", "proposed": "ember", "not_ready": "", "terminating": "warn", "missing": "warn", "holding": "warn",
    "failing": "bad", "new": "", "paused": "", "waiting": "warn", "muted": "",
    "down": "bad", "firing": "bad", "nack": "bad", "failed": "bad", "lost": "bad", "refused": "bad", "dead": "bad",
    "unreachable": "bad",
    "cold": "cold",
    "trial": "ember", "awaiting_approval": "warn", "rolled_back": "bad", "acknowledged": "good",
    "critical": "bad", "warning": "warn", "info": "", "inhibited": "", "silence": "", "restart": "cold",
    "fired": "bad", "opened": "warn",
    "passed": "good", "breached": "bad", "inconclusive": "warn",
    "verified": "good", "expired": "warn", "unsigned": "warn", "unchecked": "warn", "other key": "warn",
}  # fmt: skip


_EVENT_TONES = {
    "source_failing": "bad", "source_recovered": "good", "source_holding": "bad", "replicas_missing": "cold",
    "replica_down": "bad", "audit_broken": "bad", "alert_firing": "bad", "config_refused": "bad", "router_lost": "bad",
    "replica_up": "good", "alert_resolved": "good", "config_applied": "good", "router_joined": "good",
    "replica_ejected": "bad", "replica_unreachable": "bad", "replica_readmitted": "good", "replica_reachable": "good",
    "replica_restarted": "cold", "policy_published": "ember",
    "rollout_started": "ember", "rollout_widened": "ember", "rollout_completed": "good", "rollout_rolled_back": "bad",
    "rollout_held": "bad",
}  # fmt: skip


# What a consequence of a change is called on a badge, and its colour: cold is what a cache becomes.
_IMPACTS = {
    "reset": ("cold caches", "cold"), "move": ("some move", "warn"), "refuse": ("who is let in", "warn"),
    "steer": ("homes stay", "good"), "quiet": ("nothing moves", ""),
}  # fmt: skip


@register.filter
def percent(ratio: float | None) -> str:
    """A ratio as per cent, 0.634 as 63.4 %."""
    return NOTHING if ratio is None else f"{ratio * 100:.1f} %"


@register.filter
def seconds(value: float | None) -> str:
    """Seconds in the unit that reads best: 48 ms, 1.30 s, 2 min 5 s, 3 h 20 min."""
    if value is None:
        return NOTHING
    if 0 < value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.0f} s" if value == int(value) else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    return _clock(round(value))


def _clock(total: int) -> str:
    for size, unit, below, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= size:
            rest = total % size // below
            return f"{total // size} {unit} {rest} {smaller}" if rest else f"{total // size} {unit}"
    return f"{total} s"


@register.filter
def count(value: float | None) -> str:
    """A number of things, 12,345; a fraction keeps a digit while it is small."""
    if value is None:
        return NOTHING
    return f"{value:,.1f}" if value < 10 and value != int(value) else f"{value:,.0f}"


@register.filter
def compact(value: float | None) -> str:
    """A number in at most four characters of digits: 1.2 k, 3.4 M."""
    if value is None:
        return NOTHING
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.1f} {letter}"
    return count(value)


@register.filter
def setting(value: Any) -> str:
    """A setting's value as an operator writes it; an en dash where there is none."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


@register.filter
def readable(name: Any) -> str:
    """A technical name as words: prefix_hash as prefix hash."""
    return str(name).replace("_", " ")


@register.filter
def claims(match: dict[str, list[str]] | None) -> str:
    """What a task group is found by beside its name: one of a kind by itself, several by their number."""
    said = []
    for field, values in (match or {}).items():
        noun = readable(field).removesuffix("es" if field.endswith(("prefixes", "hashes")) else "s")
        if values:
            said.append(f"{noun} {values[0]}" if len(values) == 1 else f"{len(values)} {readable(field)}")
    return ", ".join(said)


@register.filter
def shifted(at: datetime, minutes: int) -> str:
    """A moment so many minutes later (earlier where negative), as filters in an address take it."""
    return quote((at + timedelta(minutes=minutes)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))


@register.filter
def code_words(text: str) -> SafeString:
    """A document's paragraph, `names` in it set as code."""
    pieces = text.split("`")
    return format_html_join(
        "", "{}", (((format_html("<code>{}</code>", one) if at % 2 else one),) for at, one in enumerate(pieces))
    )


def spreadsheet_safe(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


@register.simple_tag(takes_context=True)
def may(context: template.Context, route: str, project_id: int | None = None) -> bool:
    """Whether the reader could go through with what an address does: in a project, or at all where it names none."""
    actor, needed = actor_of(context["request"]), needed_role(route, "POST") or needed_role(route, "GET")
    if needed is None:
        return False
    return permits(actor, route, needed) if project_id is None else actor.may(needed, project_id)


@register.filter
def tone(word: Any) -> str:
    """The badge colour that repeats what a word says."""
    return _TONES.get(str(word).lower(), "")


@register.filter
def event_tone(kind: str) -> str:
    """The badge colour of a kind of event: what went wrong, what went well, what changed how requests are placed."""
    return _EVENT_TONES.get(kind, "")


@register.filter
def impact_words(impact: str) -> str:
    """What a consequence of a change does, in two words."""
    return _IMPACTS.get(impact, (impact, ""))[0]


@register.filter
def impact_tone(impact: str) -> str:
    """The badge colour that repeats it."""
    return _IMPACTS.get(impact, ("", ""))[1]


@register.filter
def unlocalized(value: float | None) -> str:
    """A number as style sheets read it; 0 where there is none."""
    return f"{value or 0:.4f}"


@register.simple_tag
def badge(word: Any, tone_name: str | None = None) -> SafeString:
    """A word in a badge; the word says it, the colour and the mark repeat it."""
    return format_html(
        '<span class="badge {}">{}</span>', tone(word) if tone_name is None else tone_name, readable(word)
    )


@register.simple_tag
def ago(at: datetime | None, none: str = "never") -> SafeString | str:
    """A time with how long ago it was; scripts keep that fresh, without them the time itself stands there."""
    if at is None:
        return none
    shown = timezone.localtime(at)
    day = "" if shown.date() == timezone.localdate() else f"{shown:%d %b} "
    stamp = shown.isoformat(timespec="seconds")
    return format_html(
        '<time datetime="{}" title="{}" data-ago>{}{} UTC</time>', stamp, stamp, day, f"{shown:%H:%M:%S}"
    )


_MOMENTS = {
    "day": "%d %b %Y",
    "minute": "%d %b %H:%M",
    "long": "%-d %b %Y %H:%M",
    "second": "%H:%M:%S",
    "full": "%d %b %Y %H:%M:%S",
}


@register.simple_tag
def moment(at: datetime | None, form: str = "minute", none: str = NOTHING) -> SafeString | str:
    """A time to the day, minute or second, in UTC, which scripts retell in the reader's zone; it always says which."""
    if at is None:
        return none
    shown = at.astimezone(UTC)
    stamp = shown.isoformat(timespec="seconds")
    return format_html('<time datetime="{}" data-at="{}">{} UTC</time>', stamp, form, f"{shown:{_MOMENTS[form]}}")


@register.simple_tag(takes_context=True)
def query_with(context: template.Context, key: str, value: str) -> str:
    """The page's query string with one parameter set, or left out where its value is empty."""
    params = context["request"].GET.copy()
    params.pop(key, None)
    if value:
        params[key] = value
    return f"?{params.urlencode()}"


@register.simple_tag(takes_context=True)
def sort_link(context: template.Context, key: str, label: str, *, first: str = "asc") -> SafeString:
    """A column's heading as a plain link that sorts by it, and the other way round when it already does."""
    now = context["sort"]
    descending = now.descending if now.key == key else first == "asc"
    params = context["request"].GET.copy()
    params[context.get("sort_param", "sort")] = key if descending else f"-{key}"
    arrow = "" if now.key != key else (" ↓" if now.descending else " ↑")
    return format_html('<a href="?{}">{}<span aria-hidden="true">{}</span></a>', params.urlencode(), label, arrow)


@register.simple_tag(takes_context=True)
def aria_sort(context: template.Context, key: str) -> SafeString:
    """The attribute that tells how a column is sorted; nothing where it is not."""
    now = context["sort"]
    if now.key != key:
        return SafeString("")
    return SafeString('aria-sort="descending"' if now.descending else 'aria-sort="ascending"')


@register.simple_tag(takes_context=True)
def single_sign_on(context: Any, process: str = "login") -> dict[str, str] | None:
    """The identity provider's name and where going there begins; None where there is none."""
    if not provider_name():
        return None
    after = context["request"].GET.get("next", "")
    return {"name": provider_name(), "url": sign_in_url(process=process, **({"next": after} if after else {}))}


@register.simple_tag(takes_context=True)
def connected_to_provider(context: Any) -> bool:
    """Whether whoever is signed in can sign in at the identity provider. One query."""
    return is_connected(context["request"].user)
