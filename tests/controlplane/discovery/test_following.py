"""From responses of an API server over HTTP to rows of replicas."""

import pytest

from controlplane.errors import ConflictError
from controlplane.models import ConfigSnapshot, Event, Replica, ReplicaSource, ReplicaState
from controlplane.services.discovery.adoption import adopt, dismiss
from controlplane.services.discovery.sources import request_poll, update_source
from controlplane.services.fleet.replicas import add_replica, remove_replica, set_replica_state
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.tasks import poll_sources
from tests.fakes.fake_kubernetes import pod

pytestmark = pytest.mark.django_db


def kinds(*wanted):
    return list(Event.objects.filter(kind__in=wanted).order_by("pk").values_list("kind", flat=True))


# --- adopting ---------------------------------------------------------------------------------------------


def test_what_is_found_becomes_replicas_named_as_the_source_names_them(cluster):
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "active"}
    newest = ConfigSnapshot.objects.first().document["pools"][0]["replicas"]
    assert [shown["url"] for shown in newest] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert (cluster.row.found, cluster.row.new, cluster.row.vanished, cluster.row.status) == (2, 2, 0, "ok")
    assert kinds("replicas_found", "replica_adopted") == ["replicas_found", "replica_adopted", "replica_adopted"]


def test_looking_again_at_the_same_changes_nothing(cluster):
    cluster.report("vllm-1", "vllm-2")
    before = (ConfigSnapshot.objects.count(), Event.objects.count())
    cluster.report("vllm-1", "vllm-2")
    assert (ConfigSnapshot.objects.count(), Event.objects.count()) == before
    assert cluster.row.new == 0


def test_a_fleet_that_comes_up_at_once_is_few_configurations(cluster):
    add_replica(cluster.row.pool, name="by-hand", url="http://10.0.0.7:8000")
    before = ConfigSnapshot.objects.count()
    cluster.report(*[f"vllm-{n}" for n in range(1, 61)])
    assert len(cluster.replicas) == 60  # one is served by hand, and is in nobody's way
    assert ConfigSnapshot.objects.count() == before + 2
    cluster.report(*[(f"vllm-{n}", f"10.3.0.{n}") for n in range(1, 61)])
    assert Replica.objects.get(name="vllm-60").url == "http://10.3.0.60:8000"
    assert ConfigSnapshot.objects.count() == before + 4  # all that moved, and the one whose address is free now


def test_where_the_policy_is_to_propose_a_person_decides_about_each(cluster, operator):
    update_source(cluster.row, adoption="propose")
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas == {}
    first, second = cluster.row.discovered.all()
    assert adopt(first, name="gpu-a", by=operator).name == "gpu-a"
    dismiss(second, by=operator)
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas == {"gpu-a": "active"}
    assert cluster.known == {"vllm-1": "adopted", "vllm-2": "dismissed"}
    with pytest.raises(ConflictError, match="adopted already"):
        adopt(first)
    with pytest.raises(ConflictError, match="drain or remove"):
        dismiss(first)
    assert adopt(second).name == "vllm-2"  # after all


def test_a_pod_that_is_not_ready_waits(cluster):
    cluster.report(pod("vllm-1", "10.0.0.1", ready=False, serving=False))
    assert cluster.known == {"vllm-1": "proposed"}
    cluster.report("vllm-1")
    assert cluster.known == {"vllm-1": "adopted"}


def test_a_replica_keeps_its_name_when_its_pod_moves(cluster):
    cluster.report("vllm-1", "vllm-2")
    before = Replica.objects.get(name="vllm-1").pk
    cluster.report(("vllm-1", "10.0.9.9"), "vllm-2")
    moved = Replica.objects.get(name="vllm-1")
    assert (moved.pk, moved.url) == (before, "http://10.0.9.9:8000")


def test_pods_that_swap_or_pass_on_their_addresses_are_followed(cluster):
    cluster.report(("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3"))
    cluster.report(("a", "10.0.0.2"), ("b", "10.0.0.1"), ("c", "10.0.0.3"))  # swapped
    urls = dict(Replica.objects.values_list("name", "url"))
    assert urls == {"a": "http://10.0.0.2:8000", "b": "http://10.0.0.1:8000", "c": "http://10.0.0.3:8000"}
    cluster.report(("a", "10.0.0.3"), ("b", "10.0.0.1"), ("c", "10.0.0.4"))  # passed on
    urls = dict(Replica.objects.values_list("name", "url"))
    assert urls == {"a": "http://10.0.0.3:8000", "b": "http://10.0.0.1:8000", "c": "http://10.0.0.4:8000"}
    assert "invalid" not in str(ConfigSnapshot.objects.first().document)


def test_another_pod_at_a_replicas_address_is_that_replica(cluster):
    """On the host's network a new pod has the node's address, as the old one had."""
    cluster.report(("old-7f", "10.0.0.1"), "vllm-2")
    cluster.report(("new-9c", "10.0.0.1"), "vllm-2")
    assert cluster.replicas == {"old-7f": "active", "vllm-2": "active"}
    assert cluster.known == {"new-9c": "adopted", "vllm-2": "adopted"}


def test_an_engine_that_somebody_added_by_hand_is_no_second_replica(cluster):
    add_replica(cluster.row.pool, name="by-hand", url="http://10.0.0.1:8000")
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas == {"by-hand": "active", "vllm-2": "active"}
    assert "already a replica at 'http://10.0.0.1:8000'" in cluster.row.discovered.get(key="vllm-1").problem


def test_a_name_that_is_taken_gets_a_mark_that_stays_the_same(cluster):
    add_replica(cluster.row.pool, name="vllm-1", url="http://10.9.9.9:8000")
    cluster.report("vllm-1", "vllm-2")
    marked = next(name for name in cluster.replicas if name.startswith("vllm-1-"))
    assert len(marked) == len("vllm-1-") + 8
    cluster.report(("vllm-1", "10.0.7.7"), "vllm-2")
    assert Replica.objects.get(name=marked).url == "http://10.0.7.7:8000"
    assert Replica.objects.get(name="vllm-1").url == "http://10.9.9.9:8000"


# --- vanishing --------------------------------------------------------------------------------------------


def test_a_pod_that_is_gone_drains_and_then_goes(cluster):
    cluster.report("vllm-1", "vllm-2")
    cluster.report("vllm-1")
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "active"}  # marked, no more
    assert cluster.row.discovered.get(key="vllm-2").missing_since is not None
    assert cluster.row.vanished == 1
    cluster.report("vllm-1", after_s=61)
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "draining"}
    cluster.report("vllm-1", after_s=200)
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "draining"}
    cluster.report("vllm-1", after_s=60)
    assert cluster.replicas == {"vllm-1": "active"}
    assert cluster.known == {"vllm-1": "adopted"}
    assert kinds("replicas_missing", "replica_state_changed", "replica_removed") == [
        "replicas_missing",
        "replica_state_changed",
        "replica_removed",
    ]


def test_however_late_the_next_look_is_a_replica_drains_before_it_is_removed(cluster):
    cluster.report("vllm-1", "vllm-2")
    cluster.report("vllm-1")
    cluster.report("vllm-1", after_s=100_000)
    assert cluster.replicas["vllm-2"] == "draining"
    cluster.report("vllm-1", after_s=241)
    assert cluster.replicas == {"vllm-1": "active"}


def test_a_pod_that_terminates_drains_at_once(cluster):
    cluster.report("vllm-1", "vllm-2")
    cluster.report("vllm-1", pod("vllm-2", "10.0.0.2", ready=False, terminating=True))
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "draining"}


def test_a_pod_that_comes_back_is_active_again(cluster):
    cluster.report("vllm-1", "vllm-2")
    cluster.report("vllm-1")
    cluster.report("vllm-1", after_s=61)
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "active"}
    assert cluster.row.discovered.get(key="vllm-2").drained_at is None


def test_a_pod_that_flaps_costs_nothing(cluster):
    cluster.report("vllm-1", "vllm-2")
    before = (ConfigSnapshot.objects.count(), Event.objects.count())
    for turn in range(10):
        cluster.report("vllm-1", *(["vllm-2"] if turn % 2 else []))
    assert (ConfigSnapshot.objects.count(), Event.objects.count()) == before


@pytest.mark.parametrize("mode", ["answer", "garbage", "500", "401"])
def test_an_answer_of_nothing_changes_nothing_however_long_it_lasts(cluster, mode):
    cluster.report("vllm-1", "vllm-2")
    if mode == "401":
        update_source(cluster.row, secret="another-token")
    for _ in range(30):
        cluster.report(mode="answer" if mode == "401" else mode, after_s=60)
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "active"}
    assert not cluster.row.discovered.exclude(missing_since=None).exists()
    assert (cluster.row.status, bool(cluster.row.error)) == ("stale", True)
    assert kinds("source_failing", "source_recovered") == ["source_failing"]
    if mode != "401":
        cluster.report("vllm-1", "vllm-2")
        assert cluster.row.status == "ok"
        assert kinds("source_failing", "source_recovered") == ["source_failing", "source_recovered"]


def test_one_look_that_fails_is_failing_and_not_yet_stale(cluster):
    cluster.report("vllm-1")
    cluster.report(mode="500")
    assert (cluster.row.status, cluster.row.found) == ("failing", 1)


def test_never_more_than_a_share_goes_at_once_and_in_the_end_all_that_are_gone(cluster):
    everybody = [f"vllm-{n}" for n in range(1, 9)]
    update_source(cluster.row, max_vanished_ratio=0.25)
    cluster.report(*everybody)
    cluster.report("vllm-1")
    cluster.report("vllm-1", after_s=61)
    drained = [name for name, state in cluster.replicas.items() if state == "draining"]
    assert len(drained) == 2
    assert (cluster.row.status, kinds("source_holding")) == ("holding", ["source_holding"])
    assert "7 of the pool's 8 replicas are missing; at most 2 may go" in cluster.row.held
    for _ in range(60):
        before = cluster.replicas
        cluster.report("vllm-1", after_s=60)
        now = cluster.replicas
        assert sum(state == "draining" for state in now.values()) <= max(1, len(now) // 4)
        assert all(before[name] == "draining" for name in set(before) - set(now))
    assert cluster.replicas == {"vllm-1": "active"}
    assert cluster.row.status == "ok"


def test_the_last_active_replica_of_a_pool_stays(cluster):
    cluster.report("vllm-1")
    cluster.report(pod("vllm-2", "10.0.0.2", ready=False), after_s=10)
    cluster.report(pod("vllm-2", "10.0.0.2", ready=False), after_s=100)
    assert cluster.replicas == {"vllm-1": "active"}
    assert "last active replica" in cluster.row.held
    cluster.report("vllm-2")  # ready now: the other may go
    assert cluster.replicas == {"vllm-1": "draining", "vllm-2": "active"}


def test_a_target_that_became_unusable_is_not_taken_for_gone(cluster):
    cluster.report("vllm-1", "vllm-2")
    for _ in range(20):
        cluster.report("vllm-1", ("vllm-2", "169.254.1.1"), after_s=60)
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "active"}
    assert "link-local" in cluster.row.refused[0]
    assert Replica.objects.get(name="vllm-2").url == "http://10.0.0.2:8000"


# --- people and sources ------------------------------------------------------------------------------------


def test_what_a_person_removed_stays_removed(cluster):
    cluster.report("vllm-1", "vllm-2")
    remove_replica(Replica.objects.get(name="vllm-2"))
    cluster.report("vllm-1", "vllm-2")
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas == {"vllm-1": "active"}
    assert cluster.known["vllm-2"] == "dismissed"


@pytest.mark.parametrize("state", [ReplicaState.DRAINING, ReplicaState.DISABLED])
def test_what_a_person_took_out_is_not_brought_back(cluster, state):
    cluster.report("vllm-1", "vllm-2")
    set_replica_state(Replica.objects.get(name="vllm-2"), state)
    cluster.report("vllm-1")
    cluster.report("vllm-1", after_s=61)
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas["vllm-2"] == state


def test_a_missing_replica_that_a_person_activates_stays(cluster):
    cluster.report("vllm-1", "vllm-2")
    cluster.report("vllm-1")
    cluster.report("vllm-1", after_s=61)
    set_replica_state(Replica.objects.get(name="vllm-2"), ReplicaState.ACTIVE)
    for _ in range(10):
        cluster.report("vllm-1", after_s=60)
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "active"}


def test_the_last_replica_of_a_task_groups_subset_stays_and_says_why(cluster):
    cluster.report("vllm-1", "vllm-2")
    create_task_group(cluster.row.pool, "chat", replicas=[Replica.objects.get(name="vllm-2")])
    cluster.report("vllm-1")
    cluster.report("vllm-1", after_s=61)
    cluster.report("vllm-1", after_s=300)
    assert cluster.replicas["vllm-2"] == "draining"
    assert "the only one of task group" in cluster.row.discovered.get(key="vllm-2").problem


def test_a_paused_source_is_not_looked_at(cluster):
    update_source(cluster.row, enabled=False)
    cluster.report("vllm-1")
    assert (cluster.api.requests, cluster.row.status) == ([], "paused")
    with pytest.raises(ConflictError, match="paused"):
        request_poll(cluster.row)


def test_a_source_is_looked_at_when_it_is_due_and_when_somebody_asks(cluster):
    cluster.report("vllm-1")
    poll_sources()
    assert len(cluster.api.requests) == 1
    request_poll(cluster.row)
    poll_sources()
    assert len(cluster.api.requests) == 2


def test_a_source_that_names_ever_other_engines_fills_neither_table_nor_pool(cluster):
    update_source(cluster.row, max_targets=5)
    for turn in range(12):
        cluster.report(*[(f"p{turn}-{n}", f"10.1.{turn}.{n}") for n in range(1, 6)], after_s=5)
    assert len(cluster.replicas) <= 5
    assert cluster.row.discovered.count() <= 15
    assert ReplicaSource.objects.get().error == ""


def test_a_removed_source_leaves_its_replicas(cluster):
    from controlplane.services.discovery.sources import remove_source

    cluster.report("vllm-1")
    remove_source(cluster.row)
    assert Replica.objects.get().state == "active"
