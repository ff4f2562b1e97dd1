"""One question to a Prometheus-compatible server, by prometheus-api-client, with an end in seconds and in bytes.

What a Prometheus-compatible server last scraped of each replica, as if we had scraped it ourselves.

Theory of operation. A range selector asked as an instant query brings raw samples with the times at which they were
scraped, which an instant vector does not. All samples of one scrape carry one time, so a target's snapshot is what
stands at its newest time: a series that the engine dropped is not in it, and no two scrapes are ever mixed. Range
selectors pay no heed to staleness markers, so a target that cannot be scraped any more is recognised by ``up``.

Counters come raw. Restarts are recognised where those of direct scrapes are, and no extrapolation by ``rate`` or
``increase`` enters a figure (H8).
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests
from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect

from controlplane.egress import fleet_rules, guarded_session
from telemetry.metrics.exposition import MAX_LABEL_CHARS, MAX_SERIES, Sample

MAX_BYTES = 32 << 20  # of one answer: some 50 replicas with all their buckets are 3 MiB
SHOWN_CHARS = 120  # of a server's own words in an error


class PrometheusError(Exception):
    """The server gave no usable answer. The text is for people and names neither its URL nor a secret."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask, and as whom. ``Server`` has no state: every question is a connection of its own."""

    url: str  # up to what /api/v1/query follows
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # Authorization, X-Scope-OrgID

    def query(self, promql: str, *, at_s: float, deadline_s: float) -> list[dict[str, Any]]:
        """The result of an instant query as the server gives it; PrometheusError within ``deadline_s``."""
        try:
            with self._connect(deadline_s) as connection:
                result = connection.custom_query(promql, params={"time": f"{at_s:.3f}"}, timeout=deadline_s)
        except (ValueError, KeyError, TypeError):
            raise PrometheusError("what it answers is no answer of Prometheus' API") from None
        except requests.RequestException as error:
            raise PrometheusError(f"it gave no answer ({_reason(error)})") from None
        except PrometheusApiClientException as error:
            raise PrometheusError(_refusal(str(error))) from None
        if not isinstance(result, list):
            raise PrometheusError("what it answers is no answer of Prometheus' API")
        return result

    def _connect(self, deadline_s: float) -> PrometheusConnect:
        """A client that goes out under the fleet's rules. It mounts an unguarded adapter of its own, which goes."""
        session = guarded_session(fleet_rules(), deadline_s=deadline_s, max_bytes=MAX_BYTES)
        guarded = dict(session.adapters)
        client = PrometheusConnect(url=self.url.rstrip("/"), headers=dict(self.headers), session=session)
        session.adapters.clear()
        session.adapters.update(guarded)
        return client


def _reason(error: requests.RequestException) -> str:
    """Why, without the URL that most of these errors quote."""
    words = str(error)
    return "it cannot be reached" if "://" in words or not words else words[:SHOWN_CHARS]


def _refusal(words: str) -> str:
    """What a status other than 200 comes to, in words: the client's text is ``HTTP Status Code N (body)``."""
    status = next((word for word in words.split() if word.isdecimal()), "")
    return {
        "401": "it refuses the credentials (401)",
        "403": "it refuses the credentials (403)",
        "404": "there is no query API under its address (404)",
        "422": "it refuses the query (422): look at the matchers",
        "400": "it refuses the query (400): look at the matchers",
    }.get(status, f"it answers with status {status or 'unknown'}")


UP = "up"
PER_QUERY = 40  # replicas: some 3 MiB of answer, and a URL below 8 KiB


@dataclass(frozen=True, slots=True)
class Asked:
    """Whom to ask for. ``matchers`` narrow the series down, as PromQL writes them: ``job="vllm", cluster="a"``."""

    label: str  # of the series, whose value names the replica
    matchers: str = ""
    lookback_s: float = 60.0  # how old a sample may be: at least two scrapes of that server
    delay_s: float = 0.0  # how long ago a scrape is whole at the server; above 0 behind remote write


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One scrape of a replica that somebody else made."""

    taken_s: float  # Unix time
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Absent:
    """Why there is no snapshot of a replica although the server answered."""

    reason: str


Outcome = Snapshot | Absent
Target = tuple[tuple[str, str], ...]  # what tells one scraped target from another


def read_snapshots(
    server: Server, asked: Asked, values: Collection[str], names: Collection[str], *, deadline_s: float
) -> Iterator[dict[str, Outcome]]:
    """Each label value's newest scrape, a part of the fleet at a time; PrometheusError where the server fails.

    ``names`` are those of the series on the wire. Every part has what is left of ``deadline_s``.
    """
    ends_s = time.monotonic() + deadline_s
    at_s = time.time() - asked.delay_s
    wanted = sorted(set(values))
    for start in range(0, len(wanted), PER_QUERY):
        part = wanted[start : start + PER_QUERY]
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            raise PrometheusError(f"it took more than {deadline_s:g} s for {start} of {len(wanted)} replicas")
        yield _snapshots(server.query(_selector(asked, part, names), at_s=at_s, deadline_s=left_s), asked, part)


def _selector(asked: Asked, values: Sequence[str], names: Collection[str]) -> str:
    """The range selector; values and names are matched literally."""
    several = "|".join(_quoted(re.escape(value)) for value in values)
    known = "|".join(sorted({UP, *names}))
    parts = [f'__name__=~"{known}"', f'{asked.label}=~"{several}"', *([asked.matchers] if asked.matchers else [])]
    return f"{{{', '.join(parts)}}}[{round(asked.lookback_s)}s]"


def _quoted(text: str) -> str:
    """Inside a PromQL string. A value comes from a URL or a label of ours, which hold no line break."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _snapshots(result: list[dict[str, Any]], asked: Asked, values: Sequence[str]) -> dict[str, Outcome]:
    by_value: dict[str, dict[Target, list[_Series]]] = {value: defaultdict(list) for value in values}
    for entry in result:
        series = _series(entry)
        targets = by_value.get(series.labels.get(asked.label, ""))
        if targets is not None:
            targets[_target(series.labels)].append(series)
    return {value: _snapshot(value, asked, targets) for value, targets in by_value.items()}


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    labels: dict[str, str]
    points: list[tuple[float, float]]  # (Unix time, value), ascending


def _series(entry: Mapping[str, Any]) -> _Series:
    try:
        labels = {str(key): str(value)[:MAX_LABEL_CHARS] for key, value in entry["metric"].items()}
        points = [(float(at), float(value)) for at, value in entry["values"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise PrometheusError("it gave something else than a matrix of samples") from None
    return _Series(labels.pop("__name__", ""), labels, points)


def _target(labels: Mapping[str, str]) -> Target:
    return tuple((key, labels[key]) for key in ("cluster", "job", "instance") if key in labels)


def _snapshot(value: str, asked: Asked, targets: Mapping[Target, list[_Series]]) -> Outcome:
    """Of the one target among those with this label value that has an engine's series."""
    engines = [series for series in targets.values() if any(one.name != UP for one in series)]
    if len(engines) > 1:
        return Absent(f'{len(engines)} targets have {asked.label}="{value}": narrow the matchers down')
    known = engines[0] if engines else [one for series in targets.values() for one in series]
    if _is_down(known):
        return Absent("the metrics server cannot scrape it")
    if not engines:
        return Absent(f'the metrics server has nothing new of {asked.label}="{value}" since {asked.lookback_s:g} s')
    return _newest([one for one in known if one.name != UP])


def _is_down(known: Sequence[_Series]) -> bool:
    newest = [series.points[-1] for series in known if series.name == UP and series.points]
    return bool(newest) and max(newest)[1] == 0


def _newest(series: Sequence[_Series]) -> Outcome:
    taken_s = max((one.points[-1][0] for one in series if one.points), default=None)
    if taken_s is None:
        return Absent("its series are empty")
    at_last = [one for one in series if one.points and one.points[-1][0] == taken_s]
    samples = [Sample(one.name, one.labels, one.points[-1][1]) for one in at_last]
    if len(samples) > MAX_SERIES:
        return Absent(f"more than {MAX_SERIES} series")
    return Snapshot(taken_s, samples)
