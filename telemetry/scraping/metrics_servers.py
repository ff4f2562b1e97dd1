"""Replicas whose figures a metrics server has: read from there, folded and stored like scrapes of our own.

Theory of operation. A pool that names a metrics server is left out of direct scraping. Its replicas are asked for at
the same interval, and what the server scraped last is their reading; a scrape that was seen before makes none, so an
interval of ours that is shorter than the server's does no harm. A server that fails says nothing of the replicas:
they turn stale, never down.
"""

from __future__ import annotations

import json
import math
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from urllib.parse import urlsplit

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.encryption import decrypt
from controlplane.errors import DecryptionError
from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask, Replica, ReplicaState
from telemetry.metrics.engine import KNOWN_NAMES, ReplicaSample, replica_sample
from telemetry.metrics.exposition import ExpositionError
from telemetry.models import MetricsServer
from telemetry.prometheus import Asked, Outcome, PrometheusError, Server, Snapshot, read_snapshots
from telemetry.scraping.merge import Failure, Taken
from telemetry.scraping.record import ReplicaScrape, record_scrapes
from telemetry.storage.locks import advisory_lock, metrics_server_lock

DEADLINE_SHARE = 0.8  # of the interval, for all of a server's replicas
SHOWN_CHARS = 200


def read_metrics_servers(now_s: float | None = None) -> None:
    """One reading or one gap per replica of every pool that is read from a server; a server being read is left out."""
    interval_s = float(settings.SCRAPE_INTERVAL_S)
    due = datetime.fromtimestamp(math.floor((time.time() if now_s is None else now_s) / interval_s) * interval_s, UTC)
    with isolated_items(PeriodicTask.METRICS_SERVERS) as item:
        for server in MetricsServer.objects.filter(enabled=True, read_pools__isnull=False).distinct():
            with advisory_lock(metrics_server_lock(server.pk)) as ours:
                if ours:
                    with item(server.name):
                        read_server(server, due=due, deadline_s=DEADLINE_SHARE * interval_s)


def read_server(server: MetricsServer, *, due: datetime, deadline_s: float) -> None:
    """Read a server's replicas, and note on the server how that went."""
    rest = {replica.pk: replica for replica in replicas_of(server)}
    found, error = 0, ""
    try:
        for scrapes in read_fleet(server, list(rest.values()), deadline_s=deadline_s):
            record_scrapes(scrapes, [], due=due)
            found += sum(isinstance(scrape.outcome, Taken) for scrape in scrapes)
            for scrape in scrapes:
                del rest[scrape.replica.pk]
    except PrometheusError as failure:
        error = str(failure)[:SHOWN_CHARS]
        silence = Failure(f"metrics server {server.name}: {error}", blames_target=False)
        record_scrapes([ReplicaScrape(replica, silence) for replica in rest.values()], [], due=due)
    missing = None if error else replicas_of(server).count() - found
    MetricsServer.objects.filter(pk=server.pk).update(
        asked_at=timezone.now(), error=error, found=found, missing=missing
    )


def replicas_of(server: MetricsServer) -> QuerySet[Replica]:
    """The replicas of its pools that are not disabled, with their pools."""
    replicas = Replica.objects.filter(pool__read_from__server=server).exclude(state=ReplicaState.DISABLED)
    return replicas.select_related("pool").order_by("pk")


def read_fleet(
    server: MetricsServer, replicas: Sequence[Replica], *, deadline_s: float
) -> Iterator[list[ReplicaScrape]]:
    """What a server says of replicas, a part of them at a time; PrometheusError where it fails."""
    by_value: dict[str, list[Replica]] = defaultdict(list)
    unnamed: list[ReplicaScrape] = []
    for replica in replicas:
        if (value := value_of(server, replica)) is None:
            unnamed.append(ReplicaScrape(replica, Failure(f"it has no label {server.replica_label}")))
        else:
            by_value[value].append(replica)
    if unnamed:
        yield unnamed
    asked = Asked(server.series_label, server.matchers, server.lookback_s, server.delay_s)
    for part in read_snapshots(_connection(server), asked, by_value, KNOWN_NAMES, deadline_s=deadline_s):
        yield [
            ReplicaScrape(replica, _taken(outcome)) for value, outcome in part.items() for replica in by_value[value]
        ]


def value_of(server: MetricsServer, replica: Replica) -> str | None:
    """What the server's series carry for a replica: host and port, or the replica's own label; None without one."""
    if server.replica_label:
        return replica.labels.get(server.replica_label) or None
    parts = urlsplit(replica.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"[{parts.hostname}]:{port}" if ":" in (parts.hostname or "") else f"{parts.hostname}:{port}"


def _taken(outcome: Outcome) -> Taken[ReplicaSample] | Failure:
    if not isinstance(outcome, Snapshot):
        return Failure(outcome.reason)
    try:
        return Taken(
            outcome.taken_s, replica_sample(outcome.samples), duration_s=max(time.time() - outcome.taken_s, 0.0)
        )
    except ExpositionError as error:
        return Failure(f"what the metrics server has of it is not to be trusted: {error}")


def _connection(server: MetricsServer) -> Server:
    headers = {"X-Scope-OrgID": server.tenant} if server.tenant else {}
    if server.encrypted is not None:
        headers["Authorization"] = _authorization(bytes(server.encrypted))
    return Server(server.url, headers)


def _authorization(encrypted: bytes) -> str:
    try:
        kept: dict[str, str] = json.loads(decrypt(encrypted))
    except DecryptionError:
        raise PrometheusError("its credentials cannot be opened with this server's keys: give them again") from None
    if "token" in kept:
        return f"Bearer {kept['token']}"
    return "Basic " + b64encode(f"{kept['username']}:{kept['password']}".encode()).decode()
