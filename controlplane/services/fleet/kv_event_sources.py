"""Where an engine publishes KV events, as it reports at ``GET /kv_event_sources`` (vLLM 0.31 and later).

The report becomes a proposal for ``kv_events``. It is untrusted: only endpoints at the replica's own host are proposed,
so an engine cannot direct routers to another host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from controlplane.models import Replica
from routing.schema import KvEvents, is_loopback

WILDCARDS = frozenset({"*", "0.0.0.0", "[::]", "::"})  # noqa: S104 - addresses that engines bind to
LOST = "lost events cannot be requested again"


class ReportedKvEvents(msgspec.Struct, frozen=True):
    """The KV events that an engine reports, and why a part of the report is not used."""

    kv_events: Annotated[
        KvEvents | None, Meta(description="What kv_events of the replica may be set to; null: nothing usable.")
    ]
    problem: Annotated[str, Meta(description="What of it cannot be used, and why; empty: nothing.")] = ""


class _Source(msgspec.Struct):
    endpoint: Annotated[str, Meta(max_length=300)] | None = None
    enable_kv_cache_events: bool = False
    publisher: str | None = "zmq"
    replay_endpoint: Annotated[str, Meta(max_length=300)] | None = None
    topic: str = ""


def read_event_sources(document: bytes, url: str, ranks: int) -> dict[str, Any] | None:
    """``ReportedKvEvents`` as JSON, of a replica at ``url``; None without a publisher, or for a malformed document."""
    try:
        by_rank = msgspec.json.decode(document, type=dict[Annotated[str, Meta(pattern=r"^[0-9]{1,4}\Z")], _Source])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    sources = {int(rank): source for rank, source in by_rank.items() if _publishes(source)}
    if not sources:
        return None
    reported: dict[str, Any] = msgspec.to_builtins(_propose(sources, url, ranks))
    return reported


def record_event_sources(replica_id: int, reported: Mapping[str, Any] | None) -> None:
    """Store an engine's report. It has no effect on routers until a user sets ``kv_events``."""
    rows = Replica.objects.filter(pk=replica_id)
    if rows.values_list("reported_kv_events", flat=True).first() != reported:
        rows.update(reported_kv_events=reported)


def proposed_events(replica: Replica) -> dict[str, Any] | None:
    """The events that a replica's engine reports; None if there are none, or if ``kv_events`` agrees with them."""
    proposed: dict[str, Any] | None = (replica.reported_kv_events or {}).get("kv_events")
    if proposed is None or (replica.kv_events is not None and _agrees(replica.kv_events, proposed)):
        return None
    return proposed


def _agrees(events: Mapping[str, Any], proposed: Mapping[str, Any]) -> bool:
    """Whether ``kv_events`` has the reported ports and topic. The host may differ: routers may use another name."""
    replay = proposed["replay_endpoint"]
    return (
        _port(events["endpoint"]) == _port(proposed["endpoint"])
        and (replay is None or _port(events["replay_endpoint"] or "") == _port(replay))
        and proposed["topic"].startswith(events["topic"])
    )


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


def _publishes(source: _Source) -> bool:
    return source.enable_kv_cache_events and source.publisher == "zmq" and bool(source.endpoint)


def _propose(sources: Mapping[int, _Source], url: str, ranks: int) -> ReportedKvEvents:
    """Propose the endpoints of the first rank, if the other ranks have the consecutive ports."""
    endpoint, problem = _endpoint(sources, "endpoint", url)
    if endpoint is None:
        return ReportedKvEvents(None, problem)
    replay, replay_problem = _endpoint(sources, "replay_endpoint", url)
    problems = [f"{replay_problem} Left out: {LOST}."] if replay_problem else []
    if ranks != len(sources):
        problems.append(f"It publishes events of {_ranks(len(sources))}, and this replica is set to {_ranks(ranks)}.")
    topics = {source.topic for source in sources.values()}
    topic = topics.pop() if len(topics) == 1 else ""
    return ReportedKvEvents(KvEvents(endpoint, replay, topic if len(topic) <= 256 else ""), " ".join(problems))


def _endpoint(sources: Mapping[int, _Source], field: str, url: str) -> tuple[str | None, str]:
    """The first rank's endpoint at the replica's own host; or None, and why."""
    label = field.replace("_", " ")
    host, ports, first = urlsplit(url).hostname or "", list[int](), min(sources)
    if getattr(sources[first], field) is None:
        return None, ""
    for rank, source in sorted(sources.items()):
        text = getattr(source, field) or ""
        name, _, port = text.removeprefix("tcp://").rpartition(":")
        if not text.startswith("tcp://") or not port.isdecimal() or not 0 < int(port) <= 65_535:
            return None, f"The {label} {_shown(text)} of rank {rank} is no TCP address that routers can connect to."
        if not _is_own(name, host):
            return None, f"The {label} {_shown(text)} is at another host than the replica, {host}."
        ports.append(int(port) - rank + first)
    if len(set(ports)) > 1:
        return None, f"The ports of the {label} of the data-parallel ranks do not follow one another."
    return f"tcp://{f'[{host}]' if ':' in host else host}:{ports[0]}", ""


def _is_own(name: str, host: str) -> bool:
    """Whether an address that an engine binds to is the replica's own host."""
    bare = name.strip("[]").lower()
    return name in WILDCARDS or bare == host.lower() or (is_loopback(bare) and is_loopback(host))


def _ranks(number: int) -> str:
    return f"{number} data-parallel rank{'' if number == 1 else 's'}"


def _shown(text: str) -> str:
    """Untrusted text without unprintable characters, shortened for a message."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:80]) or "(none)"
