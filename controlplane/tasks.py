"""What the worker does for the control plane: bring routers to the configuration that they should run, and replicas to
what their sources find.

Theory of operation. Level-triggered: each run compares what every router runs, as far as it told us, with the newest
snapshot, and sends that to those that differ or have fallen silent. So it does not matter which wake-up, push or
acknowledgement was lost, or how many workers and beats there are: a push is claimed before it is sent, routers refuse
what is older than what they run, and acknowledgements are recorded by conditional updates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait

from celery import shared_task
from django.conf import settings
from django.utils import timezone

from controlplane.discovery import PollError, PollResult, poll
from controlplane.egress import fleet_rules, guarded_client
from controlplane.isolation import isolated_items
from controlplane.models import ConfigSnapshot, PeriodicTask, ReplicaSource, Router
from controlplane.push.client import Ack, Nack, Unreachable, deliver, sign
from controlplane.services.access.people import delete_ended_sessions
from controlplane.services.audit_log import check_audit_daily
from controlplane.services.discovery.adoption import claim_polls, record_poll, record_poll_failure
from controlplane.services.discovery.reconcile import reconcile_source
from controlplane.services.events import reset_foreign_events
from controlplane.services.idempotency import delete_expired_records
from controlplane.services.policies.rollouts import advance_rollouts
from controlplane.services.routers import (
    claim_pushes,
    mark_lost_routers,
    record_ack,
    record_nack,
    record_unreachable,
)
from controlplane.services.snapshots import newest_snapshot, snapshot_document
from controlplane.services.worker_liveness import record_worker_seen

PARALLEL = 32  # pushes at once; one that hangs delays nobody else


@shared_task(acks_late=True, ignore_result=True)
def reconcile_routers() -> None:
    """Push to every router that runs something else or has fallen silent; note those that are lost."""
    record_worker_seen(timezone.now())
    with isolated_items(PeriodicTask.CONFIG_PUSHES) as item:
        with item("push"):
            _push(None)
        with item("lost routers"):
            mark_lost_routers()


@shared_task(acks_late=True, ignore_result=True)
def push_config(router_id: int) -> None:
    """Push to one router, if it needs it."""
    _push(router_id)


@shared_task(acks_late=True, ignore_result=True)
def tidy() -> None:
    """Drop what was kept for repeated requests longer than a day, and sessions that are over; bring restored events
    into order.
    """
    with isolated_items(PeriodicTask.HOUSEKEEPING) as item:
        for cleanup in (delete_expired_records, delete_ended_sessions, reset_foreign_events):
            with item(cleanup.__name__):
                cleanup()


@shared_task(acks_late=True, ignore_result=True)
def check_audit_log() -> None:
    """Once a day, walk along the audit log's chain."""
    check_audit_daily(timezone.now())


def _push(router_id: int | None) -> None:
    desired = newest_snapshot()
    claimed = claim_pushes(desired, router_id=router_id) if desired else []
    if desired and claimed:
        _deliver_to_all(claimed, desired)


def _deliver_to_all(routers: Sequence[Router], desired: ConfigSnapshot) -> None:
    """Send concurrently; record each answer as it comes, in this thread, which alone uses the database.

    What answers mean for rollouts is looked at once for all that have come in the meantime.
    """
    document, token = sign(snapshot_document(desired), timezone.now()), settings.ROUTER_ADMIN_TOKEN
    with (
        isolated_items(PeriodicTask.CONFIG_PUSHES) as item,
        guarded_client(fleet_rules()) as http,
        ThreadPoolExecutor(min(PARALLEL, len(routers))) as threads,
    ):
        sent: dict[Future[Ack | Nack | Unreachable], Router] = {
            threads.submit(deliver, http, router, desired, document, token): router for router in routers
        }
        waiting: Collection[Future[Ack | Nack | Unreachable]] = sent
        while waiting:
            answered, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for answer in answered:
                with item(sent[answer].name):
                    _record(sent[answer].pk, desired, answer.result())
            advance_rollouts()


def _record(router_id: int, sent: ConfigSnapshot, outcome: Ack | Nack | Unreachable) -> None:
    match outcome:
        case Ack(number, sha256, signature):
            record_ack(router_id, number=number, sha256=sha256, signature=signature)
        case Nack(path, reason, running_number):
            record_nack(router_id, number=sent.number, path=path, reason=reason, running_number=running_number)
        case Unreachable(reason):
            record_unreachable(router_id, number=sent.number, reason=reason)


# --- replica sources --------------------------------------------------------------------------------------


@shared_task(acks_late=True, ignore_result=True)
def poll_sources() -> None:
    """Look at every source that is due, at once; bring replicas in line with each answer as it comes."""
    claimed = claim_polls()
    if not claimed:
        return
    with isolated_items(PeriodicTask.REPLICA_SOURCES) as item, ThreadPoolExecutor(len(claimed)) as threads:
        looks: dict[Future[PollResult | PollError], ReplicaSource] = {
            threads.submit(poll, source): source for source in claimed
        }
        for done in as_completed(looks):
            with item(looks[done].name):
                _note(looks[done], done.result())


def _note(source: ReplicaSource, outcome: PollResult | PollError) -> None:
    if isinstance(outcome, PollError):
        record_poll_failure(source, str(outcome))
    elif record_poll(source, outcome):
        reconcile_source(source.pk)
