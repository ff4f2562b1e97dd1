"""What routers tell of themselves and of replicas, each event taken into the timeline once."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
from django.utils import timezone

from controlplane.models import EventKind, Replica, Router, RouterReport

from .events import record_event

log = logging.getLogger(__name__)

OLDEST = timedelta(days=30)  # that is believed: an event of before is noted as that old

SENTENCES = {
    EventKind.ROUTER_STARTED: "Router {router} started.",
    EventKind.CONFIG_LOADED: "Router {router} began with configuration {revision} ({source}).",
    EventKind.CONFIG_REFUSED: "Router {router} could not begin with its file: {path}: {reason}",
    EventKind.REPLICA_EJECTED: "Router {router} sends replica {replica} nothing for now: {reason}.",
    EventKind.REPLICA_READMITTED: "Router {router} sends to replica {replica} again.",
    EventKind.REPLICA_UNREACHABLE: "Router {router} cannot reach replica {replica}: {reason}.",
    EventKind.REPLICA_REACHABLE: "Router {router} reaches replica {replica} again.",
}
KINDS: dict[str, EventKind] = {kind.value: kind for kind in SENTENCES}


class Reported(msgspec.Struct, frozen=True):
    """One event as a router tells it; ``at`` is Unix time by the router's clock."""

    boot: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern="^[^\\x00]*$")]
    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    at: float
    kind: Annotated[str, msgspec.Meta(max_length=64)]
    facts: dict[str, Annotated[str, msgspec.Meta(max_length=500)]] = {}


def record_reports(router: Router, told: Sequence[Any], *, sent_at: float | None) -> None:
    """Take what was not taken before. The caller holds the router's row, so that nobody else takes the same.

    ``sent_at`` is when the router's clock says that it told this: by how much that clock is wrong, its events are put
    right. What cannot be read is left out and never told again; a router must not be stuck with it.
    """
    reports = [report for one in told if (report := _read(one, router)) is not None]
    if not reports:
        return
    taken = set(
        RouterReport.objects.filter(router=router, boot__in={report.boot for report in reports}).values_list(
            "boot", "seq"
        )
    )
    fresh = {(report.boot, report.seq): report for report in reports if (report.boot, report.seq) not in taken}
    RouterReport.objects.bulk_create(
        RouterReport(router=router, boot=report.boot, seq=report.seq) for report in fresh.values()
    )
    replicas = _replicas(fresh.values())
    now = timezone.now()
    for report in fresh.values():
        _record(router, report, replicas, at=_moment(report.at, sent_at, now))


def _record(
    router: Router, report: Reported, replicas: dict[tuple[str | None, str | None], Replica], *, at: datetime
) -> None:
    kind = KINDS.get(report.kind, EventKind.ROUTER_REPORTED)
    replica = replicas.get((report.facts.get("pool"), report.facts.get("replica")))
    facts = {name: text.replace("\0", "") for name, text in report.facts.items()}
    record_event(
        kind,
        _sentence(kind, router, report.kind, facts),
        pool=replica.pool if replica else None,
        replica=replica,
        router=router,
        detail={**facts, "boot": report.boot, "seq": report.seq},
        at=at,
    )


def _sentence(kind: EventKind, router: Router, told_kind: str, facts: dict[str, str]) -> str:
    """What the timeline shows; a fact that is missing is a dash."""
    if kind is EventKind.ROUTER_REPORTED:
        told = ", ".join(f"{name} {text}" for name, text in sorted(facts.items()))
        return f"Router {router.name} reported {told_kind.replace(chr(0), '')}: {told}"[:500]
    return SENTENCES[kind].format_map(_Facts(facts, router=router.name))[:500]


class _Facts(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "-"


def _replicas(reports: Any) -> dict[tuple[str | None, str | None], Replica]:
    names = {report.facts.get("replica") for report in reports} - {None}
    found = Replica.objects.filter(name__in=names).select_related("pool") if names else ()
    return {(replica.pool.name, replica.name): replica for replica in found}


def _moment(at: float, sent_at: float | None, now: datetime) -> datetime:
    """When it happened by our clock: as long ago as the router says it was."""
    ago_s = (sent_at if sent_at is not None else now.timestamp()) - at
    limit_s = OLDEST.total_seconds()
    return datetime.fromtimestamp(
        now.timestamp() - min(max(ago_s if not math.isnan(ago_s) else 0.0, 0.0), limit_s), UTC
    )


def _read(told: Any, router: Router) -> Reported | None:
    try:
        return msgspec.convert(told, Reported)
    except msgspec.ValidationError as error:
        log.warning("router %s told of something that cannot be read: %s", router.name, error)
        return None
