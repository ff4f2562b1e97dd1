"""R4 as a model: whatever order messages are sent, lost, repeated and delayed in, numbers only grow and all converge.

The services are the real ones. A router is the rules of its admin port; the network is a bag of messages, from which
any may be taken at any time, more than once, or never.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from django.db import transaction
from hypothesis import HealthCheck, settings
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
from controlplane.services.rollouts.steering import advance_rollouts
from controlplane.services.routers import announce, claim_pushes, record_ack, record_nack, record_unreachable
from controlplane.services.snapshots import newest_snapshot

ROUTERS = 3


@dataclass
class Simulated:
    """A router: what it runs, and the answer that it gives."""

    name: str
    boot: int = 1
    running: tuple[int, str] | None = None
    disk: tuple[int, str] | None = None
    peak: int = 0  # the highest number since it last lost its disk
    refuses: bool = False

    def take(self, number: int, sha256: str) -> tuple[str, int, str]:
        if self.refuses:
            return "nack", number, sha256
        if self.running and (number, sha256) != self.running and number <= self.running[0]:
            return "conflict", number, sha256
        self.running = self.disk = (number, sha256)
        self.peak = max(self.peak, number)
        return "ack", number, sha256

    def heartbeat(self) -> dict[str, object]:
        number, sha256 = self.running or (None, None)
        told = {"revision": number, "sha256": sha256}
        return {"name": self.name, "boot": f"b{self.boot}", "admin_url": "http://127.0.0.1:1", **told}


@dataclass
class Network:
    """Messages that are under way. They stay in the bag, so that each may arrive again."""

    pushes: list[tuple[Simulated, int, str]] = field(default_factory=list)
    answers: list[tuple[Simulated, str, int, str, int | None]] = field(default_factory=list)
    heartbeats: list[dict[str, object]] = field(default_factory=list)


class Delivery(RuleBasedStateMachine):
    """One run, in a transaction that is taken back."""

    def __init__(self) -> None:
        super().__init__()
        self._transaction = transaction.atomic()
        self._transaction.__enter__()
        self.routers = [Simulated(f"router-{number}") for number in range(ROUTERS)]
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

    @rule()
    def publish(self) -> None:
        self.published += 1
        draft = save_draft(self.policy, {"strategy": "prefix_hash", "load_factor": 1 + self.published / 100})
        publish_revision(draft.pk)

    @rule()
    def tick(self) -> None:
        """The reconciler sends; whether it arrives is another matter."""
        desired = newest_snapshot()
        by_name = {router.name: router for router in self.routers}
        for row in claim_pushes(desired):
            self.network.pushes.append((by_name[row.name], desired.number, desired.sha256))

    @rule()
    def wait(self) -> None:
        """Every pause and every claim is over."""
        Router.objects.update(push_after=None, last_ack_at=None)

    @precondition(lambda self: self.network.pushes)
    @rule(data=st.data())
    def a_push_arrives(self, data: st.DataObject) -> None:
        router, number, sha256 = data.draw(st.sampled_from(self.network.pushes))
        answer = router.take(number, sha256)
        self.network.answers.append((router, *answer, router.running[0] if router.running else None))

    @precondition(lambda self: self.network.pushes)
    @rule(data=st.data())
    def a_push_is_given_up(self, data: st.DataObject) -> None:
        router, number, _ = data.draw(st.sampled_from(self.network.pushes))
        record_unreachable(self._row(router).pk, number=number, reason="no answer")

    @precondition(lambda self: self.network.answers)
    @rule(data=st.data())
    def an_answer_arrives(self, data: st.DataObject) -> None:
        self._record(*data.draw(st.sampled_from(self.network.answers)))

    @rule(data=st.data())
    def a_heartbeat_is_sent(self, data: st.DataObject) -> None:
        self.network.heartbeats.append(data.draw(st.sampled_from(self.routers)).heartbeat())

    @precondition(lambda self: self.network.heartbeats)
    @rule(data=st.data())
    def a_heartbeat_arrives(self, data: st.DataObject) -> None:
        announce(**data.draw(st.sampled_from(self.network.heartbeats)))

    @rule(data=st.data(), keeps_disk=st.booleans())
    def a_router_restarts(self, data: st.DataObject, keeps_disk: bool) -> None:
        router = data.draw(st.sampled_from(self.routers))
        router.boot += 1
        if not keeps_disk:
            router.disk, router.peak = None, 0
        router.running = router.disk

    @rule(data=st.data())
    def a_router_changes_its_mind(self, data: st.DataObject) -> None:
        router = data.draw(st.sampled_from(self.routers))
        router.refuses = not router.refuses

    @invariant()
    def numbers_only_grow(self) -> None:
        for router in self.routers:
            assert not router.running or router.running[0] == router.peak

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
            for router, number, sha256 in self.network.pushes:
                answer = router.take(number, sha256)
                self._record(router, *answer, router.running[0] if router.running else None)
        newest = newest_snapshot()
        assert {router.running for router in self.routers} == {(newest.number, newest.sha256)}
        assert set(Router.objects.values_list("running_number", flat=True)) == {newest.number}

    def _record(self, router: Simulated, kind: str, number: int, sha256: str, running: int | None) -> None:
        if kind == "ack":
            record_ack(self._row(router).pk, number=number, sha256=sha256)
        else:
            record_nack(self._row(router).pk, number=number, path="$", reason=kind, running_number=running)
        advance_rollouts()

    def _row(self, router: Simulated) -> Router:
        return Router.objects.get(name=router.name)


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(300)
def test_numbers_only_grow_and_all_converge_whatever_becomes_of_messages() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    chosen = settings(
        max_examples=15, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=checks
    )
    run_state_machine_as_test(Delivery, settings=chosen)
