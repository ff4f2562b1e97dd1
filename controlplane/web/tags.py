"""Template filters and tags of all pages: figures with their units, times, badges, links.

An unknown figure (None) is shown as an en dash, never as 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from django import template
from django.forms import BaseForm
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from controlplane.access.actor import actor_of
from controlplane.access.rules import may_submit
from controlplane.accounts.sign_in_methods import is_connected, provider_name, sign_in_url
from controlplane.services.policies.settings import policy_catalogue

register = template.Library()
NOTHING = "\u2013"  # an en dash
MINUS = "\u2212"

_TONES = {  # of badges, by the stored or shown word
    "good": (
        "up", "active", "complete", "ack", "delivered", "resolved", "in sync", "enabled", "ok", "sent", "acknowledged",
        "passed", "verified", "sharing",
    ),
    "ember": ("live", "proposed", "canary"),
    "warn": (
        "starting", "draining", "stale", "pending", "progressing", "behind", "draft", "terminating", "missing",
        "holding", "waiting", "awaiting_approval", "warning", "inconclusive", "no_verdict", "expired", "unsigned",
        "unchecked", "other key",
    ),
    "bad": (
        "failing", "down", "firing", "nack", "failed", "lost", "silent", "rejected", "dead", "unreachable",
        "rolled_back", "critical", "fired", "cut off", "apart",
    ),
    "cold": ("cold", "restart"),
}  # fmt: skip
_TONE_OF = {word: tone_name for tone_name, words in _TONES.items() for word in words}

_EVENT_TONES = {
    "source_failing": "bad", "source_recovered": "good", "source_holding": "bad", "replicas_missing": "cold",
    "replica_down": "bad", "audit_broken": "bad", "alert_firing": "bad", "config_rejected": "bad", "router_lost": "bad",
    "replica_up": "good", "alert_resolved": "good", "config_applied": "good", "router_joined": "good",
    "replica_ejected": "bad", "replica_unreachable": "bad", "replica_readmitted": "good", "replica_reachable": "good",
    "replica_restarted": "cold", "policy_published": "ember",
    "rollout_started": "ember", "rollout_promoted": "ember", "rollout_completed": "good", "rollout_rolled_back": "bad",
    "rollout_held": "bad", "prediction_overridden": "bad",
}  # fmt: skip

# Stored words that pages show as another.
_WORDS = {
    "live": "active",
    "holding": "on hold", "dead": "failed",
}  # fmt: skip

# Transitions of a rollout, as its history shows them.
_TRANSITIONS = {
    "publish": "Published", "approve": "Approved", "start": "Acknowledged by the first router",
    "promote": "Promoted", "pause": "Paused", "resume": "Resumed",
    "hold": "Put on hold", "complete": "Active on every router", "abort": "Aborted",
    "supersede": "Superseded", "roll_back": "Rolled back",
}  # fmt: skip

_ACRONYMS = {
    "api": "API",
    "gpu": "GPU",
    "gpus": "GPUs",
    "id": "ID",
    "kv": "KV",
    "lora": "LoRA",
    "ttft": "TTFT",
    "ttl": "TTL",
    "url": "URL",
}

# The consequences of a change: words and colour of the badge.
_IMPACTS = {
    "cold_caches": ("cold caches", "cold"), "move": ("prefixes move", "warn"), "access": ("access", "warn"),
    "placement": ("placement only", "good"), "none": ("no effect", ""),
}  # fmt: skip


@register.filter
def percent(ratio: float | None, digits: int = 1) -> str:
    """A ratio as per cent, 0.634 as 63.4 %."""
    return NOTHING if ratio is None else f"{ratio * 100:.{digits}f} %"


@register.filter
def points(ratio: float | None) -> str:
    """A difference of two ratios in percentage points, 0.031 as 3.1 points."""
    return NOTHING if ratio is None else f"{ratio * 100:.1f} points"


@register.filter
def signed_points(ratio: float | None) -> str:
    """A difference of two ratios with its sign, -0.031 as minus 3.1 points."""
    return NOTHING if ratio is None else f"{ratio * 100:+.1f} points".replace("-", MINUS)


@register.filter
def seconds(value: float | None, beside: float | None = None) -> str:
    """Seconds in a readable unit: 48 ms, 1.30 s, 2 min 5 s, 3 h 20 min.

    ``beside`` a second or more, 0.1 s and more are not in ms.
    """
    if value is None:
        return NOTHING
    if 0 < value < (0.1 if (beside or 0) >= 1 else 1):
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
    """A count, 12,345; a fraction below 10 keeps one digit."""
    if value is None:
        return NOTHING
    return f"{value:,.1f}" if value < 10 and value != int(value) else f"{value:,.0f}"


@register.filter
def compact(value: float | None) -> str:
    """A number with at most four digits: 12.3 k, 3.4 M."""
    if value is None:
        return NOTHING
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.1f} {letter}"
    return count(value)


@register.filter
def byte_size(value: float | None) -> str:
    """Bytes with at most four digits: 320 KiB, 1.2 GiB."""
    if value is None:
        return NOTHING
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            scaled = value / 1024**power
            return (
                f"{scaled:,.1f} {unit}"
                if scaled < 100 and round(scaled, 1) != round(scaled)
                else f"{scaled:,.0f} {unit}"
            )
    return f"{value:,.0f} B"


@register.filter
def of_tokens(bytes_per_token: int | None, tokens: float | None) -> float | None:
    """Bytes of some tokens; None if either is unknown."""
    return None if bytes_per_token is None or tokens is None else bytes_per_token * tokens


@register.filter
def setting(value: Any) -> str:
    """A setting's value as a user would type it."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


@register.filter
def readable(name: Any) -> str:
    """A technical name as words: max_ttft_p95_growth as max TTFT p95 growth."""
    return " ".join(_ACRONYMS.get(word, word) for word in str(name).replace("_", " ").split(" "))


@register.filter
def strategy_help(name: str) -> str:
    """What a strategy does, in one sentence; "" for one that this release does not know."""
    return next((info.help for info in policy_catalogue() if info.name == name), "")


@register.filter
def transition_words(name: str) -> str:
    """A transition of a rollout's history, in the past tense."""
    return _TRANSITIONS.get(name, readable(name).capitalize())


@register.filter
def claims(match: dict[str, list[str]] | None) -> str:
    """What a task group matches besides its name: ``model llama, 3 tier1 hashes``."""
    parts = []
    for field, values in (match or {}).items():
        noun = readable(field).removesuffix("es" if field.endswith(("prefixes", "hashes")) else "s")
        if values:
            parts.append(f"{noun} {values[0]}" if len(values) == 1 else f"{len(values)} {readable(field)}")
    return ", ".join(parts)


@register.filter
def shifted(at: datetime, minutes: int) -> str:
    """A time so many minutes later (earlier if negative), for a filter in a URL."""
    return quote((at + timedelta(minutes=minutes)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))


@register.filter
def code_words(text: str) -> SafeString:
    """A paragraph of a document; `names` in backticks become code."""
    parts = enumerate(text.split("`"))
    return format_html_join("", "{}", ((format_html("<code>{}</code>", part) if i % 2 else part,) for i, part in parts))


def spreadsheet_safe(text: str) -> str:
    """A text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


@register.simple_tag(takes_context=True)
def may(context: template.Context, route: str, project_id: int | None = None) -> bool:
    """Whether the user may submit a page, in one project or, without a project, in any."""
    return may_submit(actor_of(context["request"]), route, project_id)


@register.simple_tag(takes_context=True)
def error_prefix(context: template.Context) -> str:
    """The beginning of the title of a page after a failed form or action: a screen reader says the title first."""
    failed = any(_problems(context))
    if stored := context.get("messages"):
        failed = failed or any(message.level_tag == "error" for message in stored)
        stored.used = False  # only looked at: the page shows them
    return "Error: " if failed else ""


@register.inclusion_tag("components/error_summary.html", takes_context=True)
def error_summary(context: template.Context) -> dict[str, Any]:
    """All errors of the page's forms, each linked to its field. It has the focus and is announced."""
    return {"problems": list(_problems(context))}


def _problems(context: template.Context) -> Iterator[tuple[str, str, str]]:
    values: Iterable[Any] = context.flatten().values()
    for form in {id(value): value for value in values if isinstance(value, BaseForm) and value.errors}.values():
        for name, errors in form.errors.items():
            field = form[name] if name in form.fields and not form[name].is_hidden else None
            label, href = (str(field.label), field.id_for_label or field.auto_id) if field else ("", "")
            for text in errors:
                yield label, href, str(text)


@register.filter
def tone(word: Any) -> str:
    """The colour of a badge."""
    return _TONE_OF.get(str(word).lower(), "")


@register.filter
def event_tone(kind: str) -> str:
    """The colour of an event's badge."""
    return _EVENT_TONES.get(kind, "")


@register.filter
def impact_words(impact: str) -> str:
    """The consequence of a change in a few words."""
    return _IMPACTS.get(impact, (impact, ""))[0]


@register.filter
def impact_tone(impact: str) -> str:
    """The colour of a consequence's badge."""
    return _IMPACTS.get(impact, ("", ""))[1]


# Marks in User-Agent headers; the first one counts, because browsers name those that they are compatible with.
_BROWSERS = (("Edg/", "Edge"), ("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"), ("Safari/", "Safari"))
_SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iOS"),
    ("iPad", "iPadOS"),
    ("Windows", "Windows"),
    ("Mac OS X", "macOS"),
    ("Linux", "Linux"),
)


@register.filter
def browser(agent: str) -> str:
    """Browser and system of a User-Agent header if it names known ones, else its beginning."""
    name, system = (next((word for mark, word in known if mark in agent), "") for known in (_BROWSERS, _SYSTEMS))
    return f"{name} on {system}" if name and system else agent[:80]


@register.filter
def unlocalized(value: float | None) -> str:
    """A number as style sheets read it; 0 where there is none."""
    return f"{value or 0:.4f}"


@register.simple_tag
def badge(word: Any, tone_name: str | None = None) -> SafeString:
    """A stored word as a badge."""
    colour = tone(word) if tone_name is None else tone_name
    return format_html('<span class="badge {}">{}</span>', colour, readable(_WORDS.get(str(word), word)))


@register.simple_tag
def ago(at: datetime | None, none: str = "never", *, lasting: bool = False) -> SafeString | str:
    """A time that scripts replace by how long ago it was (``lasting``: for how long); else, the time in UTC."""
    if at is None:
        return none
    local = timezone.localtime(at)
    day = "" if local.date() == timezone.localdate() else f"{local:%d %b} "
    stamp = local.isoformat(timespec="seconds")
    form, since = ("For", "Since ") if lasting else ("", "")
    text = f"{since}{day}{local:%H:%M:%S} UTC"
    return format_html('<time datetime="{}" title="{}" data-ago="{}">{}</time>', stamp, stamp, form, text)


_MOMENTS = {
    "day": "%d %b %Y",
    "minute": "%d %b %H:%M",
    "long": "%-d %b %Y %H:%M",
    "second": "%H:%M:%S",
    "full": "%d %b %Y %H:%M:%S",
}


@register.simple_tag
def moment(at: datetime | None, form: str = "minute", none: str = NOTHING) -> SafeString | str:
    """A time in UTC, which scripts convert to the reader's time zone. ``form`` is a key of ``_MOMENTS``."""
    if at is None:
        return none
    utc = at.astimezone(UTC)
    stamp = utc.isoformat(timespec="seconds")
    return format_html('<time datetime="{}" data-at="{}">{} UTC</time>', stamp, form, f"{utc:{_MOMENTS[form]}}")


@register.simple_tag(takes_context=True)
def query_with(context: template.Context, key: str, value: Any) -> str:
    """The page's query string with one parameter replaced, or removed if its value is empty."""
    params = context["request"].GET.copy()
    params.pop(key, None)
    if value:
        params[key] = str(value)
    return f"?{params.urlencode()}"


@register.simple_tag(takes_context=True)
def sort_link(context: template.Context, key: str, label: str) -> SafeString:
    """A column heading that sorts by the column, and reverses the order if it already does."""
    sort = context["sort"]
    is_current, descending = sort.key == key, sort.key == key and sort.descending
    params = context["request"].GET.copy()
    params.pop("page", None)  # of the order before
    params[context.get("sort_param", "sort")] = f"-{key}" if is_current and not descending else key
    arrow = (" ↓" if descending else " ↑") if is_current else ""
    return format_html('<a href="?{}">{}<span aria-hidden="true">{}</span></a>', params.urlencode(), label, arrow)


@register.simple_tag(takes_context=True)
def aria_sort(context: template.Context, key: str) -> SafeString:
    """The ``aria-sort`` attribute of a column."""
    sort = context["sort"]
    if sort.key != key:
        return SafeString("")
    return SafeString('aria-sort="descending"' if sort.descending else 'aria-sort="ascending"')


@register.simple_tag(takes_context=True)
def single_sign_on(context: Any, process: str = "login") -> dict[str, str] | None:
    """The identity provider's name and sign-in URL; None if none is configured."""
    if not provider_name():
        return None
    after = context["request"].GET.get("next", "")
    return {"name": provider_name(), "url": sign_in_url(process=process, **({"next": after} if after else {}))}


@register.simple_tag(takes_context=True)
def connected_to_provider(context: Any) -> bool:
    """Whether the user can sign in at the identity provider. One query."""
    return is_connected(context["request"].user)
