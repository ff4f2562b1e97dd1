"""Reads replicas' metrics from a Prometheus-compatible server and stores them like direct scrapes.

Theory of operation. A pool that names a Prometheus server is not scraped directly. Its replicas are queried at the same
interval, and the server's newest scrape of each is its reading; a scrape that was read before makes no reading, so an
interval shorter than the server's does no harm. If the server fails, the replicas become stale, never down.

A range selector sent as an instant query returns raw samples with the times of their scrapes, which an instant vector
does not. All samples of one scrape have the same time, so a target's snapshot is its samples at its newest time: a
series that the engine dropped is not in it, and two scrapes are never mixed. Range selectors ignore staleness markers,
so a target that the server cannot scrape is recognized by ``up``. Counters are read raw, and resets are recognized
where those of direct scrapes are; ``rate`` and ``increase`` would extrapolate.
"""

from __future__ import annotations

import json
import math
import re
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import requests
from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone
from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect

from controlplane.egress import fleet_rules, guarded_session
from controlplane.encryption import decrypt
from controlplane.errors import DecryptionError
from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask, Replica, ReplicaState
from telemetry.metrics.engine import KNOWN_METRICS, ReplicaSample, replica_sample
from telemetry.metrics.exposition import MAX_LABEL_CHARS, MAX_SERIES, ExpositionError, Sample
from telemetry.models import MetricsServer
from telemetry.scraping.merge import ScrapeFailure, ScrapeResult
from telemetry.scraping.record import ReplicaScrape, record_scrapes
from telemetry.storage.locks import METRICS_SERVER, advisory_lock

DEADLINE_SHARE = 0.8  # of the interval, for all replicas of a server
MAX_BYTES = 32 << 20  # of one response: some 50 replicas with all their buckets are 3 MiB
REPLICAS_PER_QUERY = 40  # some 3 MiB of response, and a URL below 8 KiB
MAX_ERROR_CHARS, MAX_QUOTED_CHARS = 200, 120
UP = "up"
BAD_RESPONSE = "its response is not one of Prometheus' query API"
STATUS_REASONS = {
    "401": "it rejects the credentials (401)",
    "403": "it rejects the credentials (403)",
    "404": "there is no query API under its address (404)",
    "422": "it rejects the query (422): check the matchers",
    "400": "it rejects the query (400): check the matchers",
}


class PrometheusError(Exception):
    """The server gave no usable response. The text is shown to operators and contains no URL and no secret."""


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    labels: dict[str, str]
    points: list[tuple[float, float]]  # (Unix time, value), ascending


def read_metrics_servers(now_s: float | None = None) -> None:
    """Store one reading per replica of every pool with a Prometheus server. A server that is being read is skipped."""
    interval_s = float(settings.SCRAPE_INTERVAL_S)
    due = datetime.fromtimestamp(math.floor((time.time() if now_s is None else now_s) / interval_s) * interval_s, UTC)
    with isolated_items(PeriodicTask.METRICS_SERVERS) as item:
        for server in MetricsServer.objects.filter(enabled=True, read_pools__isnull=False).distinct():
            with advisory_lock(METRICS_SERVER + server.pk) as acquired:
                if acquired:
                    with item(server.name):
                        read_server(server, due=due, deadline_s=DEADLINE_SHARE * interval_s)


def read_server(server: MetricsServer, *, due: datetime, deadline_s: float) -> None:
    """Read the replicas of a server, and store the result on its row."""
    unread = {replica.pk: replica for replica in replicas_of(server)}
    read_count, error = 0, ""
    try:
        for scrapes in read_fleet(server, list(unread.values()), deadline_s=deadline_s):
            record_scrapes(scrapes, [], due=due)
            read_count += sum(isinstance(scrape.outcome, ScrapeResult) for scrape in scrapes)
            for scrape in scrapes:
                del unread[scrape.target.pk]
    except PrometheusError as failure:
        error = str(failure)[:MAX_ERROR_CHARS]
        outcome = ScrapeFailure(f"Prometheus server {server.name}: {error}", blames_target=False)
        record_scrapes([ReplicaScrape(replica, outcome) for replica in unread.values()], [], due=due)
    missing = None if error else replicas_of(server).count() - read_count
    MetricsServer.objects.filter(pk=server.pk).update(
        asked_at=timezone.now(), error=error, found=read_count, missing=missing
    )


def replicas_of(server: MetricsServer) -> QuerySet[Replica]:
    """The replicas of the server's pools that are not disabled, with their pools."""
    replicas = Replica.objects.filter(pool__read_from__server=server).exclude(state=ReplicaState.DISABLED)
    return replicas.select_related("pool").order_by("pk")


def read_fleet(
    server: MetricsServer, replicas: Sequence[Replica], *, deadline_s: float
) -> Iterator[list[ReplicaScrape]]:
    """The newest scrape of each replica, some replicas at a time; PrometheusError if the server fails."""
    by_value: dict[str, list[Replica]] = defaultdict(list)
    unlabelled: list[ReplicaScrape] = []
    for replica in replicas:
        if (value := _label_value(server, replica)) is None:
            unlabelled.append(ReplicaScrape(replica, ScrapeFailure(f"it has no label {server.replica_label}")))
        else:
            by_value[value].append(replica)
    if unlabelled:
        yield unlabelled
    for outcomes in read_snapshots(server, list(by_value), deadline_s=deadline_s):
        yield [ReplicaScrape(replica, outcome) for value, outcome in outcomes.items() for replica in by_value[value]]


def _label_value(server: MetricsServer, replica: Replica) -> str | None:
    """The value of the series label: the replica's own label, None without one; else host and port of its URL."""
    if server.replica_label:
        return replica.labels.get(server.replica_label) or None
    parts = urlsplit(replica.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"[{parts.hostname}]:{port}" if ":" in (parts.hostname or "") else f"{parts.hostname}:{port}"


def read_snapshots(
    server: MetricsServer, values: Sequence[str], *, deadline_s: float
) -> Iterator[dict[str, ScrapeResult[ReplicaSample] | ScrapeFailure]]:
    """The newest scrape per value of the series label, some values at a time; PrometheusError if the server fails."""
    ends_s = time.monotonic() + deadline_s
    at_s = time.time() - server.delay_s
    headers = _headers(server)
    for start in range(0, len(values), REPLICAS_PER_QUERY):
        part = values[start : start + REPLICAS_PER_QUERY]
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            raise PrometheusError(f"it took more than {deadline_s:g} s for {start} of {len(values)} replicas")
        result = _query(server.url, headers, _selector(server, part), at_s=at_s, deadline_s=left_s)
        targets: dict[str, dict[tuple[str | None, ...], list[_Series]]] = {value: defaultdict(list) for value in part}
        for series in map(_parse_series, result):
            if (of_value := targets.get(series.labels.get(server.series_label, ""))) is not None:
                of_value[tuple(series.labels.get(name) for name in ("cluster", "job", "instance"))].append(series)
        yield {value: _snapshot(server, value, list(of_value.values())) for value, of_value in targets.items()}


def _headers(server: MetricsServer) -> dict[str, str]:
    headers = {"X-Scope-OrgID": server.tenant} if server.tenant else {}
    if server.encrypted is None:
        return headers
    try:
        credentials: dict[str, str] = json.loads(decrypt(bytes(server.encrypted)))
    except DecryptionError:
        raise PrometheusError("its credentials cannot be decrypted with the current keys: enter them again") from None
    if "token" in credentials:
        return {**headers, "Authorization": f"Bearer {credentials['token']}"}
    basic = b64encode(f"{credentials['username']}:{credentials['password']}".encode()).decode()
    return {**headers, "Authorization": f"Basic {basic}"}


def _selector(server: MetricsServer, values: Sequence[str]) -> str:
    """The range selector of these label values, which are matched literally."""
    pattern = "|".join(re.escape(value).replace("\\", "\\\\").replace('"', '\\"') for value in values)
    metrics = "|".join(sorted({UP, *KNOWN_METRICS}))
    matchers = [f'__name__=~"{metrics}"', f'{server.series_label}=~"{pattern}"', server.matchers]
    return f"{{{', '.join(filter(None, matchers))}}}[{round(server.lookback_s)}s]"


def _query(
    url: str, headers: Mapping[str, str], promql: str, *, at_s: float, deadline_s: float
) -> list[dict[str, Any]]:
    """The result of an instant query; PrometheusError within ``deadline_s``."""
    session = guarded_session(fleet_rules(), deadline_s=deadline_s, max_bytes=MAX_BYTES)
    guarded = dict(session.adapters)
    client = PrometheusConnect(url=url.rstrip("/"), headers=dict(headers), session=session)
    session.adapters.clear()  # PrometheusConnect mounts an adapter of its own, without the egress rules
    session.adapters.update(guarded)
    try:
        with client:
            result = client.custom_query(promql, params={"time": f"{at_s:.3f}"}, timeout=deadline_s)  # type: ignore[arg-type]  # requests takes floats
    except (ValueError, KeyError, TypeError):
        raise PrometheusError(BAD_RESPONSE) from None
    except requests.RequestException as error:
        text = str(error)  # most of these errors quote the URL
        reason = "it cannot be reached" if "://" in text or not text else text[:MAX_QUOTED_CHARS]
        raise PrometheusError(f"it did not respond ({reason})") from None
    except PrometheusApiClientException as error:
        status = next((part for part in str(error).split() if part.isdecimal()), "")  # "HTTP Status Code N (body)"
        raise PrometheusError(STATUS_REASONS.get(status, f"it responds with status {status or 'unknown'}")) from None
    if not isinstance(result, list):
        raise PrometheusError(BAD_RESPONSE)
    return result


def _parse_series(entry: Mapping[str, Any]) -> _Series:
    try:
        labels = {str(key): str(value)[:MAX_LABEL_CHARS] for key, value in entry["metric"].items()}
        points = [(float(at), float(value)) for at, value in entry["values"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise PrometheusError("its response is not a matrix of samples") from None
    return _Series(labels.pop("__name__", ""), labels, points)


def _snapshot(
    server: MetricsServer, value: str, targets: Sequence[list[_Series]]
) -> ScrapeResult[ReplicaSample] | ScrapeFailure:
    """The newest scrape of the one target with this label value that has an engine's series."""
    engines = [target for target in targets if any(series.name != UP for series in target)]
    if len(engines) > 1:
        reason = f'{len(engines)} targets have {server.series_label}="{value}": narrow the matchers down'
        return ScrapeFailure(reason)
    target_series = engines[0] if engines else [series for target in targets for series in target]
    newest_up = [series.points[-1] for series in target_series if series.name == UP and series.points]
    if newest_up and max(newest_up)[1] == 0:
        return ScrapeFailure("the Prometheus server cannot scrape it")
    if not engines:
        since = f"in the last {server.lookback_s:g} s"
        return ScrapeFailure(f'the Prometheus server has no samples of {server.series_label}="{value}" {since}')
    newest = [(*series.points[-1], series) for series in target_series if series.name != UP and series.points]
    if not newest:
        return ScrapeFailure("its series are empty")
    scraped_s = max(at_s for at_s, _, _ in newest)
    samples = [Sample(series.name, series.labels, number) for at_s, number, series in newest if at_s == scraped_s]
    if len(samples) > MAX_SERIES:
        return ScrapeFailure(f"more than {MAX_SERIES} series")
    try:
        return ScrapeResult(scraped_s, replica_sample(samples), duration_s=max(time.time() - scraped_s, 0.0))
    except ExpositionError as error:
        return ScrapeFailure(f"its samples at the Prometheus server are not valid: {error}")
