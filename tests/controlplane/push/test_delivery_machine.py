"""Stateful test: configuration numbers only grow and all routers converge, whatever happens to messages.

Services, a router's configuration store and its files are real. The simulated network may deliver any message at
any time, more than once, or never. The control plane keeps no state in memory, so a restart is simulated by a
reconciliation that ends after it claimed pushes and before it sent them.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import hypothesis.strategies as st
import pytest
from django.db import transaction
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from controlplane.models import ConfigSnapshot, Router
from controlplane.services.fleet.pools import create_pool
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollouts import advance_rollouts
from controlplane.services.routers import announce, claim_pushes, record_ack, record_nack, record_unreachable
from controlplane.services.snapshots import newest_snapshot, snapshot_document
from tests.controlplane.push.real_store import Response, StoredRouter

ROUTERS = 3
T = TypeVar("T")


@dataclass
class Network:
    """Messages in transit. A delivered message stays, so that it can arrive again."""

    pushes: list[tuple[StoredRouter, bytes, int, str]] = field(default_factory=list)
    responses: list[tuple[StoredRouter, Response]] = field(default_factory=list)
    heartbeats: list[dict[str, object]] = field(default_factory=list)


def some_of(messages: list[T]) -> st.SearchStrategy[list[T]]:
    """One to four of the messages."""
    return st.lists(st.sampled_from(messages), min_size=1, max_size=4)


class Delivery(RuleBasedStateMachine):
    """One run, in a transaction that is rolled back."""

    def __init__(self) -> None:
        super().__init__()
        self._transaction = transaction.atomic()
        self._transaction.__enter__()
        self._folder = tempfile.TemporaryDirectory(prefix="wpd-")
        self._loop = asyncio.new_event_loop()
        self.routers = [
            StoredRouter(f"router-{number}", Path(self._folder.name), self._loop) for number in range(ROUTERS)
        ]
        self.network = Network()
        self.published = 0

    @initialize()
    def begin(self) -> None:
        self.policy = create_pool("default", strategy="round_robin").policies.get(group=None)
        for router in self.routers:
            announce(**router.heartbeat())
        self.reconcile()
        self.publish()
        self.reconcile()  # so that an older and a newer push are in transit

    def teardown(self) -> None:
        try:
            self._deliver_everything()
        finally:
            transaction.set_rollback(True)
            self._transaction.__exit__(None, None, None)
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._folder.cleanup()

    @rule()
    def publish(self) -> None:
        self.published += 1
        draft = save_draft(self.policy, {"strategy": "prefix_hash", "slack_s": 1 + self.published / 100})
        publish_revision(draft.pk)

    @rule()
    def reconcile(self) -> None:
        """Claim and send pushes, which may be lost."""
        desired = newest_snapshot()
        document = snapshot_document(desired)
        by_name = {router.name: router for router in self.routers}
        for row in claim_pushes(desired):
            self.network.pushes.append((by_name[row.name], document, desired.number, desired.sha256))

    @rule()
    def the_control_plane_stops_between_claim_and_push(self) -> None:
        """The claims stay until they expire."""
        claim_pushes(newest_snapshot())

    @rule()
    def pass_time(self) -> None:
        """End every pause and every claim."""
        Router.objects.update(push_after=None, last_ack_at=None)

    @precondition(lambda self: self.network.pushes)
    @rule(data=st.data())
    def pushes_arrive(self, data: st.DataObject) -> None:
        """In any order, and some pushes more than once."""
        for router, document, number, sha256 in data.draw(some_of(self.network.pushes)):
            self.network.responses.append((router, router.receive_push(document, number, sha256)))
            self.numbers_only_grow()

    @precondition(lambda self: self.network.pushes)
    @rule(data=st.data())
    def a_push_times_out(self, data: st.DataObject) -> None:
        router, _, number, _ = data.draw(st.sampled_from(self.network.pushes))
        record_unreachable(self._row(router).pk, number=number, reason="no response")

    @precondition(lambda self: self.network.responses)
    @rule(data=st.data())
    def responses_arrive(self, data: st.DataObject) -> None:
        for router, response in data.draw(some_of(self.network.responses)):
            self._record(router, response)

    @rule(data=st.data())
    def a_heartbeat_is_sent(self, data: st.DataObject) -> None:
        self.network.heartbeats.append(data.draw(st.sampled_from(self.routers)).heartbeat())

    @precondition(lambda self: self.network.heartbeats)
    @rule(data=st.data())
    def a_heartbeat_arrives(self, data: st.DataObject) -> None:
        announce(**data.draw(st.sampled_from(self.network.heartbeats)))

    @rule(data=st.data(), keeps_disk=st.booleans())
    def a_router_restarts(self, data: st.DataObject, keeps_disk: bool) -> None:
        data.draw(st.sampled_from(self.routers)).restart(keeps_disk=keeps_disk)

    @rule(data=st.data())
    def a_router_starts_or_stops_rejecting(self, data: st.DataObject) -> None:
        router = data.draw(st.sampled_from(self.routers))
        router.rejects = not router.rejects

    @invariant()
    def numbers_only_grow(self) -> None:
        for router in self.routers:
            assert not router.running or router.running[0] == router.peak

    @invariant()
    def the_running_configuration_is_on_disk(self) -> None:
        for router in self.routers:
            assert router.stored_document == (router.applied.snapshot.document if router.applied else None)

    @invariant()
    def recorded_numbers_belong_to_snapshots(self) -> None:
        digests = dict(ConfigSnapshot.objects.values_list("number", "sha256"))
        for row in Router.objects.exclude(running_number=None):
            assert digests[row.running_number] == row.running_sha256

    def _deliver_everything(self) -> None:
        """Deliver every message in order; all routers converge within two rounds."""
        for router in self.routers:
            router.rejects = False
        for _ in range(2):
            self.pass_time()
            for router in self.routers:
                announce(**router.heartbeat())
            self.network = Network()
            self.reconcile()
            for router, document, number, sha256 in self.network.pushes:
                self._record(router, router.receive_push(document, number, sha256))
        newest = newest_snapshot()
        assert {router.running for router in self.routers} == {(newest.number, newest.sha256)}
        assert set(Router.objects.values_list("running_number", flat=True)) == {newest.number}

    def _record(self, router: StoredRouter, response: Response) -> None:
        kind, number, sha256, reason, running = response
        if kind == "ack":
            record_ack(self._row(router).pk, number=number, sha256=sha256)
        else:
            record_nack(self._row(router).pk, number=number, path="$", reason=reason, running_number=running)
        advance_rollouts()

    def _row(self, router: StoredRouter) -> Router:
        return Router.objects.get(name=router.name)


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(300)
def test_numbers_only_grow_and_all_routers_converge_whatever_happens_to_messages() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    without_shrinking = [Phase.explicit, Phase.generate]  # shrinking a counterexample takes many times as long
    run_settings = settings(
        max_examples=10,
        stateful_step_count=25,
        phases=without_shrinking,
        deadline=None,
        derandomize=True,
        suppress_health_check=checks,
    )
    run_state_machine_as_test(Delivery, settings=run_settings)
