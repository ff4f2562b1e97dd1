"""The time that a page shows, as its URL says it: ``?range=90m``, any such length, or ``?from=...&to=...`` in UTC.

Theory of operation. A live range ends now and moves; a fixed one stays. Tiles of a live range tell of the last minute
("now"), tables of at most the last quarter of an hour: both are asked for every few seconds, so they stay cheap
whatever the charts show.

What a request asks to see: of whom, when, in which views. All of it stands in the URL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.http import HttpRequest, QueryDict
from django.utils import timezone

from controlplane.access.actor import actor_of, visible
from controlplane.models import Pool, Replica
from telemetry.metrics.windows import Window, choose_step
from telemetry.services.figures.overview import Kind, Subject
from telemetry.services.figures.series import fit_window

CHART_POINTS = 100  # of a line at most: more of them show noise rather than the trend
MOST_POINTS = 720  # that ``?points=`` may ask for
PRESETS = {"5m": 300, "15m": 900, "1h": 3600, "6h": 21_600, "24h": 86_400}  # seconds
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}  # seconds
LENGTH = re.compile(r"([1-9][0-9]{0,6})([smhdw])")
DEFAULT = "15m"
SHORTEST_S = 60.0
NOW_S = 60.0  # what a tile calls now
TABLE_S = 900.0  # what a table of a live range covers at most
LONGEST_S = 90 * 86_400.0
SLOWEST_REFRESH_S = 60


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A range with the windows that its parts need. ``key`` is a length such as 15m, or "" for a fixed range."""

    key: str
    window: Window
    error: str = ""  # why what was asked for is not shown

    @property
    def live(self) -> bool:
        """Whether it ends now."""
        return bool(self.key)

    @property
    def now(self) -> Window:
        """The window of tiles."""
        return self._last(max(NOW_S, 4 * settings.SCRAPE_INTERVAL_S)) if self.live else self.window

    @property
    def table(self) -> Window:
        """The window of tables."""
        return self._last(min(self.window.length_s, TABLE_S)) if self.live else self.window

    @property
    def refresh_s(self) -> int:
        """How often charts are drawn anew: as often as they gain a point, and at least once a minute."""
        return int(min(max(self.window.step_s, settings.SCRAPE_INTERVAL_S), SLOWEST_REFRESH_S))

    def _last(self, seconds: float) -> Window:
        return Window(self.window.end - timedelta(seconds=seconds), self.window.end, self.window.step_s)


def asked_range(params: QueryDict) -> TimeRange:
    """The range that a URL asks for; the default, with the reason, for one that makes no sense."""
    if params.get("from") or params.get("to"):
        return _fixed(params)
    key = params.get("range", "").strip() or DEFAULT
    seconds, points = length_s(key), _points(params)
    if seconds is None:
        return _last(DEFAULT, f"There is no range {key!r}: write 90m, 6h or 3d. Shown are the last 15 minutes.")
    if not SHORTEST_S <= seconds <= LONGEST_S:
        return _last(DEFAULT, "A range is at least a minute and at most 90 days. Shown are the last 15 minutes.")
    return _last(key, points=points)


def length_s(text: str) -> float | None:
    """Seconds of a length such as 90m or 3d; None for anything else."""
    found = LENGTH.fullmatch(text)
    return float(int(found[1]) * UNITS[found[2]]) if found else None


def _points(params: QueryDict) -> int:
    """How many points a line may have: the usual number, unless ``?points=`` asks for more or fewer."""
    text = params.get("points", "")
    return min(max(int(text), 10), MOST_POINTS) if text.isascii() and text.isdigit() and len(text) < 6 else CHART_POINTS


def _last(key: str, error: str = "", points: int = CHART_POINTS) -> TimeRange:
    seconds = length_s(key) or 0.0
    step = choose_step(seconds, shortest_s=settings.SCRAPE_INTERVAL_S, points=points)
    return TimeRange(key, fit_window(Window.last(seconds, until=timezone.now(), step_s=step)), error)


def _fixed(params: QueryDict) -> TimeRange:
    now = timezone.now()
    try:
        end = _moment(params.get("to", "")) or now
        start = _moment(params.get("from", "")) or end - timedelta(seconds=PRESETS[DEFAULT])
        seconds = (end - start).total_seconds()
    except (ValueError, OverflowError):
        return _last(
            DEFAULT, "That time could not be read; write it as 2026-01-31T13:45. Shown are the last 15 minutes."
        )
    if not 0 < seconds <= LONGEST_S or start > now:
        return _last(DEFAULT, "A range starts before it ends, in the past, and is at most 90 days long.")
    step = choose_step(seconds, shortest_s=settings.SCRAPE_INTERVAL_S, points=_points(params))
    return TimeRange("", fit_window(Window(start, end, step)))


def _moment(text: str) -> datetime | None:
    """A time in ISO form, in UTC unless it says otherwise; None for nothing; ValueError for anything else."""
    if not text:
        return None
    at = datetime.fromisoformat(text)
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


NO_GROUP = "-"  # how an address names the requests of no task group: no group can have that name


@dataclass(frozen=True, slots=True)
class Asked:
    """A page's state. ``error`` says what was asked for and is not there."""

    pools: list[Pool]  # that may be asked for
    subject: Subject
    range: TimeRange
    query: QueryDict  # the URL's, with the names of the subject: what the page's parts are asked with
    error: str = ""

    @property
    def urlencoded(self) -> str:
        """The state as a query string, for the page's parts."""
        return self.query.urlencode()

    @property
    def pool_names(self) -> set[str]:
        """The names of the pools that have a page."""
        return {pool.name for pool in self.pools}

    @property
    def carried(self) -> str:
        """What a link to another page carries along: the time range, as ``?...``, or nothing."""
        kept = QueryDict(mutable=True)
        for key in ("range", "from", "to"):
            if value := self.query.get(key):
                kept[key] = value
        return f"?{kept.urlencode()}" if kept else ""

    @property
    def kind(self) -> Kind:
        """What the subject is."""
        return self.subject.kind


def asked(request: HttpRequest) -> Asked:
    """Read the URL's query: only what the actor may see is there. At most two queries."""
    pools = list(visible(actor_of(request), Pool.objects.all()))
    span = asked_range(request.GET)
    subject, error = _named(request, pools)
    return Asked(pools, subject, span, request.GET, span.error or error)


def asked_about(request: HttpRequest, subject: Subject) -> Asked:
    """The same for a page whose address names the subject; its parts are asked for by name. One query."""
    pools = list(visible(actor_of(request), Pool.objects.all()))
    span = asked_range(request.GET)
    query = request.GET.copy()
    for name, value in names_of(subject).items():
        query[name] = value
    return Asked(pools, subject, span, query, span.error)


def names_of(subject: Subject) -> dict[str, str]:
    """A subject as parameters of an address."""
    if subject.replica is not None:
        return {"replica": subject.replica.name}
    if subject.pool is None:
        return {}
    return {"pool": subject.pool.name} | ({} if subject.group is None else {"group": subject.group or NO_GROUP})


def _named(request: HttpRequest, pools: list[Pool]) -> tuple[Subject, str]:
    """The subject that a query names, or all with the reason why it is not that one."""
    everything = Subject(None if actor_of(request).projects() is None else pools)
    replica, name, group = (request.GET.get(key, "") for key in ("replica", "pool", "group"))
    if replica:
        found = visible(actor_of(request), Replica.objects.select_related("pool")).filter(name=replica).first()
        return (Subject.of_replica(found), "") if found else (everything, _gone("replica", replica))
    if not name:
        return everything, ""
    pool = next((pool for pool in pools if pool.name == name), None)
    if pool is None:
        return everything, _gone("pool", name)
    return Subject.of_pool(pool, ("" if group == NO_GROUP else group) if group else None), ""


def _gone(noun: str, name: str) -> str:
    return f"There is no {noun} {name!r} (any more); shown are all."
