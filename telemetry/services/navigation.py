"""Search, and links: short links, a code that leads to a view with its range, zoom and filters, and read-only links.

A short link is only an address: a user who follows it must sign in and sees what their permissions allow. Only
addresses of Warmpath's own pages are accepted, so a link never redirects elsewhere. Links that were not followed for
``RETENTION`` are deleted, and so are the least recently followed ones above ``MAX_LINKS``, but none that a user saved
under a name.

A read-only link shows the wall of one pool, and nothing else, to everybody who has it, until it expires or is revoked.
Its token has 256 random bits and is shown once. The SHA-256 of it is stored, without a key, because such a token cannot
be guessed. The links of a user whose account is disabled open nothing.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any
from urllib.parse import urlsplit

from django.contrib.auth.models import User
from django.db import DatabaseError, transaction
from django.db.models import F, OuterRef, Q, QuerySet, Subquery, TextField, Value
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce, Greatest
from django.urls import Resolver404, resolve

from controlplane.access.actor import Actor, visible
from controlplane.access.rules import PUBLIC_ROUTES, RULES, may_submit, needed_role
from controlplane.errors import ConflictError, InvalidError
from controlplane.models import (
    EventKind,
    PolicyRevision,
    Pool,
    Replica,
    RevisionState,
    Role,
    Rollout,
    Router,
    RoutingPolicy,
    TaskGroup,
)
from controlplane.services.events import record_event
from controlplane.services.policies.settings import policy_catalogue
from telemetry.models import Alert, AlertRule, Channel, MetricsServer, SavedView, SharedLink, ShortLink
from telemetry.models.notification import MAX_VIEW_CHARS

MAX_RESULTS = 6  # of each source
MAX_QUERY_CHARS = 63
RETENTION = timedelta(days=400)
MAX_LINKS = 50_000
MAX_LINKS_PER_DAY = 500  # of one user
MAX_SAVED_VIEWS = 100  # of one user
MAX_SHARED_LINKS = 50  # of a pool
MIN_VALID, MAX_VALID = timedelta(hours=1), timedelta(days=30)  # of a read-only link
TOKEN_BYTES = 32
DAY = timedelta(days=1)
CODE_BYTES = 6  # random; 8 characters


@dataclass(frozen=True, slots=True)
class SearchResult:
    """An action, a row or a strategy that matches, and the route, arguments and query of its page."""

    kind: str
    name: str
    route: str
    args: tuple[str, ...] = ()
    query: str = ""
    note: str = ""


# Actions, and lists that are in no menu: what one types, and the page or form.
_ACTIONS = (
    ("Add alert rule", "telemetry:rule-new"),
    ("Add channel for notifications", "telemetry:channel-new"),
    ("Add pool", "controlplane:pool-new"),
    ("Add project", "controlplane:project-new"),
    ("Add Prometheus server", "telemetry:metrics-server-new"),
    ("Add user", "controlplane:user-new"),
    ("Change password", "account_change_password"),
    ("Compare configurations", "controlplane:configuration-compare"),
    ("Create API token", "controlplane:tokens"),
    ("Create client key", "controlplane:client-keys"),
    ("Deliveries of notifications", "telemetry:deliveries"),
    ("Limits of the fleet", "controlplane:limits"),
    ("New silence", "telemetry:silence-new"),
    ("New what-if", "telemetry:what-ifs"),
    ("Require client keys", "controlplane:admission"),
    ("Second factor", "mfa_index"),
    ("Set up heartbeat", "telemetry:heartbeat"),
    ("Sign out", "account_logout"),
    ("Silences", "telemetry:silences"),
)


@dataclass(frozen=True, slots=True)
class _Source:
    """Rows that are searched; texts are formatted with the row. One of ``words`` asks for these rows."""

    kind: str
    words: str
    rows: QuerySet[Any]
    fields: tuple[str, ...]
    route: str
    name: str
    note: str = ""
    args: tuple[str, ...] = ("{0.pk}",)
    query: str = ""
    number: str = ""  # the field of a number: 5 and #5 name its rows, r5 a revision
    needs: str = ""  # the route whose role is needed, if it is another
    only_asked: bool = False  # found by its words or a number, not by a name alone


_LIVE = PolicyRevision.objects.filter(policy=OuterRef("pk"), state=RevisionState.LIVE)
_SHOWN = Coalesce(
    Subquery(_LIVE.values_list(KT("settings__strategy"))[:1]), Value("never published"), output_field=TextField()
)
_POLICIES = RoutingPolicy.objects.annotate(strategy=_SHOWN).order_by("name")
_PUBLISHED = (
    PolicyRevision.objects.exclude(state=RevisionState.DRAFT).select_related("policy").order_by("-published_at")
)
_REVISIONS = _PUBLISHED.annotate(before=Greatest(F("number") - 1, 1))
_POOLS, _REPLICAS = Pool.objects.order_by("name"), Replica.objects.order_by("name")
_ROLLOUTS = Rollout.objects.select_related("revision__policy").order_by("-pk")
_GROUPS = TaskGroup.objects.select_related("pool").order_by("name")
_RULES = AlertRule.objects.select_related("pool").order_by("name")
_NAME, _STATE = ("name",), "controlplane:replica-state"
_SOURCES = (
    _Source("Actions", "publish edit draft", _POLICIES, _NAME, "controlplane:policy-edit",
        "Edit and publish policy {0.name}", "{0.strategy}", only_asked=True),
    _Source("Actions", "roll rollback revert", _POLICIES, _NAME, "controlplane:policy-revisions",
        "Roll back policy {0.name}", "{0.strategy}", needs="controlplane:policy-revert", only_asked=True),
    _Source("Actions", "drain", _REPLICAS.filter(state="active"), _NAME, _STATE, "Drain replica {0.name}",
        args=("{0.pk}", "draining"), only_asked=True),
    _Source("Actions", "activate undrain", _REPLICAS.exclude(state="active"), _NAME, _STATE,
        "Activate replica {0.name}", "{0.state}", ("{0.pk}", "active"), only_asked=True),
    _Source("Actions", "add new", _POOLS, _NAME, "controlplane:replica-new", "Add replica to pool {0.name}",
        only_asked=True),
    _Source("Actions", "set price costs", _POOLS, _NAME, "controlplane:pool",
        "Set the price of a GPU-hour in pool {0.name}", only_asked=True),
    _Source("Pools", "pools", _POOLS, _NAME, "telemetry:overview", "{0.name}", "{0.description}", (), "pool={0.name}"),
    _Source("Replicas", "replicas", _REPLICAS, _NAME, "telemetry:replica", "{0.name}", "{0.url}",
        ("{0.name}",)),
    _Source("Task groups", "groups task", _GROUPS, _NAME, "telemetry:group", "{0.pool.name} / {0.name}", "{0.owner}",
        ("{0.pool.name}", "{0.name}")),
    _Source("Policies", "policy policies", _POLICIES, ("name", "strategy"), "controlplane:policy", "{0.name}",
        "{0.strategy}"),
    _Source("Revisions", "revisions", _REVISIONS, ("policy__name", "reason"), "controlplane:policy-compare",
        "Revision {0.number} of {0.policy.name}", "{0.strategy}, {0.state}", ("{0.policy.pk}",),
        "from={0.before}&to={0.number}", "number", only_asked=True),
    _Source("Rollouts", "rollouts canary", _ROLLOUTS, ("revision__policy__name",), "controlplane:rollout",
        "Rollout {0.pk}: revision {0.revision.number} of {0.revision.policy.name}", "{0.state}", number="pk",
        only_asked=True),
    _Source("Alerts", "alerts firing", Alert.objects.order_by("-pk"), ("summary",), "telemetry:alert", "{0.summary}",
        "alert {0.pk}, {0.state}", number="pk"),
    _Source("Settings", "rules", _RULES, ("name", "kind"), "telemetry:rule", "{0.name}", "alert rule of {0.pool.name}"),
    _Source("Settings", "channels", Channel.objects.order_by("name"), _NAME, "telemetry:channel", "{0.name}",
        "channel"),
    _Source("Settings", "prometheus servers", MetricsServer.objects.order_by("name"), _NAME,
        "telemetry:metrics-server", "{0.name}", "Prometheus server"),
    _Source("Settings", "users", User.objects.order_by("username"), ("username",), "controlplane:user",
        "{0.username}", "user"),
    _Source("Settings", "routers", Router.objects.order_by("name"), _NAME, "controlplane:router", "{0.name}", "router"),
)  # fmt: skip
_NUMBER, _REVISION = re.compile(r"#?([0-9]{1,9})"), re.compile(r"[#r]?([0-9]{1,9})")
_FILLERS = frozenset({"back", "policy", "replica", "pool", "to"})  # said in an action before a name


def search(actor: Actor, text: str) -> list[SearchResult]:
    """Actions that the actor may do, and strategies and rows that they may see, which match. At most 20 queries."""
    words = text.lower().replace("\0", " ")[:MAX_QUERY_CHARS].split()
    if not words:
        return []
    found = [
        SearchResult("Actions", name, route)
        for name, route in _ACTIONS
        if is_match(words, name) and (route in PUBLIC_ROUTES or may_submit(actor, route))
    ]
    return [
        *found,
        *(result for source in _SOURCES for result in _rows(actor, source, words)),
        *_strategies(actor, words),
    ]


def is_match(words: Sequence[str], text: str) -> bool:
    """Whether each word begins a word of a text."""
    return all(any(part.startswith(word) for part in re.split(r"[^\w-]+", text.lower())) for word in words)


def _rows(actor: Actor, source: _Source, words: Sequence[str]) -> Iterator[SearchResult]:
    """Rows that match; at most one query. Names that begin with the first word come first."""
    others = [word for word in words if not (len(word) > 2 and is_match([word], source.words))]
    if source.only_asked and source.kind == "Actions":
        others = [word for word in others if word not in _FILLERS]
    pattern = _REVISION if source.kind == "Revisions" else _NUMBER
    numbers = {word: int(match[1]) for word in others if source.number and (match := pattern.fullmatch(word))}
    if source.only_asked and len(others) == len(words) and not numbers:
        return
    needed = needed_role(source.needs or source.route, "GET")
    rows = visible(actor.at_least(needed), source.rows) if needed else source.rows.none()
    for word in others:
        named = reduce(or_, (Q(**{f"{field}__icontains": word}) for field in source.fields))
        rows = rows.filter(Q(**{source.number: numbers[word]}) if word in numbers else named)
    found = sorted(rows[:MAX_RESULTS], key=lambda row: not str(row).lower().startswith(words[0]))
    for row in found:
        name, note, query, *args = (text.format(row) for text in (source.name, source.note, source.query, *source.args))
        yield SearchResult(source.kind, name, source.route, tuple(args), query, note)


def _strategies(actor: Actor, words: Sequence[str]) -> Iterator[SearchResult]:
    """Strategies with what they do; each opens in the draft of a policy that the actor may edit. At most one query."""
    found = [info for info in policy_catalogue() if is_match(words, f"{info.name} {info.name.replace('_', ' ')}")]
    policy = visible(actor.at_least(Role.EDITOR), RoutingPolicy.objects.filter(group=None)).first() if found else None
    route, args = ("controlplane:policy-edit", (str(policy.pk),)) if policy else ("controlplane:policies", ())
    for info in found:
        yield SearchResult("Strategies", info.name, route, args, f"strategy={info.name}", info.help.split("\n\n")[0])


@transaction.atomic
def shorten(view: str, *, by: User, now: datetime) -> ShortLink:
    """The link to a view (path and query): an existing one, or a new one. InvalidError if it is not a page."""
    check_view(view)
    link = ShortLink.objects.filter(view=view).first()
    if link is not None:
        return link
    if ShortLink.objects.filter(made_by=by, made_at__gt=now - DAY)[:MAX_LINKS_PER_DAY].count() >= MAX_LINKS_PER_DAY:
        raise ConflictError(f"You created {MAX_LINKS_PER_DAY} short links within a day. Existing links still work.")
    _delete_old_links(now)
    code = secrets.token_urlsafe(CODE_BYTES)
    return ShortLink.objects.get_or_create(
        view=view, defaults={"code": code, "made_by": by, "made_at": now, "used_at": now}
    )[0]


@transaction.atomic
def save_view(view: str, name: str, *, by: User, now: datetime) -> SavedView:
    """Give a view a name in the user's list. Of the same view, or with the same name, it replaces the former entry."""
    name = " ".join(name.split())
    limit = SavedView._meta.get_field("name").max_length  # noqa: SLF001 - Django's documented name
    if not (name.isprintable() and 0 < len(name) <= (limit or 0)):
        raise InvalidError("$.name", f"expected a name of at most {limit} characters")
    User.objects.select_for_update().get(pk=by.pk)
    link = shorten(view, by=by, now=now)
    SavedView.objects.filter(Q(name=name) | Q(link=link), user=by).delete()
    if SavedView.objects.filter(user=by).count() >= MAX_SAVED_VIEWS:
        raise ConflictError(f"You have {MAX_SAVED_VIEWS} saved views: remove one first.")
    return SavedView.objects.create(user=by, link=link, name=name)


def saved_views(user: User, words: Sequence[str]) -> list[SavedView]:
    """The user's saved views that match, at most ``MAX_RESULTS``. One query."""
    rows = SavedView.objects.filter(user=user).select_related("link")
    return [row for row in rows if is_match(words, f"view {row.name}")][:MAX_RESULTS]


def follow(code: str, now: datetime) -> ShortLink | None:
    """The link of a code, marked as used. One query, and one write a day."""
    link = ShortLink.objects.select_related("made_by").filter(code=code).first()
    if link is not None and link.used_at < now - DAY:
        ShortLink.objects.filter(pk=link.pk).update(used_at=now)
    return link


def check_view(view: str) -> None:
    """InvalidError unless this is the address of one of Warmpath's pages."""
    if len(view) > MAX_VIEW_CHARS or not (view.isascii() and view.isprintable()):
        raise InvalidError(
            "$.view", f"expected the address of a page, of at most {MAX_VIEW_CHARS} printable characters"
        )
    try:
        name = resolve(urlsplit(view).path).view_name if view[:1] == "/" and view[:2] not in {"//", "/\\"} else ""
    except (Resolver404, ValueError):
        name = ""
    is_page = "GET" in (RULES[name].roles if name in RULES else ()) and name.startswith(("telemetry:", "controlplane:"))
    if not is_page:
        raise InvalidError("$.view", "expected the address of a Warmpath page, beginning with /")


def _delete_old_links(now: datetime) -> None:
    unsaved = ShortLink.objects.filter(saved=None)
    unsaved.filter(used_at__lt=now - RETENTION).delete()
    excess = ShortLink.objects.count() - MAX_LINKS + 1
    if excess > 0:
        oldest = unsaved.order_by("used_at", "pk").values("pk")[:excess]
        ShortLink.objects.filter(pk__in=oldest).delete()


@transaction.atomic
def create_shared_link(pool: Pool, query: str, *, valid: timedelta, by: User, now: datetime) -> tuple[SharedLink, str]:
    """A link to a pool's wall with the time range of ``query``, and its token, which is not stored."""
    if not MIN_VALID <= valid <= MAX_VALID:
        raise InvalidError("$.valid", "expected 1 hour to 30 days")
    Pool.objects.select_for_update().get(pk=pool.pk)
    SharedLink.objects.filter(expires_at__lte=now).delete()
    if SharedLink.objects.filter(pool=pool).count() >= MAX_SHARED_LINKS:
        raise ConflictError(f"Pool {pool.name} has {MAX_SHARED_LINKS} read-only links: revoke one first.")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    link = SharedLink.objects.create(
        pool=pool, digest=_link_digest(token), query=query, made_by=by, made_at=now, expires_at=now + valid
    )
    summary = f"Read-only link {link} was created. It expires at {link.expires_at:%Y-%m-%d %H:%M} UTC."
    detail = {"range": query, "expires_at": link.expires_at.isoformat()}
    record_event(EventKind.LINK_SHARED, summary, pool=pool, by=by, detail=detail)
    return link, token


@transaction.atomic
def revoke_shared_link(link: SharedLink, *, by: User) -> None:
    """End a link now."""
    summary = f"Read-only link {link} was revoked."
    if SharedLink.objects.filter(pk=link.pk).delete()[0]:
        record_event(EventKind.LINK_REVOKED, summary, pool=link.pool, by=by)


def shared_links(now: datetime) -> QuerySet[SharedLink]:
    """The links that have not expired, also of users whose accounts are disabled."""
    return SharedLink.objects.filter(expires_at__gt=now).select_related("pool", "made_by").order_by("expires_at")


def find_shared_link(token: str, now: datetime) -> SharedLink | None:
    """The valid link of a token, marked as opened. One query, and one write a minute, which may fail: a full disk."""
    link = shared_links(now).filter(digest=_link_digest(token), made_by__is_active=True).first()
    if link is not None and (link.opened_at is None or now - link.opened_at >= timedelta(minutes=1)):
        with suppress(DatabaseError), transaction.atomic():
            SharedLink.objects.filter(pk=link.pk).update(opened_at=now)
    return link


def _link_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
