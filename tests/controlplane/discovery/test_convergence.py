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
from tests.controlplane.threads import at_once, at_one_turn

DRAIN_S, REMOVE_S = 60, 180
pods = st.dictionaries(
    st.sampled_from([f"pod-{n}" for n in range(6)]),
    st.tuples(st.integers(1, 8), st.sampled_from(list(TargetCondition))),
    max_size=6,
)
failures = st.just(PollError("no luck"))
steps = st.lists(st.tuples(st.one_of(pods, pods, pods, failures), st.integers(1, 400)), max_size=8)
last_answers = st.lists(st.integers(1, 8), min_size=1, max_size=6, unique=True).flatmap(
    lambda addresses: st.permutations([f"pod-{n}" for n in range(6)]).map(
        lambda names: dict(zip(names, [(one, TargetCondition.READY) for one in addresses], strict=False))
    )
)


def found(answer):
    """A result as ``collect`` leaves it: no address twice."""
    urls = {f"http://10.0.0.{address}:8000": (key, said) for key, (address, said) in sorted(answer.items())}
    return PollResult(
        tuple(Target(key, url, said) for url, (key, said) in sorted(urls.items(), key=lambda kv: kv[1][0]))
    )


class Looking:
    """A source that adopts, beside a replica of somebody's own, and a clock."""

    def __init__(self, pool, traveller):
        self.traveller = traveller
        self.ended = set()
        self.own = add_replica(pool, name="own", url="http://10.9.9.9:8000")
        self.source = create_source(
            pool,
            name="names",
            kind="dns",
            settings={"host": "x.test"},
            adoption="adopt",
            drain_after_s=DRAIN_S,
            remove_after_s=REMOVE_S,
        )

    def poll(self, answer, after_s):
        before = dict(Replica.objects.values_list("name", "state"))
        drained = self.drained()
        self.traveller.shift(timedelta(seconds=after_s))
        ReplicaSource.objects.update(next_look_at=timezone.now())
        (claimed,) = claim_polls()
        if isinstance(answer, PollError):
            record_poll_failure(claimed, str(answer))
        elif record_poll(claimed, found(answer)):
            reconcile_source(claimed.pk)
        after = dict(Replica.objects.values_list("name", "state"))
        self.check_gentle(before, after, drained)
        if isinstance(answer, PollError) or not answer:
            assert after == before

    def has_become(self, answer):
        """Whether the replicas are those of an answer, each active, and nobody else but one's own."""
        wanted = {target.key: (target.url, "active") for target in found(answer).targets}
        rows = DiscoveredReplica.objects.exclude(replica=None).select_related("replica")
        now = {row.key: (row.replica.url, row.replica.state) for row in rows}
        return now == wanted and Replica.objects.count() == len(wanted) + 1

    def drained(self):
        """Those of the missing whose replicas are on their way out."""
        missing = DiscoveredReplica.objects.exclude(missing_since=None).exclude(replica=None)
        return set(missing.exclude(drained_at=None).values_list("pk", flat=True))

    def check_gentle(self, before, after, drained):
        removed = set(before) - set(after)
        assert all(before[name] != ReplicaState.ACTIVE for name in removed), "removed without draining first"
        assert (Replica.objects.get(name="own").url, after["own"]) == ("http://10.9.9.9:8000", "active")
        present = DiscoveredReplica.objects.filter(missing_since=None).values_list("pk", flat=True)
        newly = self.drained() - drained - self.ended
        assert not newly or len(self.drained()) <= max(1, len({*before, *after}) // 2)
        self.ended |= set(present.filter(condition=TargetCondition.TERMINATING))  # drain at once, however many


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    phases=[Phase.generate],
)
@given(steps=steps, last=last_answers)
def test_replicas_come_to_the_last_steady_answer(pool, steps, last):
    with transaction.atomic(), time_machine.travel(timezone.now(), tick=False) as traveller:
        looking = Looking(pool, traveller)
        for answer, after_s in steps:
            looking.poll(answer, after_s)
        for _ in range(24):
            looking.poll(last, REMOVE_S)
            if looking.has_become(last):
                break
        looking.poll(last, REMOVE_S)
        assert looking.has_become(last)
        transaction.set_rollback(True)


# --- two at once, with real commits -------------------------------------------------------------------------


@pytest.fixture
def source(pool):
    return create_source(pool, name="names", kind="dns", settings={"host": "x.test"}, adoption="adopt")


@pytest.mark.django_db(transaction=True)
def test_two_beats_look_once(source):
    assert sorted(len(claimed) for claimed in at_once(*[claim_polls] * 6)) == [0, 0, 0, 0, 0, 1]


@pytest.mark.django_db(transaction=True)
def test_an_answer_that_comes_after_a_newer_look_or_a_change_does_not_count(source):
    (early,) = claim_polls()
    ReplicaSource.objects.update(next_look_at=timezone.now())
    (late,) = claim_polls()
    assert record_poll(late, found({"pod-1": (1, "ready")}))
    assert not record_poll(early, found({"pod-2": (2, "ready")}))
    record_poll_failure(early, "too late")
    row = ReplicaSource.objects.get()
    assert (row.error, list(row.discovered.values_list("key", flat=True))) == ("", ["pod-1"])


@pytest.mark.django_db(transaction=True)
def test_workers_that_settle_the_same_source_at_once_adopt_each_engine_once(source):
    (claimed,) = claim_polls()
    record_poll(claimed, found({f"pod-{n}": (n, "ready") for n in range(1, 7)}))
    at_once(*[lambda: reconcile_source(source.pk)] * 4)
    assert Replica.objects.count() == 6
    assert Event.objects.filter(kind="replica_adopted").count() == 6
    assert not source.discovered.exclude(problem="").exists()
    assert len(ConfigSnapshot.objects.first().document["pools"][0]["replicas"]) == 6


@pytest.mark.django_db(transaction=True)
def test_people_and_a_source_at_once_neither_wait_for_each_other_for_ever_nor_lose_a_row(source):
    (claimed,) = claim_polls()
    record_poll(claimed, found({f"pod-{n}": (n, "ready") for n in range(1, 5)}))
    reconcile_source(source.pk)
    ReplicaSource.objects.update(drain_after_s=0, remove_after_s=0, next_look_at=timezone.now())
    (claimed,) = claim_polls()
    record_poll(claimed, found({"pod-1": (1, "ready"), "pod-9": (9, "ready")}))
    gone, fresh = Replica.objects.get(name="pod-2"), DiscoveredReplica.objects.get(key="pod-9")

    def quietly(work):
        def run():
            try:
                work()
            except Exception as error:  # noqa: BLE001 - which of the two was faster does not matter
                return type(error).__name__

        return run

    outcomes = at_once(
        lambda: reconcile_source(source.pk),
        quietly(lambda: remove_replica(gone)),
        quietly(lambda: adopt(fresh)),
        lambda: reconcile_source(source.pk),
    )
    assert not {"OperationalError", "IntegrityError"} & set(filter(None, outcomes))
    assert set(Replica.objects.values_list("name", flat=True)) >= {"pod-1", "pod-9"}
    assert not Replica.objects.filter(name="pod-2").exists()


@pytest.mark.django_db(transaction=True)
def test_two_sources_that_both_miss_a_pools_last_replicas_leave_one(pool):
    sources = [
        create_source(
            pool, name=name, kind="dns", settings={"host": "x.test"}, adoption="adopt", drain_after_s=0,
            max_vanished_ratio=1.0,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    for pods in ({"a": {"pod-1": (1, "ready")}, "b": {"pod-2": (2, "ready")}}, {"a": {}, "b": {}}):
        ReplicaSource.objects.update(next_look_at=timezone.now())
        for claimed in claim_polls():
            record_poll(claimed, found(pods[claimed.name] | {"pod-9": (9, "not_ready")}))
        if pods["a"]:
            for source in sources:
                reconcile_source(source.pk)
    assert list(Replica.objects.values_list("state", flat=True)) == ["active", "active"]

    at_one_turn(*[lambda source=source: reconcile_source(source.pk) for source in sources])

    assert sorted(Replica.objects.values_list("state", flat=True)) == ["active", "draining"]
    (held,) = DiscoveredReplica.objects.exclude(problem="")
    assert (held.problem, held.drained_at, held.replica.state) == (LAST_REPLICA, None, "active")
