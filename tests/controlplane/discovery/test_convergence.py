"""For any sequence of polls: replicas converge to the last result, within the limits on removal."""

from __future__ import annotations

from datetime import timedelta

import pytest
import time_machine
from django.db import transaction
from django.utils import timezone
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from controlplane.discovery import PollError, PollResult, Target
from controlplane.models import (
    ConfigSnapshot,
    DiscoveredReplica,
    Event,
    Replica,
    ReplicaSource,
    ReplicaState,
    TargetCondition,
)
from controlplane.services.discovery.adoption import adopt, claim_polls, record_poll, record_poll_failure
from controlplane.services.discovery.reconcile import LAST_REPLICA, reconcile_source
from controlplane.services.discovery.sources import create_source
from controlplane.services.fleet.replicas import add_replica, remove_replica
from tests.controlplane.threads import at_once, contend_for_numbering_lock

DRAIN_S, REMOVE_S = 60, 180
pods = st.dictionaries(
    st.sampled_from([f"pod-{n}" for n in range(6)]),
    st.tuples(st.integers(1, 8), st.sampled_from(list(TargetCondition))),
    max_size=6,
)
failures = st.just(PollError("the poll failed"))
steps = st.lists(st.tuples(st.one_of(pods, pods, pods, failures), st.integers(1, 400)), max_size=8)
last_results = st.lists(st.integers(1, 8), min_size=1, max_size=6, unique=True).flatmap(
    lambda addresses: st.permutations([f"pod-{n}" for n in range(6)]).map(
        lambda names: dict(zip(names, [(address, TargetCondition.READY) for address in addresses], strict=False))
    )
)


def poll_result(pods):
    """A result as ``collect`` returns it: each address once."""
    urls = {f"http://10.0.0.{address}:8000": (key, condition) for key, (address, condition) in sorted(pods.items())}
    return PollResult(
        tuple(
            Target(key, url, condition) for url, (key, condition) in sorted(urls.items(), key=lambda item: item[1][0])
        )
    )


class PolledSource:
    """A source that adopts automatically, a replica added by hand, and a clock."""

    def __init__(self, pool, traveller):
        self.traveller = traveller
        self.terminating = set()
        self.manual = add_replica(pool, name="own", url="http://10.9.9.9:8000")
        self.source = create_source(
            pool,
            name="names",
            kind="dns",
            settings={"host": "x.test"},
            adoption="adopt",
            drain_after_s=DRAIN_S,
            remove_after_s=REMOVE_S,
        )

    def poll(self, pods, after_s):
        before = dict(Replica.objects.values_list("name", "state"))
        drained = self.missing_and_drained()
        self.traveller.shift(timedelta(seconds=after_s))
        ReplicaSource.objects.update(next_poll_at=timezone.now())
        (claimed,) = claim_polls()
        if isinstance(pods, PollError):
            record_poll_failure(claimed, str(pods))
        elif record_poll(claimed, poll_result(pods)):
            reconcile_source(claimed.pk)
        after = dict(Replica.objects.values_list("name", "state"))
        self.check_limits(before, after, drained)
        if isinstance(pods, PollError) or not pods:
            assert after == before

    def has_converged_to(self, pods):
        """Whether exactly these pods are active replicas, beside the one added by hand."""
        expected = {target.key: (target.url, "active") for target in poll_result(pods).targets}
        rows = DiscoveredReplica.objects.exclude(replica=None).select_related("replica")
        actual = {row.key: (row.replica.url, row.replica.state) for row in rows}
        return actual == expected and Replica.objects.count() == len(expected) + 1

    def missing_and_drained(self):
        """Ids of missing engines whose replicas drain."""
        missing = DiscoveredReplica.objects.exclude(missing_since=None).exclude(replica=None)
        return set(missing.exclude(drained_at=None).values_list("pk", flat=True))

    def check_limits(self, before, after, drained):
        removed = set(before) - set(after)
        assert all(before[name] != ReplicaState.ACTIVE for name in removed), "removed without draining first"
        assert (Replica.objects.get(name="own").url, after["own"]) == ("http://10.9.9.9:8000", "active")
        present = DiscoveredReplica.objects.filter(missing_since=None).values_list("pk", flat=True)
        newly_drained = self.missing_and_drained() - drained - self.terminating
        assert not newly_drained or len(self.missing_and_drained()) <= max(1, len({*before, *after}) // 2)
        self.terminating |= set(present.filter(condition=TargetCondition.TERMINATING))  # drain at once, without limit


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    phases=[Phase.generate],
)
@given(steps=steps, last=last_results)
def test_replicas_converge_to_the_last_result(pool, steps, last):
    with transaction.atomic(), time_machine.travel(timezone.now(), tick=False) as traveller:
        source = PolledSource(pool, traveller)
        for pods, after_s in steps:
            source.poll(pods, after_s)
        for _ in range(24):
            source.poll(last, REMOVE_S)
            if source.has_converged_to(last):
                break
        source.poll(last, REMOVE_S)
        assert source.has_converged_to(last)
        transaction.set_rollback(True)


# --- concurrent workers, with real commits -------------------------------------------------------------------------


@pytest.fixture
def source(pool):
    return create_source(pool, name="names", kind="dns", settings={"host": "x.test"}, adoption="adopt")


@pytest.mark.django_db(transaction=True)
def test_concurrent_workers_claim_a_poll_once(source):
    assert sorted(len(claimed) for claimed in at_once(*[claim_polls] * 6)) == [0, 0, 0, 0, 0, 1]


@pytest.mark.django_db(transaction=True)
def test_a_result_that_arrives_after_a_newer_poll_is_ignored(source):
    (early,) = claim_polls()
    ReplicaSource.objects.update(next_poll_at=timezone.now())
    (late,) = claim_polls()
    assert record_poll(late, poll_result({"pod-1": (1, "ready")}))
    assert not record_poll(early, poll_result({"pod-2": (2, "ready")}))
    record_poll_failure(early, "too late")
    row = ReplicaSource.objects.get()
    assert (row.error, list(row.discovered.values_list("key", flat=True))) == ("", ["pod-1"])


@pytest.mark.django_db(transaction=True)
def test_concurrent_reconciliations_adopt_each_engine_once(source):
    (claimed,) = claim_polls()
    record_poll(claimed, poll_result({f"pod-{n}": (n, "ready") for n in range(1, 7)}))
    at_once(*[lambda: reconcile_source(source.pk)] * 4)
    assert Replica.objects.count() == 6
    assert Event.objects.filter(kind="replica_adopted").count() == 6
    assert not source.discovered.exclude(problem="").exists()
    assert len(ConfigSnapshot.objects.first().document["pools"][0]["replicas"]) == 6


@pytest.mark.django_db(transaction=True)
def test_concurrent_changes_by_users_and_a_source_neither_deadlock_nor_lose_a_row(source):
    (claimed,) = claim_polls()
    record_poll(claimed, poll_result({f"pod-{n}": (n, "ready") for n in range(1, 5)}))
    reconcile_source(source.pk)
    ReplicaSource.objects.update(drain_after_s=0, remove_after_s=0, next_poll_at=timezone.now())
    (claimed,) = claim_polls()
    record_poll(claimed, poll_result({"pod-1": (1, "ready"), "pod-9": (9, "ready")}))
    missing, new = Replica.objects.get(name="pod-2"), DiscoveredReplica.objects.get(key="pod-9")

    def error_name(change):
        def run():
            try:
                change()
            except Exception as error:  # noqa: BLE001 - either change may come first
                return type(error).__name__

        return run

    outcomes = at_once(
        lambda: reconcile_source(source.pk),
        error_name(lambda: remove_replica(missing)),
        error_name(lambda: adopt(new)),
        lambda: reconcile_source(source.pk),
    )
    assert not {"OperationalError", "IntegrityError"} & set(filter(None, outcomes))
    assert set(Replica.objects.values_list("name", flat=True)) >= {"pod-1", "pod-9"}
    assert not Replica.objects.filter(name="pod-2").exists()


@pytest.mark.django_db(transaction=True)
def test_two_sources_that_miss_a_pools_last_replicas_leave_one_active(pool):
    sources = [
        create_source(
            pool, name=name, kind="dns", settings={"host": "x.test"}, adoption="adopt", drain_after_s=0,
            max_vanished_ratio=1.0,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    for pods in ({"a": {"pod-1": (1, "ready")}, "b": {"pod-2": (2, "ready")}}, {"a": {}, "b": {}}):
        ReplicaSource.objects.update(next_poll_at=timezone.now())
        for claimed in claim_polls():
            record_poll(claimed, poll_result(pods[claimed.name] | {"pod-9": (9, "not_ready")}))
        if pods["a"]:
            for source in sources:
                reconcile_source(source.pk)
    assert list(Replica.objects.values_list("state", flat=True)) == ["active", "active"]

    contend_for_numbering_lock(*[lambda source=source: reconcile_source(source.pk) for source in sources])

    assert sorted(Replica.objects.values_list("state", flat=True)) == ["active", "draining"]
    (held,) = DiscoveredReplica.objects.exclude(problem="")
    assert (held.problem, held.drained_at, held.replica.state) == (LAST_REPLICA, None, "active")
