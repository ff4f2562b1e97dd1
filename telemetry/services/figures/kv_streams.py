"""The KV event streams of a replica, as each router reports them at its last scrape, with advice for operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from django.conf import settings
from django.db.models import F, Func, JSONField, Value
from django.utils import timezone

from controlplane.models import Replica, ReplicaState, Router
from telemetry.services.figures.overview import SILENT_INTERVALS

MAX_TIME_S = 4e9
UNKNOWN = "unknown"
BY_SEVERITY = ("estimated", "unused", "replaying", "partial", "following")
TONES = {"following": "good", "partial": "", "replaying": "warn", "estimated": "bad"}
FIGURES = ("lag_s", "received", "gaps", "lost", "malformed", "restarts")
NOT_REPORTED = (
    "The router does not report this stream. It has not received this configuration yet, or its release does not "
    "report streams: see Routers."
)


@dataclass(frozen=True, slots=True)
class StreamRow:
    """The stream of one rank at one router. Counts are since the router's start; None: not reported."""

    router: str
    rank: int
    state: str  # of BY_SEVERITY, the worst of the router's processes; or UNKNOWN
    is_partly: bool = False  # whether other processes of the router are in another state
    since: datetime | None = None
    lag_s: float | None = None  # of the newest message, with the difference of both clocks
    received: float | None = None
    gaps: float | None = None
    lost: float | None = None  # gaps that could not be replayed
    malformed: float | None = None
    restarts: float | None = None
    reason: str = ""  # why it is unknown

    @property
    def tone(self) -> str:
        return TONES.get(self.state, "")


@dataclass(frozen=True, slots=True)
class StateAdvice:
    """What one state means, and what to do ("": nothing); code is between backticks."""

    state: str
    meaning: str
    action: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class KvStreams:
    """All streams of a replica."""

    rows: list[StreamRow]
    advice: list[StateAdvice]  # on the states of the rows, the worst first


def kv_streams_of(replica: Replica) -> KvStreams | None:
    """The replica's streams at each connected router; None if it has no KV events, or is disabled. One query."""
    if replica.kv_events is None or replica.state == ReplicaState.DISABLED:
        return None
    routers = reported_by_routers("kv_streams", replica.name)
    rows = [row for router in routers for row in _rows(router, replica.data_parallel_size)]
    ranks = {row.state: row.rank for row in reversed(rows) if row.state != UNKNOWN}  # whose ports the commands test
    texts = {state: _texts(replica.kv_events, rank)[state] for state, rank in ranks.items()}
    return KvStreams(rows, list(advice_on(rows, texts, BY_SEVERITY, TONES)))


def reported_by_routers(column: str, *path: str) -> list[Mapping[str, Any]]:
    """What each connected router reported at ``path`` of a column of its scrapes, as ``reported``. One query."""
    path_of = F(f"scrape_state__{column}"), *map(Value, path)
    found = Func(*path_of, function="jsonb_extract_path", output_field=JSONField())
    state = {name: F(f"scrape_state__{name}") for name in ("at", "ok_at", "failures", "reason")}
    return list(Router.objects.filter(lost_at=None).order_by("name").values("name", reported=found, **state))


def _rows(router: Mapping[str, Any], ranks: int) -> Iterator[StreamRow]:
    reason = scrape_problem(router, timezone.now())
    streams = {} if reason else router["reported"] or {}
    for rank in range(ranks):
        stream = streams.get(str(rank))
        if stream is None and rank and not streams:
            return  # one row with the reason for all ranks
        yield _row(router["name"], rank, stream, reason or NOT_REPORTED)


def scrape_problem(router: Mapping[str, Any], now: datetime) -> str:
    """Why the router's last scrape does not show the current state; "" if it does."""
    if (
        router["at"] is not None
        and (now - router["at"]).total_seconds() > SILENT_INTERVALS * settings.SCRAPE_INTERVAL_S
    ):
        return "The router was not scraped recently: see the notices above."
    if router["failures"]:
        return f"The router cannot be scraped: {router['reason']}."
    return "The router has not been scraped yet." if router["ok_at"] is None else ""


def _row(router: str, rank: int, stream: Mapping[str, Any] | None, reason: str) -> StreamRow:
    state, is_partly = worst_state(stream, BY_SEVERITY)
    if stream is None or state is None:
        return StreamRow(router, rank, UNKNOWN, reason=reason)
    since_s = stream.get("since_s")
    figures: dict[str, Any] = {name: stream.get(name) for name in FIGURES}
    return StreamRow(
        router,
        rank,
        state,
        is_partly=is_partly,
        since=None if since_s is None or since_s > MAX_TIME_S else datetime.fromtimestamp(since_s, UTC),
        **figures,
    )


class ReportedRow(Protocol):
    """What a router reports, or why it is unknown."""

    @property
    def router(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...


def advice_on(
    rows: Sequence[ReportedRow],
    texts: Mapping[str, tuple[str, str]],
    by_severity: Sequence[str],
    tones: Mapping[str, str],
) -> Iterator[StateAdvice]:
    """Why states are unknown, once for each reason; then the states of the rows, with their texts."""
    for reason in dict.fromkeys(row.reason for row in rows if row.reason):
        routers = dict.fromkeys(row.router for row in rows if row.reason == reason)
        yield StateAdvice(UNKNOWN, f"{', '.join(routers)}: {reason}")
    for state in by_severity:
        if any(row.state == state for row in rows):
            yield StateAdvice(state, *texts[state], tones.get(state, ""))


def worst_state(reported: Mapping[str, Any] | None, by_severity: Sequence[str]) -> tuple[str | None, bool]:
    """(the worst state of a router's processes, whether others are in another one); None: none is known."""
    states = [name for name, processes in (reported or {}).get("states", {}).items() if processes]
    return next((name for name in by_severity if name in states), None), len(states) > 1


def _texts(events: Mapping[str, Any], rank: int) -> dict[str, tuple[str, str]]:
    """The meaning of each state, and what to do."""
    probe, replay = _probe(events["endpoint"], rank), events["replay_endpoint"]
    probe_replay = _probe(replay, rank) if replay else probe
    return {
        "estimated": (
            "There is no connection to the engine's events. Requests are served, and placed by an estimate of what is "
            "cached: expect more wrong predictions.",
            f"On the router's host, try `{probe}`. If it fails: start the engine with "
            "`--kv-events-config` and an endpoint that binds, such as `tcp://*:5557`, and open the port. If it "
            "succeeds, look for `kv_events_not_opened` in the router's log.",
        ),
        "unused": (
            "No policy of the pool compares cached prefixes, so the router does not connect.",
            "Nothing, or, to use events, publish `lowest_cost`, `least_ttft` or `cache_aware`.",
        ),
        "replaying": (
            "Messages were lost and requested again; until they arrive, at most a second, the router estimates.",
            f"If the state does not change within seconds, try `{probe_replay}` on the router's host.",
        ),
        "partial": (
            "The router follows all events since the time shown, and estimates what was cached before: it connected "
            "late, or messages were lost.",
            "Nothing is wrong unless gaps keep growing. Then let fewer routers or workers follow this engine, or look "
            "at the network. "
            + (
                f"`{probe_replay}` tests the replay endpoint, from which lost messages are requested again."
                if replay
                else "Set a replay endpoint, so that routers can request lost messages again."
            ),
        ),
        "following": ("The router knows every block that the engine has cached.", ""),
    }


def _probe(endpoint: str, rank: int) -> str:
    """A command that tests whether the port of a rank can be reached."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"nc -vz {host.strip('[]')} {int(port) + rank}"
