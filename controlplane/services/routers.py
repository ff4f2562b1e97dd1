"""Routers: heartbeats with their events, acknowledgements, claims of pushes, and routers without a heartbeat.

Theory of operation. Every fact about a router is written with its row locked, and only if it is newer than the
row, so late, repeated and reordered messages do no harm. ``pushed_number`` and ``push_after`` state what was last
sent and until when it is not sent again; a newer number never waits.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.celery import wake
from controlplane.errors import InUseError
from controlplane.isolation import isolated_items
from controlplane.models import ConfigSnapshot, EventKind, PeriodicTask, Replica, Router, RouterReport
from controlplane.models.fleet import LONG_NAME
from controlplane.push.client import Signature, needing_renewal
from controlplane.services.checks import check_name, check_url
from controlplane.services.events import record_event
from controlplane.services.policies.rollouts import advance_rollouts
from controlplane.services.snapshots import freeze_snapshot, newest_snapshot

LOST_AFTER_S = 30.0  # without a heartbeat
PROBE_AFTER_S = 15.0  # without a heartbeat, which is sent every 10 s
HEARTBEAT_WITHIN_S = 13.0  # they are sent every 8 to 12 s
LEASE_S = 10.0  # longer than a push takes
REJECTED_PAUSE_S = 20.0  # before a rejected number is pushed again
MAX_PAUSE_S = 20.0  # between attempts to reach a router
MAX_NUMBER = 2**53  # larger JSON numbers lose digits
MAX_EVENT_AGE = timedelta(days=30)  # older times are recorded as this old

log = logging.getLogger(__name__)


def responding(now: datetime) -> Q:
    """Routers that are not lost, and sent a heartbeat in time or could be scraped."""
    seen = Q(last_seen_at__gte=now - timedelta(seconds=HEARTBEAT_WITHIN_S))
    return Q(lost_at=None) & (seen | Q(scrape_state__failures=0) | Q(scrape_state=None))


# --- heartbeats -----------------------------------------------------------------------------------------


@transaction.atomic
def announce(
    *,
    name: str,
    boot: str,
    admin_url: str,
    data_url: str = "",
    version: str = "",
    revision: int | None = None,
    sha256: str | None = None,
    events: Sequence[Any] = (),
    sent_at: float | None = None,
    warming: Mapping[str, Mapping[str, int]] | None = None,
    signature: Signature | None = None,
) -> Router:
    """Record a router's heartbeat and its events; create the row of a new router, and push to an outdated one.

    ``warming`` is the progress of each replica in warm-up, ``signature`` the state of its configuration's signature.
    InvalidError for an invalid name or URL.
    """
    check_name(name, LONG_NAME, "$.name")
    admin_url = check_url(admin_url, "$.admin_url")
    if data_url:
        data_url = check_url(data_url, "$.data_url")
    fields: dict[str, Any] = {"boot": boot, "version": version, "admin_url": admin_url, "data_url": data_url}
    router, is_new = Router.objects.select_for_update(no_key=True).get_or_create(
        name=name, defaults={**fields, "last_seen_at": timezone.now()}
    )
    if is_new:
        record_event(EventKind.ROUTER_JOINED, f"Router {name} joined.", router=router, detail=fields)
    restarted = router.boot != boot
    for field, value in fields.items():
        setattr(router, field, value)
    router.warming = dict(warming or {})
    _set_signature(router, signature)
    _mark_seen(router)
    # A heartbeat that was sent before an acknowledgement may arrive after it, with an older number.
    if restarted or (revision or 0) >= (router.running_number or 0) or not _has_just_acknowledged(router):
        _set_running(router, revision, sha256 or "")
    if restarted or router.push_failures:
        router.push_after = None  # it is reachable now
    router.save()
    _record_reports(router, events, sent_at=sent_at)
    newest = newest_snapshot()
    if newest and not router.runs(newest.number, newest.sha256):
        wake("controlplane.tasks.push_config", router.pk)
    advance_rollouts()
    return router


@transaction.atomic
def mark_lost_routers() -> int:
    """Record ``router_lost``, once, for each router without a heartbeat for 30 s; their number."""
    silent = Q(lost_at=None, last_seen_at__lt=timezone.now() - timedelta(seconds=LOST_AFTER_S))
    lost = list(Router.objects.select_for_update(no_key=True, skip_locked=True).filter(silent))
    with isolated_items(PeriodicTask.CONFIG_PUSHES) as item:
        for router in lost:
            with item(f"{router.name} is lost"), transaction.atomic():
                router.lost_at = timezone.now()
                router.save()
                silent_s = (router.lost_at - router.last_seen_at).total_seconds()
                summary = f"Router {router.name} is lost: no heartbeat for {silent_s:.0f} s."
                record_event(EventKind.ROUTER_LOST, summary, router=router)
    advance_rollouts()
    return len(lost)


@transaction.atomic
def remove_router(router: Router, *, by: User | None = None, reason: str = "") -> None:
    """Remove a lost router; its events stay. InUseError while it sends heartbeats.

    A router that comes back announces itself as a new one of the same name.
    """
    row = _lock(router.pk)
    if row is None:
        return
    if row.lost_at is None:
        silence = row.silent_for_s(timezone.now())
        raise InUseError(
            f"Router {row.name} sent a heartbeat {silence:.0f} s ago and serves requests. Stop it first; it counts as "
            f"lost {LOST_AFTER_S:.0f} s after its last heartbeat."
        )
    before = {"admin_url": row.admin_url, "version": row.version, "running_number": row.running_number}
    summary = f"Router {row.name} was removed; its last heartbeat was at {row.last_seen_at:%d %b %Y %H:%M:%S} UTC."
    record_event(EventKind.ROUTER_REMOVED, summary, by=by, detail={"before": before, "after": None}, reason=reason)
    row.delete()


# --- pushes ---------------------------------------------------------------------------------------------


@transaction.atomic
def claim_pushes(desired: ConfigSnapshot, *, router_id: int | None = None) -> list[Router]:
    """Claim the routers that need a push or a probe for 10 s, so that no other worker sends the same.

    Those are routers that, as far as is known, do not run ``desired``, whose configuration's signature needs renewal,
    or that have sent no heartbeat for 15 s.
    """
    now = timezone.now()
    outdated = ~Q(running_number=desired.number, running_sha256=desired.sha256) | Q(running_number=None)
    silent = Q(last_seen_at__lt=now - timedelta(seconds=PROBE_AFTER_S))
    unsent = Q(pushed_number=None) | ~Q(pushed_number=desired.number)
    due = unsent | Q(push_after=None) | Q(push_after__lte=now)
    rows = Router.objects.select_for_update(no_key=True, skip_locked=True)
    rows = rows.filter(outdated | silent | needing_renewal(now), due)
    claimed = list(rows if router_id is None else rows.filter(pk=router_id))
    lease = now + timedelta(seconds=LEASE_S)
    Router.objects.filter(pk__in=[row.pk for row in claimed]).update(pushed_number=desired.number, push_after=lease)
    return claimed


@transaction.atomic
def record_ack(router_id: int, *, number: int, sha256: str, signature: Signature | None = None) -> None:
    """A router acknowledged a snapshot. Callers call ``advance_rollouts`` once after all responses."""
    router = _lock_responding(router_id, number, pause_s=None)
    if router is None:
        return
    if router.running_number is None or number >= router.running_number or not _has_just_acknowledged(router):
        _set_running(router, number, sha256)
        router.last_ack_at, router.last_nack = timezone.now(), None
        _set_signature(router, signature)
    router.save()


@transaction.atomic
def record_nack(router_id: int, *, number: int, path: str, reason: str, running_number: int | None) -> None:
    """A router rejected a snapshot: an event the first time. The number is pushed again after a pause.

    Callers call ``advance_rollouts`` once after all responses. A router that runs this number or a higher one with
    another digest has it from a lost database: a new snapshot with a higher number follows.
    """
    router = _lock_responding(router_id, number, pause_s=REJECTED_PAUSE_S)
    if router is None:
        return
    nack = {"revision": number, "path": path[:500], "reason": reason[:500]}
    last_nack = router.last_nack or {}
    if any(last_nack.get(key) != value for key, value in nack.items()):
        summary = f"Router {router.name} rejected configuration {number}: {nack['path']}: {nack['reason']}"
        record_event(EventKind.CONFIG_REJECTED, summary, router=router, detail=nack)
    router.last_nack = {**nack, "at": timezone.now().isoformat()}
    router.save()
    newest = newest_snapshot()
    if newest and newest.number == number and number <= (running_number or 0) < MAX_NUMBER:
        reason = f"router {router.name} runs number {running_number} of another database"
        freeze_snapshot(reason=reason, above=running_number or 0)


@transaction.atomic
def record_unreachable(router_id: int, *, number: int, reason: str) -> None:
    """A push failed; the next attempt follows after 5, 10, then 20 seconds, or with a newer number."""
    router = _lock(router_id)
    if router is None:
        return
    router.push_failures += 1
    router.last_error = reason[:500]
    _release_claim(router, number, pause_s=min(5.0 * 2.0 ** min(router.push_failures - 1, 8), MAX_PAUSE_S))
    router.save()


def _lock_responding(router_id: int, number: int, *, pause_s: float | None) -> Router | None:
    """The locked row of a router that responded to a push; None if it was removed."""
    router = _lock(router_id)
    if router is not None:
        _mark_seen(router)
        _release_claim(router, number, pause_s=pause_s)
        router.push_failures, router.last_error = 0, ""
    return router


def _lock(router_id: int) -> Router | None:
    return Router.objects.select_for_update(no_key=True).filter(pk=router_id).first()


def _release_claim(router: Router, number: int, *, pause_s: float | None) -> None:
    """End the claim on ``number``; a claim on a newer one stays."""
    if router.pushed_number == number:
        router.push_after = None if pause_s is None else timezone.now() + timedelta(seconds=pause_s)


def _has_just_acknowledged(router: Router) -> bool:
    return router.last_ack_at is not None and timezone.now() - router.last_ack_at < timedelta(seconds=5)


def _mark_seen(router: Router) -> None:
    router.last_seen_at = timezone.now()
    if router.lost_at is not None:
        router.lost_at = None
        record_event(EventKind.ROUTER_JOINED, f"Router {router.name} is connected again.", router=router)


def _set_running(router: Router, number: int | None, sha256: str) -> None:
    if number is not None and not router.runs(number, sha256):
        detail = {"before": router.running_number, "after": number, "sha256": sha256}
        summary = f"Router {router.name} runs configuration {number}."
        record_event(EventKind.CONFIG_APPLIED, summary, router=router, detail=detail)
    router.running_number, router.running_sha256 = number, sha256


def _set_signature(router: Router, signature: Signature | None) -> None:
    expires_at = signature.expires_at if signature else None
    router.signature_state = signature.state if signature else ""
    router.signature_key = (signature.key if signature else None) or ""
    router.signature_expires_at = None if expires_at is None else datetime.fromtimestamp(expires_at, UTC)


# --- events of routers ----------------------------------------------------------------------------------

SUMMARIES = {
    EventKind.ROUTER_STARTED: "Router {router} started.",
    EventKind.CONFIG_LOADED: "Router {router} started with configuration {revision} ({source}).",
    EventKind.CONFIG_REJECTED: "Router {router} could not start with its file: {path}: {reason}",
    EventKind.REPLICA_EJECTED: "Router {router} ejected replica {replica}: {reason}.",
    EventKind.REPLICA_READMITTED: "Router {router} readmitted replica {replica}.",
    EventKind.REPLICA_UNREACHABLE: "Router {router} cannot reach replica {replica}: {reason}.",
    EventKind.REPLICA_REACHABLE: "Router {router} reaches replica {replica} again.",
}
KINDS: dict[str, EventKind] = {kind.value: kind for kind in SUMMARIES}


class Report(msgspec.Struct, frozen=True):
    """One event as a router sends it; ``at`` is Unix time by the router's clock."""

    boot: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern="^[^\\x00]*$")]
    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    at: float
    kind: Annotated[str, msgspec.Meta(max_length=64)]
    facts: dict[str, Annotated[str, msgspec.Meta(max_length=500)]] = {}


def _record_reports(router: Router, events: Sequence[Any], *, sent_at: float | None) -> None:
    """Record the events that were not recorded before. The caller locked the router's row.

    ``sent_at`` is when the heartbeat was sent by the router's clock, which corrects a wrong clock. An invalid event is
    dropped, so that the router does not resend it forever.
    """
    reports = [report for event in events if (report := _parse(event, router)) is not None]
    if not reports:
        return
    boots = {report.boot for report in reports}
    recorded = set(RouterReport.objects.filter(router=router, boot__in=boots).values_list("boot", "seq"))
    new = {(report.boot, report.seq): report for report in reports if (report.boot, report.seq) not in recorded}
    RouterReport.objects.bulk_create(RouterReport(router=router, boot=boot, seq=seq) for boot, seq in new)
    names = {report.facts.get("replica") for report in new.values()} - {None}
    rows = Replica.objects.filter(name__in=names).select_related("pool") if names else ()
    replicas = {(row.pool.name, row.name): row for row in rows}
    now = timezone.now()
    for report in new.values():
        kind = KINDS.get(report.kind, EventKind.ROUTER_REPORTED)
        facts = {name: text.replace("\0", "") for name, text in report.facts.items()}
        replica = replicas.get((facts.get("pool", ""), facts.get("replica", "")))
        record_event(
            kind,
            _summary(kind, router, report.kind, facts),
            pool=replica.pool if replica else None,
            replica=replica,
            router=router,
            detail={**facts, "boot": report.boot, "seq": report.seq},
            at=_event_time(report.at, sent_at, now),
        )


def _parse(event: Any, router: Router) -> Report | None:
    try:
        return msgspec.convert(event, Report)
    except msgspec.ValidationError as error:
        log.warning("router_event_invalid: router %s: %s", router.name, error)
        return None


def _summary(kind: EventKind, router: Router, reported_kind: str, facts: dict[str, str]) -> str:
    """The event's text; a missing fact is a dash."""
    if kind is EventKind.ROUTER_REPORTED:
        text = ", ".join(f"{name} {value}" for name, value in sorted(facts.items()))
        return f"Router {router.name} reported {reported_kind.replace(chr(0), '')}: {text}"[:500]
    return SUMMARIES[kind].format_map(defaultdict(lambda: "-", facts, router=router.name))[:500]


def _event_time(at: float, sent_at: float | None, now: datetime) -> datetime:
    """The event's time by our clock, from its age by the router's clock."""
    age_s = (sent_at if sent_at is not None else now.timestamp()) - at
    age_s = 0.0 if math.isnan(age_s) else min(max(age_s, 0.0), MAX_EVENT_AGE.total_seconds())
    return datetime.fromtimestamp(now.timestamp() - age_s, UTC)
