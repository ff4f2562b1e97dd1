"""R4 as a model: whatever order messages are sent, lost, repeated and delayed in, numbers only grow and all converge.

The services are the real ones, and so are a router's store and its files. The network is a bag of messages, from which
any may be taken at any time, more than once, or never. The control plane keeps nothing in memory, so that its restart
is a tick that ends after it claimed and before it sent.
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
from tests.controlplane.push.real_store import Answer, StoredRouter

ROUTERS = 3
T = TypeVar("T")


@dataclass
class Network:
    """Messages that are under way. They stay in the bag, so that each may arrive again."""

    pushes: list[tuple[StoredRouter, bytes, int, str]] = field(default_factory=list)
    answers: list[tuple[StoredRouter, Answer]] = field(default_factory=list)
    heartbeats: list[dict[str, object]] = field(default_factory=list)


def some_of(messages: list[T]) -> st.SearchStrategy[list[T]]:
    """One to four of them."""
    return st.lists(st.sampled_from(messages), min_size=1, max_size=4)


class Delivery(RuleBasedStateMachine):
    """One run, in a transaction that is taken back."""

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
        self.tick()
        self.publish()
        self.tick()  # so that an older push and a newer one are under way

    def teardown(self) -> None:
        try:
            self._settle()
        finally:
            transaction.set_rollback(True)
            self._transaction.__exit__(None, None, None)
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._folder.cleanup()

    @rule()
    def publish(self) -> None:
        self.published += 1
        draft = save_draft(self.policy, {"strategy": "prefix_hash", "load_factor": 1 + self.published / 100})
        publish_revision(draft.pk)

    @rule()
    def tick(self) -> None:
        """The reconciler sends; whether it arrives is another matter."""
        desired = newest_snapshot()
        document = snapshot_document(desired)
        by_name = {router.name: router for router in self.routers}
        for row in claim_pushes(desired):
            self.network.pushes.append((by_name[row.name], document, desired.number, desired.sha256))

    @rule()
    def a_tick_dies(self) -> None:
        """With the control plane, after it claimed and before it sent."""
        claim_pushes(newest_snapshot())

    @rule()
    def wait(self) -> None:
        """Every pause and every claim is over."""
        Router.objects.update(push_after=None, last_ack_at=None)

    @precondition(lambda self: self.network.pushes)
    @rule(data=st.data())
    def pushes_arrive(self, data: st.DataObject) -> None:
        """In any order, and some of them more than once."""
        for router, document, number, sha256 in data.draw(some_of(self.network.pushes)):
            self.network.answers.append((router, router.take(document, number, sha256)))
            self.numbers_only_grow()

    @precondition(lambda self: self.network.pushes)
    @rule(data=st.data())
    def a_push_is_given_up(self, data: st.DataObject) -> None:
        router, _, number, _ = data.draw(st.sampled_from(self.network.pushes))
        record_unreachable(self._row(router).pk, number=number, reason="no answer")

    @precondition(lambda self: self.network.answers)
    @rule(data=st.data())
    def answers_arrive(self, data: st.DataObject) -> None:
        for router, answer in data.draw(some_of(self.network.answers)):
            self._record(router, answer)

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
    def a_router_changes_its_mind(self, data: st.DataObject) -> None:
        router = data.draw(st.sampled_from(self.routers))
        router.refuses = not router.refuses

    @invariant()
    def numbers_only_grow(self) -> None:
        for router in self.routers:
            assert not router.running or router.running[0] == router.peak

    @invariant()
    def what_runs_is_on_disk(self) -> None:
        for router in self.routers:
            assert router.kept == (router.applied.snapshot.document if router.applied else None)

    @invariant()
    def nothing_is_known_that_was_never_published(self) -> None:
        known = dict(ConfigSnapshot.objects.values_list("number", "sha256"))
        for row in Router.objects.exclude(running_number=None):
            assert known[row.running_number] == row.running_sha256

    def _settle(self) -> None:
        """From now on everything arrives, in order: two rounds must do."""
        for router in self.routers:
            router.refuses = False
        for _ in range(2):
            self.wait()
            for router in self.routers:
                announce(**router.heartbeat())
            self.network = Network()
            self.tick()
            for router, document, number, sha256 in self.network.pushes:
                self._record(router, router.take(document, number, sha256))
        newest = newest_snapshot()
        assert {router.running for router in self.routers} == {(newest.number, newest.sha256)}
        assert set(Router.objects.values_list("running_number", flat=True)) == {newest.number}

    def _record(self, router: StoredRouter, answer: Answer) -> None:
        kind, number, sha256, reason, running = answer
        if kind == "ack":
            record_ack(self._row(router).pk, number=number, sha256=sha256)
        else:
            record_nack(self._row(router).pk, number=number, path="$", reason=reason, running_number=running)
        advance_rollouts()

    def _row(self, router: StoredRouter) -> Router:
        return Router.objects.get(name=router.name)


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(300)
def test_numbers_only_grow_and_all_converge_whatever_becomes_of_messages() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    as_found = [Phase.explicit, Phase.generate]  # to make a counterexample smaller takes many times as long
    chosen = settings(
        max_examples=10,
        stateful_step_count=25,
        phases=as_found,
        deadline=None,
        derandomize=True,
        suppress_health_check=checks,
    )
    run_state_machine_as_test(Delivery, settings=chosen)
