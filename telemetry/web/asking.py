"""What a request asks to see: of whom, when, in which views. All of it stands in the URL."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpRequest, QueryDict

from controlplane.access.asker import asker_of
from controlplane.access.scope import visible
from controlplane.models import Pool, Replica
from telemetry.services.figures.subjects import Kind, Subject
from telemetry.web.ranges import TimeRange, asked_range

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
    """Read the URL's query: only what the asker may see is there. At most two queries."""
    pools = list(visible(asker_of(request), Pool.objects.all()))
    span = asked_range(request.GET)
    subject, error = _named(request, pools)
    return Asked(pools, subject, span, request.GET, span.error or error)


def asked_about(request: HttpRequest, subject: Subject) -> Asked:
    """The same for a page whose address names the subject; its parts are asked for by name. One query."""
    pools = list(visible(asker_of(request), Pool.objects.all()))
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
    everything = Subject(None if asker_of(request).projects() is None else pools)
    replica, name, group = (request.GET.get(key, "") for key in ("replica", "pool", "group"))
    if replica:
        found = visible(asker_of(request), Replica.objects.select_related("pool")).filter(name=replica).first()
        return (Subject.of_replica(found), "") if found else (everything, _gone("replica", replica))
    if not name:
        return everything, ""
    pool = next((pool for pool in pools if pool.name == name), None)
    if pool is None:
        return everything, _gone("pool", name)
    return Subject.of_pool(pool, ("" if group == NO_GROUP else group) if group else None), ""


def _gone(noun: str, name: str) -> str:
    return f"There is no {noun} {name!r} (any more); shown are all."
