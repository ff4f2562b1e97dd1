"""Creates, changes, deletes and tests Prometheus servers. Credentials are stored encrypted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet
from msgspec import Meta

from controlplane.encryption import encrypt
from controlplane.errors import InvalidError, NameTakenError
from controlplane.models import EventKind, Pool
from controlplane.models.fleet import NextVersion
from controlplane.services.checks import address_of, check_destination, check_replica_url, lock_row, unique_or
from controlplane.services.events import record_event
from telemetry.models import MetricsServer, ReadPool
from telemetry.scraping.merge import ScrapeFailure
from telemetry.scraping.metrics_servers import PrometheusError, read_fleet, replicas_of

TEST_TIMEOUT_S = 10.0  # short, because a user waits for the result
_MATCHER = r'[A-Za-z_][A-Za-z0-9_]*\s*(=|!=|=~|!~)\s*"([^"\\\n]|\\.)*"'
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SETTINGS = (
    "name",
    "url",
    "tenant",
    "series_label",
    "replica_label",
    "matchers",
    "lookback_s",
    "delay_s",
    "enabled",
)


def _check_seconds(field: str, low: float, high: float) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if not low <= value <= high:
            raise InvalidError(f"$.{field}", f"expected {low:g} to {high:g} seconds")
        return float(value)

    return check


def _check_text(field: str, pattern: str, expected: str, max_chars: int) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        text = str(value).strip()
        if len(text) > max_chars or not re.fullmatch(pattern, text):
            raise InvalidError(f"$.{field}", f"expected {expected}")
        return text

    return check


def _url(value: Any) -> str:
    return check_replica_url(str(value).strip(), "$.url")


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "name": _check_text("name", r"\S(.*\S)?", "1 to 100 characters", 100),
    "url": _url,
    "tenant": _check_text("tenant", r"[A-Za-z0-9!_.*'()-]*", "up to 150 letters, digits and !-_.*'()", 150),
    "series_label": _check_text("series_label", _LABEL.pattern, "the name of a label, such as instance or pod", 100),
    "replica_label": _check_text("replica_label", r"[A-Za-z0-9._/-]*", "the key of a replica's label, or nothing", 63),
    "matchers": _check_text(
        "matchers", rf"({_MATCHER}(\s*,\s*{_MATCHER})*)?", 'label matchers, such as job="vllm", cluster=~"a|b"', 500
    ),
    "lookback_s": _check_seconds("lookback_s", 5, 600),
    "delay_s": _check_seconds("delay_s", 0, 120),
    "enabled": bool,
}


def metrics_servers() -> QuerySet[MetricsServer]:
    """Every server with the names of its pools, by name. Two queries."""
    return MetricsServer.objects.prefetch_related("read_pools__pool").order_by("name")


@transaction.atomic
def create_server(
    *,
    credentials: Mapping[str, str] | None = None,
    pools: Collection[Pool] = (),
    by: User | None = None,
    **settings: Any,
) -> MetricsServer:
    """Add a server; its pools are read from it from the next cycle on. InvalidError, NameTakenError."""
    server = MetricsServer()
    _apply_settings(server, settings, credentials)
    with unique_or(lambda _: NameTakenError("Prometheus server", server.name)):
        server.save()
    _set_pools(server, pools)
    _record(EventKind.METRICS_SERVER_CREATED, f"Prometheus server {server.name} was added.", server, None, by)
    return server


@transaction.atomic
def update_server(
    server: MetricsServer,
    *,
    credentials: Mapping[str, str] | None = None,
    pools: Collection[Pool] | None = None,
    by: User | None = None,
    **settings: Any,
) -> MetricsServer:
    """Change some settings. Empty credentials delete the stored ones, which are never sent to another address."""
    server = lock_row(MetricsServer.objects.select_for_update(), server.pk)
    before = recorded_settings(server)
    address = address_of(server.url)
    _apply_settings(server, settings, credentials)
    if server.encrypted is not None and credentials is None:
        check_destination("$.credentials", "token or password", before=address, after=address_of(server.url))
    server.version = NextVersion()  # for a change of its pools, which are another table's rows
    with unique_or(lambda _: NameTakenError("Prometheus server", server.name)):
        server.save()
    if pools is not None:
        _set_pools(server, pools)
    _record(EventKind.METRICS_SERVER_CHANGED, f"Prometheus server {server.name} was changed.", server, before, by)
    return server


@transaction.atomic
def delete_server(server: MetricsServer, *, by: User | None = None) -> None:
    """Delete a server; its pools' replicas are scraped directly from then on."""
    server = lock_row(MetricsServer.objects.select_for_update(), server.pk)
    summary = f"Prometheus server {server.name} was removed; its pools are scraped directly."
    record_event(EventKind.METRICS_SERVER_REMOVED, summary, by=by, detail={"before": recorded_settings(server)})
    server.delete()


def recorded_settings(server: MetricsServer) -> dict[str, Any]:
    """The settings that an event shows; of the credentials, only whether there are any."""
    settings = {name: getattr(server, name) for name in SETTINGS}
    pools = list(server.read_pools.order_by("pool__name").values_list("pool__name", flat=True)) if server.pk else []
    return {**settings, "has_credentials": server.encrypted is not None, "pools": pools}


@dataclass(frozen=True, slots=True, order=True)
class MissingReplica:
    """A replica without series on the server."""

    replica: str
    reason: str


@dataclass(frozen=True, slots=True)
class ServerTestResult:
    """The result of testing a server; nothing is stored."""

    found: Annotated[list[str], Meta(description="Replicas with series.")]
    missing: list[MissingReplica]
    error: Annotated[str, Meta(description="Why the query failed; empty: it succeeded.")]
    elapsed_s: float


def try_server(server: MetricsServer) -> ServerTestResult:
    """Query the metrics of the replicas of its pools, and store nothing."""
    replicas = list(replicas_of(server))
    started_s = time.monotonic()
    found: list[str] = []
    missing: list[MissingReplica] = []
    error = ""
    try:
        for scrapes in read_fleet(server, replicas, deadline_s=TEST_TIMEOUT_S):
            for scrape in scrapes:
                if isinstance(scrape.outcome, ScrapeFailure):
                    missing.append(MissingReplica(scrape.target.name, scrape.outcome.reason))
                else:
                    found.append(scrape.target.name)
    except PrometheusError as failure:
        error = str(failure)
    return ServerTestResult(sorted(found), sorted(missing), error, time.monotonic() - started_s)


def _apply_settings(server: MetricsServer, settings: Mapping[str, Any], credentials: Mapping[str, str] | None) -> None:
    for name, value in settings.items():
        setattr(server, name, _CHECKS[name](value))
    if credentials is not None:
        present = _checked_credentials(credentials)
        server.encrypted = encrypt(json.dumps(present).encode()) if present else None


def _checked_credentials(credentials: Mapping[str, str]) -> dict[str, str]:
    """Credentials without empty values; {} for none. No error quotes them."""
    present = {name: value.strip() for name, value in credentials.items() if value.strip()}
    if set(present) not in ({"token"}, {"username", "password"}, set()):
        raise InvalidError("$.credentials", "expected a token, or a username and a password")
    if any(not value.isascii() or not value.isprintable() or len(value) > 4096 for value in present.values()):
        raise InvalidError("$.credentials", "expected up to 4096 printable ASCII characters")
    return present


def _set_pools(server: MetricsServer, pools: Iterable[Pool]) -> None:
    """Replace the server's pools; InvalidError for a pool that is read from another server."""
    by_id = {pool.pk: pool for pool in pools}
    other = ReadPool.objects.filter(pool__in=by_id).exclude(server=server).select_related("pool", "server").first()
    if other is not None:
        raise InvalidError("$.pools", f"pool {other.pool.name} is read from {other.server.name}: remove it there first")
    server.read_pools.exclude(pool__in=by_id).delete()
    ReadPool.objects.bulk_create([ReadPool(pool=pool, server=server) for pool in by_id.values()], ignore_conflicts=True)


def _record(
    kind: EventKind, summary: str, server: MetricsServer, before: dict[str, Any] | None, by: User | None
) -> None:
    detail = {"after": recorded_settings(server)} | ({} if before is None else {"before": before})
    record_event(kind, summary, by=by, detail=detail)
