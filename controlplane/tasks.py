"""Celery tasks: push configurations to routers, poll replica sources, and housekeeping.

Theory of operation. The reconciler is level-triggered: each run compares the configuration that every router last
reported with the newest one, and pushes the newest to those that differ or fell silent. Lost wake-ups, pushes and
acknowledgements therefore only cost time, and any number of workers and beats may run: a push is claimed before it is
sent, routers reject configurations older than their own, and acknowledgements are recorded by conditional updates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait

from celery import shared_task
from django.conf import settings
from django.utils import timezone

from controlplane.discovery import PollError, PollResult, poll
from controlplane.egress import fleet_rules, guarded_client
from controlplane.isolation import isolated_items, record_worker_seen, worker_silence_s
from controlplane.models import ConfigSnapshot, PeriodicTask, ReplicaSource, Router
from controlplane.push.client import Ack, Nack, Unreachable, deliver, sign
from controlplane.services.access.users import delete_ended_sessions
from controlplane.services.audit_log import check_audit_daily
from controlplane.services.discovery.adoption import claim_polls, record_poll, record_poll_failure
from controlplane.services.discovery.reconcile import reconcile_source
from controlplane.services.events import reset_foreign_events
from controlplane.services.idempotency import delete_expired_records
from controlplane.services.policies.rollouts import advance_rollouts
from controlplane.services.retention import (
    delete_expired_configurations,
    delete_expired_events,
    delete_expired_reports,
)
from controlplane.services.routers import (
    PROBE_AFTER_S,
    claim_pushes,
    mark_lost_routers,
    record_ack,
    record_nack,
    record_unreachable,
)
from controlplane.services.snapshots import newest_snapshot, snapshot_document

MAX_PARALLEL_PUSHES = 32  # so that one slow router does not delay the others


@shared_task(acks_late=True, ignore_result=True)
def reconcile_routers() -> None:
    """Push to every router that runs another configuration or fell silent, and mark lost routers.

    A push waits for a router that does not respond, so lost routers are marked first. After an outage, however, every
    router is silent until it is probed.
    """
    now = timezone.now()
    silence_s = worker_silence_s(now)
    record_worker_seen(now)
    with isolated_items(PeriodicTask.CONFIG_PUSHES) as item:
        if silence_s is not None and silence_s <= PROBE_AFTER_S:
            with item("lost routers"):
                mark_lost_routers()
        with item("push"):
            _push(None)
        with item("lost routers"):
            mark_lost_routers()


@shared_task(acks_late=True, ignore_result=True)
def push_config(router_id: int) -> None:
    """Push to one router, unless it runs the newest configuration."""
    _push(router_id)


@shared_task(acks_late=True, ignore_result=True)
def clean_up() -> None:
    """Delete what is older than its retention, and renumber restored events."""
    with isolated_items(PeriodicTask.HOUSEKEEPING) as item:
        for cleanup in (
            delete_expired_records,
            delete_ended_sessions,
            delete_expired_events,
            delete_expired_reports,
            delete_expired_configurations,
            reset_foreign_events,
        ):
            with item(cleanup.__name__):
                cleanup()


@shared_task(acks_late=True, ignore_result=True)
def check_audit_log() -> None:
    """Verify the audit log's chain once a day."""
    check_audit_daily(timezone.now())


def _push(router_id: int | None) -> None:
    desired = newest_snapshot()
    claimed = claim_pushes(desired, router_id=router_id) if desired else []
    if desired and claimed:
        _deliver_to_all(claimed, desired)


def _deliver_to_all(routers: Sequence[Router], desired: ConfigSnapshot) -> None:
    """Push to all routers concurrently. Only this thread uses the database: it records each response on arrival, and
    advances rollouts once for all responses that arrived meanwhile.
    """
    document, token = sign(snapshot_document(desired), timezone.now()), settings.ROUTER_ADMIN_TOKEN
    with (
        isolated_items(PeriodicTask.CONFIG_PUSHES) as item,
        guarded_client(fleet_rules()) as http,
        ThreadPoolExecutor(min(MAX_PARALLEL_PUSHES, len(routers))) as threads,
    ):
        pushes: dict[Future[Ack | Nack | Unreachable], Router] = {
            threads.submit(deliver, http, router, desired, document, token): router for router in routers
        }
        pending: Collection[Future[Ack | Nack | Unreachable]] = pushes
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for push in done:
                with item(pushes[push].name):
                    _record(pushes[push].pk, desired, push.result())
            advance_rollouts()


def _record(router_id: int, sent: ConfigSnapshot, response: Ack | Nack | Unreachable) -> None:
    match response:
        case Ack(number, sha256, signature):
            record_ack(router_id, number=number, sha256=sha256, signature=signature)
        case Nack(path, reason, running_number):
            record_nack(router_id, number=sent.number, path=path, reason=reason, running_number=running_number)
        case Unreachable(reason):
            record_unreachable(router_id, number=sent.number, reason=reason)


@shared_task(acks_late=True, ignore_result=True)
def poll_sources() -> None:
    """Poll every replica source that is due, concurrently, and reconcile its replicas with each result."""
    claimed = claim_polls()
    if not claimed:
        return
    with isolated_items(PeriodicTask.REPLICA_SOURCES) as item, ThreadPoolExecutor(len(claimed)) as threads:
        polls: dict[Future[PollResult | PollError], ReplicaSource] = {
            threads.submit(poll, source): source for source in claimed
        }
        for done in as_completed(polls):
            source = polls[done]
            with item(source.name):
                result = done.result()
                if isinstance(result, PollError):
                    record_poll_failure(source, str(result))
                elif record_poll(source, result):
                    reconcile_source(source.pk)
