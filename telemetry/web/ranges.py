"""The state of a page, all of which is in its URL: subject, time range and chart views.

``?range=90m`` is a live range, which ends now and moves; ``?from=...&to=...`` (UTC) is a fixed one. Tiles cover the
range, which is cheap because long ranges are read from rollups, and say so; what is up, waiting or active is as of the
end of the range. Tables of a live range cover at most the last 15 minutes, because they have a row for each replica.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from django.conf import settings
from django.http import HttpRequest, QueryDict
from django.urls import reverse
from django.utils import timezone

from controlplane.access.actor import actor_of
from controlplane.models import Event, Pool, Replica
from controlplane.web.base import viewable
from controlplane.web.navigation import carried
from controlplane.web.tags import seconds
from telemetry.metrics.windows import Window, choose_step
from telemetry.services.figures.overview import Kind, Subject
from telemetry.services.figures.series import fit_window
from telemetry.storage.replica_facts import last_removal

CHART_POINTS = 100  # per line; more show noise rather than the trend
MAX_POINTS = 720  # of ``?points=``
PRESETS = ("15m", "1h", "6h", "24h", "7d", "30d")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}  # seconds
LENGTH = re.compile(r"([1-9][0-9]{0,6})([smhdw])")
DEFAULT = "15m"
MIN_RANGE_S = 60.0
MAX_TABLE_S = 900.0
MAX_RANGE_S = 90 * 86_400.0
MAX_REFRESH_S = 60
FIRST_YEAR = 1970  # figures of times before the first year cannot be computed
SHOWN_DEFAULT = "Showing the last 15 minutes."
OF_POOL = ("pool", "group", "replica", "below", "cursor")  # parameters that another pool leaves without a meaning
NO_GROUP = "-"  # in URLs: requests without a task group; no group can have this name


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A time range. ``key`` is a length such as 15m, or "" for a fixed range."""

    key: str
    window: Window
    error: str = ""  # why the requested range is not shown

    @property
    def live(self) -> bool:
        """Whether the range ends now."""
        return bool(self.key)

    @property
    def label(self) -> str:
        """The range in words, such as: last 15 min."""
        return f"last {seconds(length_s(self.key))}" if self.live else "in this range"

    @property
    def page_refresh_s(self) -> int:
        """Refresh interval of tiles and tables: longer for a range of hours, in which little changes in seconds."""
        return int(min(max(self.window.length_s / 1440, 5), MAX_REFRESH_S)) if self.live else 0

    @property
    def table(self) -> Window:
        """The window of tables."""
        return self._last(MAX_TABLE_S) if self.live and self.window.length_s > MAX_TABLE_S else self.window

    @property
    def tiles(self) -> Window:
        """The window of tiles: that of tables where the range is not longer, so that both share their queries."""
        return self.table if (length_s(self.key) or MAX_RANGE_S) <= MAX_TABLE_S else self.window

    @property
    def refresh_s(self) -> int:
        """Refresh interval of charts: one step of the chart, at most a minute."""
        return int(min(max(self.window.step_s, settings.SCRAPE_INTERVAL_S), MAX_REFRESH_S))

    def _last(self, seconds: float) -> Window:
        return Window(self.window.end - timedelta(seconds=seconds), self.window.end, self.window.step_s)


def requested_range(params: QueryDict, default: str = DEFAULT) -> TimeRange:
    """The range of a URL, without one the ``default``; 15 minutes with an error message if it is invalid."""
    if params.get("from") or params.get("to"):
        return _fixed_range(params)
    key = params.get("range", "").strip() or default
    seconds = length_s(key)
    if seconds is None:
        return _last_range(DEFAULT, f"{key!r} is not a range; use 90m, 6h or 3d. {SHOWN_DEFAULT}")
    if not MIN_RANGE_S <= seconds <= MAX_RANGE_S:
        return _last_range(DEFAULT, f"A range must be between one minute and 90 days. {SHOWN_DEFAULT}")
    return _last_range(key, points=_points(params))


def length_s(text: str) -> float | None:
    """Seconds of a length such as 90m or 3d; None for any other text."""
    match = LENGTH.fullmatch(text)
    return float(int(match[1]) * UNITS[match[2]]) if match else None


def _points(params: QueryDict) -> int:
    text = params.get("points", "")
    return min(max(int(text), 10), MAX_POINTS) if text.isascii() and text.isdigit() and len(text) < 6 else CHART_POINTS


def _last_range(key: str, error: str = "", points: int = CHART_POINTS) -> TimeRange:
    seconds = length_s(key) or 0.0
    step = choose_step(seconds, shortest_s=settings.SCRAPE_INTERVAL_S, points=points)
    return TimeRange(key, fit_window(Window.last(seconds, until=timezone.now(), step_s=step)), error)


def _fixed_range(params: QueryDict) -> TimeRange:
    now = timezone.now()
    try:
        end = _time(params.get("to", "")) or now
        start = _time(params.get("from", "")) or end - timedelta(seconds=length_s(DEFAULT) or 0.0)
        seconds = (end - start).total_seconds()
    except (ValueError, OverflowError):
        return _last_range(DEFAULT, f"The time is invalid; use 2026-01-31T13:45. {SHOWN_DEFAULT}")
    if not 0 < seconds <= MAX_RANGE_S or start > now:
        return _last_range(
            DEFAULT, f"A range must start in the past, before it ends, and span at most 90 days. {SHOWN_DEFAULT}"
        )
    step = choose_step(seconds, shortest_s=settings.SCRAPE_INTERVAL_S, points=_points(params))
    return TimeRange("", fit_window(Window(start, end, step)))


def _time(text: str) -> datetime | None:
    """An ISO 8601 time, in UTC by default; None for "", ValueError for an invalid text."""
    if not text:
        return None
    at = datetime.fromisoformat(text)
    if at.year < FIRST_YEAR:
        raise ValueError
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


@dataclass(frozen=True, slots=True)
class PageState:
    """The subject and time range of a page. ``error`` says which part of the URL is not shown."""

    pools: list[Pool]  # pools that the user may see
    subject: Subject
    range: TimeRange
    query: QueryDict  # of the URL, with the names of the subject, for requests of charts and refreshes
    error: str = ""
    in_path: bool = False  # the URL's path names the subject, so that another pool is another page
    needs_pool: bool = False  # the page shows one pool, without ``?pool=`` the first

    @property
    def urlencoded(self) -> str:
        """The state as a query string."""
        return self.query.urlencode()

    @property
    def pool_names(self) -> set[str]:
        """The names of the pools that the user may see."""
        return {pool.name for pool in self.pools}

    @property
    def carried(self) -> str:
        """The pool and the time range as ``?...`` for links to other pages, or ""."""
        return carried(self.query)

    @property
    def kept(self) -> list[tuple[str, str]]:
        """Parameters that a form for another time range keeps."""
        named = {"range", "from", "to", "zoom", "cursor", *(OF_POOL if self.in_path else ())}
        return [(key, str(value)) for key, value in self.query.items() if key not in named]

    @property
    def presets(self) -> tuple[str, ...]:
        """Lengths to choose from, with that of the range."""
        return PRESETS if not self.range.live or self.range.key in PRESETS else (*PRESETS, self.range.key)

    @property
    def pool_choices(self) -> list[tuple[str, str, bool]]:
        """Label and URL of each pool to choose, and whether it is shown: on this page, or else on the overview."""
        shown, params = self.subject.pool.name if self.subject.pool else "", self.query.copy()
        for name in OF_POOL:
            params.pop(name, None)
        path = reverse("telemetry:overview") if self.in_path else ""
        names = ["", *sorted(self.pool_names)][self.needs_pool :]
        queries = [urlencode([*params.items(), *([("pool", name)] if name else [])]) for name in names]
        return [
            (name or "All pools", f"{path}?{query}", name == shown) for name, query in zip(names, queries, strict=True)
        ]

    @property
    def pool_path(self) -> str:
        """The overview of the subject's pool, with the time range."""
        times = {name: value for name in ("range", "from", "to") if (value := self.query.get(name))}
        return overview_of(self.subject.pool.name if self.subject.pool else "", **times)

    @property
    def kind(self) -> Kind:
        """The kind of subject."""
        return self.subject.kind


def page_state(request: HttpRequest, *, default: str = DEFAULT, needs_pool: bool = False) -> PageState:
    """The state that a URL's query names, with a default range. At most two queries."""
    pools, time_range = _pools(request), requested_range(request.GET, default)
    subject, error = _named_subject(request, pools)
    if needs_pool and subject.pool is None and pools:
        subject = Subject.of_pool(pools[0])
    return PageState(pools, subject, time_range, request.GET, time_range.error or error, needs_pool=needs_pool)


def page_state_of(request: HttpRequest, subject: Subject) -> PageState:
    """The state of a page whose path names the subject. One query."""
    time_range, query = requested_range(request.GET), request.GET.copy()
    for name, value in query_parameters_of(subject).items():
        query[name] = value
    return PageState(_pools(request), subject, time_range, query, time_range.error, in_path=True)


def query_parameters_of(subject: Subject) -> dict[str, str]:
    """A subject as query parameters."""
    if subject.replica is not None:
        return {"replica": subject.replica.name}
    if subject.pool is None:
        return {}
    return {"pool": subject.pool.name} | ({} if subject.group is None else {"group": subject.group or NO_GROUP})


def overview_of(pool: str, **query: str) -> str:
    """The overview of a pool."""
    return f"{reverse('telemetry:overview')}?{urlencode({'pool': pool, **query})}"


def path_of(subject: Subject) -> str:
    """The path of a subject's page."""
    if subject.replica is not None:
        return reverse("telemetry:replica", args=[subject.replica.name])
    if subject.pool is not None and subject.group is not None:
        return reverse("telemetry:group", args=[subject.pool.name, subject.group or NO_GROUP])
    return reverse("telemetry:overview")


def replica_named(request: HttpRequest, name: str) -> tuple[Replica | None, Event | None]:
    """A replica that the user may see; else the last removed one of this name, unsaved, with its removal.

    At most two queries.
    """
    replica = viewable(request, Replica.objects.select_related("pool")).filter(name=name).first()
    if replica is not None:
        return replica, None
    return last_removal(name, _pools(request)) or (None, None)


def _pools(request: HttpRequest) -> list[Pool]:
    return list(viewable(request, Pool.objects.all()))


def _named_subject(request: HttpRequest, pools: list[Pool]) -> tuple[Subject, str]:
    """The subject of a query; the whole fleet with an error message if there is none of that name."""
    fleet = Subject(None if actor_of(request).projects() is None else pools)
    replica, name, group = (request.GET.get(key, "") for key in ("replica", "pool", "group"))
    if replica:
        row, _ = replica_named(request, replica)
        return (Subject.of_replica(row), "") if row else (fleet, _not_found("replica", replica))
    if not name:
        error = "A task group belongs to a pool: choose its pool too. Showing the whole fleet." if group else ""
        return fleet, error
    pool = next((pool for pool in pools if pool.name == name), None)
    if pool is None:
        return fleet, _not_found("pool", name)
    return Subject.of_pool(pool, ("" if group == NO_GROUP else group) if group else None), ""


def _not_found(noun: str, name: str) -> str:
    return f"There is no {noun} named {name!r}. Showing the whole fleet."
