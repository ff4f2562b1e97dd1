"""What routers tell of themselves and of replicas, each event taken into the timeline once.

Routers, as they announce themselves and answer what is pushed to them.

Theory of operation. Every fact about a router is written by a conditional update, so that late, repeated and
reordered reports do no harm: an acknowledgement older than what is known changes nothing, and an event is recorded
by whoever made the change. ``pushed_number`` and ``push_after`` say what was last sent and until when it need not be
sent again; a newer number never waits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.celery import wake
from controlplane.errors import InUseError, InvalidError
from controlplane.isolation import isolated_items
from controlplane.models import ConfigSnapshot, EventKind, PeriodicTask, Replica, Router, RouterReport
from controlplane.models.fleet import LONG_NAME
from controlplane.push.client import Signature, needing_renewal
from controlplane.services.checks import check_name
from controlplane.services.events import record_event
from controlplane.services.policies.rollouts import advance_rollouts
from controlplane.services.snapshots import freeze_snapshot, newest_snapshot
from routing.schema import ConfigError, check_base_url

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


LOST_AFTER_S = 30.0  # of silence
PROBE_AFTER_S = 15.0  # of silence: a heartbeat comes every 10 s
LEASE_S = 10.0  # longer than a push may take
REFUSED_PAUSE_S = 20.0  # a refused number is offered again: its router may have been mended
LONGEST_PAUSE_S = 20.0  # between two tries to reach a router
HIGHEST_NUMBER = 2**53  # beyond it JSON readers lose digits


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
    """Note a router's heartbeat, and take what it tells of; a new one gets its row here, and one that runs something
    else is pushed to at once.

    ``warming`` is how far each replica is that it warms up; None: it warms none. ``signature`` is what it says of that
    of its configuration; None: nothing. InvalidError for a name or URL that cannot be one.
    """
    check_name(name, LONG_NAME, "$.name")
    _check_urls(admin_url, data_url)
    told: dict[str, Any] = {"boot": boot, "version": version, "admin_url": admin_url, "data_url": data_url}
    router, is_new = Router.objects.select_for_update(no_key=True).get_or_create(
        name=name, defaults={**told, "last_seen_at": timezone.now()}
    )
    if is_new:
        record_event(EventKind.ROUTER_JOINED, f"Router {name} joined.", router=router, detail=told)
    restarted = router.boot != boot
    for field, value in told.items():
        setattr(router, field, value)
    router.warming = dict(warming or {})
    _note_signature(router, signature)
    _seen(router)
    if restarted or _may_be_told(router, revision):
        _note_running(router, revision, sha256 or "")
    if restarted or router.push_failures:
        router.push_after = None  # it is here now, whatever kept it from answering before
    router.save()
    record_reports(router, events, sent_at=sent_at)
    _wake_push(router)
    advance_rollouts()
    return router


@transaction.atomic
def record_ack(router_id: int, *, number: int, sha256: str, signature: Signature | None = None) -> None:
    """A router acknowledged a snapshot; an acknowledgement older than what is known changes nothing.

    What it means for rollouts is for ``advance_rollouts`` to say, once for all that answered.
    """
    router = _locked(router_id)
    if router is None:
        return
    _seen(router)
    _release(router, number, pause_s=None)
    router.push_failures, router.last_error = 0, ""
    if router.running_number is None or number >= router.running_number or not _acked_just_now(router):
        _note_running(router, number, sha256)
        router.last_ack_at, router.last_nack = timezone.now(), None
        _note_signature(router, signature)
    router.save()


@transaction.atomic
def record_nack(router_id: int, *, number: int, path: str, reason: str, running_number: int | None) -> None:
    """A router refused a snapshot. The refusal is an event once; the number is offered again after a pause.

    What it means for rollouts is for ``advance_rollouts`` to say. A router that runs a number at or above ours, of
    another digest, got it from a database that is gone: a fresh snapshot is numbered above it, so that it converges
    again.
    """
    router = _locked(router_id)
    if router is None:
        return
    _seen(router)
    _release(router, number, pause_s=REFUSED_PAUSE_S)
    router.push_failures, router.last_error = 0, ""
    refusal = {"revision": number, "path": path[:500], "reason": reason[:500]}
    known = router.last_nack or {}
    if any(known.get(key) != value for key, value in refusal.items()):
        summary = f"Router {router.name} refused configuration {number}: {refusal['path']}: {refusal['reason']}"
        record_event(EventKind.CONFIG_REFUSED, summary, router=router, detail=refusal)
    router.last_nack = {**refusal, "at": timezone.now().isoformat()}
    router.save()
    newest = newest_snapshot()
    if newest and newest.number == number and number <= (running_number or 0) < HIGHEST_NUMBER:
        freeze_snapshot(reason=f"router {router.name} ran number {running_number} already", above=running_number or 0)


@transaction.atomic
def record_unreachable(router_id: int, *, number: int, reason: str) -> None:
    """A push did not arrive; the next try waits 5, 10, then 20 seconds, unless there is a newer number."""
    router = _locked(router_id)
    if router is None:
        return
    router.push_failures += 1
    router.last_error = reason[:500]
    _release(router, number, pause_s=min(5.0 * 2.0 ** min(router.push_failures - 1, 8), LONGEST_PAUSE_S))
    router.save()


@transaction.atomic
def mark_lost_routers() -> int:
    """Record ``router_lost``, once, for each router silent for more than 30 s; how many there were."""
    silent = Q(lost_at=None, last_seen_at__lt=timezone.now() - timedelta(seconds=LOST_AFTER_S))
    lost = list(Router.objects.select_for_update(no_key=True, skip_locked=True).filter(silent))
    with isolated_items(PeriodicTask.CONFIG_PUSHES) as item:
        for router in lost:
            with item(f"{router.name} is lost"), transaction.atomic():
                router.lost_at = timezone.now()
                router.save()
                seen = router.last_seen_at.isoformat(timespec="seconds")
                record_event(EventKind.ROUTER_LOST, f"Router {router.name} is silent since {seen}.", router=router)
    advance_rollouts()
    return len(lost)


@transaction.atomic
def remove_router(router: Router, *, by: User | None = None, reason: str = "") -> None:
    """Forget a router that is gone for good; its events stay. InUseError while it is heard of.

    One that was only away announces itself again and is then a new router of the same name.
    """
    row = _locked(router.pk)
    if row is None:
        return
    if row.lost_at is None:
        silence = row.silent_for_s(timezone.now())
        raise InUseError(
            f"Router {row.name} was heard of {silence:.0f} s ago and serves. Stop it first; it counts as lost after "
            f"{LOST_AFTER_S:.0f} s of silence."
        )
    before = {"admin_url": row.admin_url, "version": row.version, "running_number": row.running_number}
    summary = f"Router {row.name} was removed; it was silent since {row.last_seen_at.isoformat(timespec='seconds')}."
    record_event(EventKind.ROUTER_REMOVED, summary, by=by, detail={"before": before, "after": None}, reason=reason)
    row.delete()


@transaction.atomic
def claim_pushes(desired: ConfigSnapshot, *, router_id: int | None = None) -> list[Router]:
    """The routers that need a push or a look, each claimed for 10 s, so that nobody else sends the same.

    A router needs one when, as far as is known, it does not run ``desired``, when the signature of what it runs wants
    to be renewed, or when it has been silent for 15 s.
    """
    now = timezone.now()
    rows = Router.objects.select_for_update(no_key=True, skip_locked=True).filter(_needing(desired), _due(desired))
    if router_id is not None:
        rows = rows.filter(pk=router_id)
    claimed = list(rows)
    lease = now + timedelta(seconds=LEASE_S)
    Router.objects.filter(pk__in=[row.pk for row in claimed]).update(pushed_number=desired.number, push_after=lease)
    return claimed


def _wake_push(router: Router) -> None:
    newest = newest_snapshot()
    if newest and not router.runs(newest.number, newest.sha256):
        wake("controlplane.tasks.push_config", router.pk)


def _needing(desired: ConfigSnapshot) -> Q:
    drifted = ~Q(running_number=desired.number, running_sha256=desired.sha256) | Q(running_number=None)
    silent = Q(last_seen_at__lt=timezone.now() - timedelta(seconds=PROBE_AFTER_S))
    return drifted | silent | needing_renewal(timezone.now())


def _due(desired: ConfigSnapshot) -> Q:
    unsent = Q(pushed_number=None) | ~Q(pushed_number=desired.number)
    return unsent | Q(push_after=None) | Q(push_after__lte=timezone.now())


def _seen(router: Router) -> None:
    router.last_seen_at = timezone.now()
    if router.lost_at is not None:
        router.lost_at = None
        record_event(EventKind.ROUTER_JOINED, f"Router {router.name} is back.", router=router)


def _note_running(router: Router, number: int | None, sha256: str) -> None:
    if number is not None and not router.runs(number, sha256):
        detail = {"before": router.running_number, "after": number, "sha256": sha256}
        summary = f"Router {router.name} runs configuration {number}."
        record_event(EventKind.CONFIG_APPLIED, summary, router=router, detail=detail)
    router.running_number, router.running_sha256 = number, sha256


def _note_signature(router: Router, told: Signature | None) -> None:
    ends = None if told is None or told.expires_at is None else datetime.fromtimestamp(told.expires_at, UTC)
    router.signature_state = told.state if told else ""
    router.signature_key = (told.key if told else None) or ""
    router.signature_expires_at = ends


def _may_be_told(router: Router, revision: int | None) -> bool:
    """A heartbeat that left before an acknowledgement may arrive after it; such a one is not believed."""
    return (revision or 0) >= (router.running_number or 0) or not _acked_just_now(router)


def _acked_just_now(router: Router) -> bool:
    return router.last_ack_at is not None and timezone.now() - router.last_ack_at < timedelta(seconds=5)


def _release(router: Router, number: int, *, pause_s: float | None) -> None:
    """End the claim on ``number``; a claim on a newer one stands."""
    if router.pushed_number == number:
        router.push_after = None if pause_s is None else timezone.now() + timedelta(seconds=pause_s)


def _locked(router_id: int) -> Router | None:
    """The row, locked; None when it was removed meanwhile."""
    return Router.objects.select_for_update(no_key=True).filter(pk=router_id).first()


def _check_urls(admin_url: str, data_url: str) -> None:
    for path, url in (("$.admin_url", admin_url), ("$.data_url", data_url)):
        if path == "$.data_url" and not url:
            continue
        try:
            check_base_url(url, path)
        except ConfigError as error:
            raise InvalidError(error.path, error.reason) from None
