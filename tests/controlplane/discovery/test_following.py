"""Replicas follow the pods that a Kubernetes API server reports over HTTP."""

import pytest

from controlplane.errors import ConflictError, InvalidError
from controlplane.models import ConfigSnapshot, Event, Replica, ReplicaSource, ReplicaState
from controlplane.services.discovery.adoption import adopt
from controlplane.services.discovery.sources import request_poll, update_source
from controlplane.services.fleet.replicas import add_replica, remove_replica, set_replica_state, update_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.tasks import poll_sources
from tests.fakes.fake_kubernetes import pod

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stored_pool")]


def recorded_kinds(*kinds):
    return list(Event.objects.filter(kind__in=kinds).order_by("pk").values_list("kind", flat=True))


# --- adopting ---------------------------------------------------------------------------------------------


def test_discovered_pods_become_replicas_with_the_pods_names(cluster):
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "active"}
    newest = ConfigSnapshot.objects.first().document["pools"][0]["replicas"]
    assert [replica["url"] for replica in newest] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert (cluster.row.found, cluster.row.new, cluster.row.vanished, cluster.row.status) == (2, 2, 0, "ok")
    assert recorded_kinds("replicas_found", "replica_adopted") == [
        "replicas_found",
        "replica_adopted",
        "replica_adopted",
    ]


def test_a_poll_with_the_same_result_changes_nothing(cluster):
    cluster.report("vllm-1", "vllm-2")
    before = (ConfigSnapshot.objects.count(), Event.objects.count())
    cluster.report("vllm-1", "vllm-2")
    assert (ConfigSnapshot.objects.count(), Event.objects.count()) == before
    assert cluster.row.new == 0


def test_many_new_engines_become_replicas_in_two_configurations(cluster):
    add_replica(cluster.row.pool, name="by-hand", url="http://10.0.0.7:8000")
    before = ConfigSnapshot.objects.count()
    cluster.report(*[f"vllm-{n}" for n in range(1, 61)])
    assert len(cluster.replicas) == 60  # the one added by hand has the address of vllm-7
    assert ConfigSnapshot.objects.count() == before + 2
    cluster.report(*[(f"vllm-{n}", f"10.3.0.{n}") for n in range(1, 61)])
    assert Replica.objects.get(name="vllm-60").url == "http://10.3.0.60:8000"
    assert ConfigSnapshot.objects.count() == before + 4  # the moved replicas, and vllm-7, whose address is free now


def test_prefill_replicas_follow_their_service_once_a_replica_can_decode(cluster):
    prefill = {"role": "prefill"}
    cluster.report("vllm-1", "vllm-2", labels=prefill)
    assert cluster.replicas == {}
    assert all("have the role prefill" in row.problem for row in cluster.row.discovered.all())
    decode = add_replica(cluster.row.pool, name="decode", url="http://10.0.0.9:8000", role="decode")
    cluster.report("vllm-1", "vllm-2", labels=prefill)
    assert cluster.replicas == {"decode": "active", "vllm-1": "active", "vllm-2": "active"}
    assert set(Replica.objects.exclude(pk=decode.pk).values_list("role", flat=True)) == {"prefill"}

    cluster.report(pod("vllm-1", "10.0.0.1", serving=True, ready=False, terminating=True), "vllm-2", labels=prefill)
    assert cluster.replicas["vllm-1"] == "draining"  # the last replica that can decode stays, whatever else there is
    update_replica(decode, role="both")
    with pytest.raises(InvalidError, match="have the role prefill"):
        remove_replica(decode)


def test_a_user_decides_about_each_proposed_engine(cluster, operator):
    update_source(cluster.row, adoption="propose")
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas == {}
    first, second = cluster.row.discovered.all()
    assert adopt(first, name="gpu-a", by=operator).name == "gpu-a"
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas == {"gpu-a": "active"}
    assert cluster.discovered == {"vllm-1": "adopted", "vllm-2": "proposed"}
    with pytest.raises(ConflictError, match="adopted already"):
        adopt(first)
    assert adopt(second).name == "vllm-2"


def test_a_pod_is_adopted_once_it_is_ready(cluster):
    cluster.report(pod("vllm-1", "10.0.0.1", ready=False, serving=False))
    assert cluster.discovered == {"vllm-1": "proposed"}
    cluster.report("vllm-1")
    assert cluster.discovered == {"vllm-1": "adopted"}


def test_replicas_follow_pods_that_swap_or_pass_on_their_addresses(cluster):
    cluster.report(("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3"))
    cluster.report(("a", "10.0.0.2"), ("b", "10.0.0.1"), ("c", "10.0.0.3"))  # swapped
    urls = dict(Replica.objects.values_list("name", "url"))
    assert urls == {"a": "http://10.0.0.2:8000", "b": "http://10.0.0.1:8000", "c": "http://10.0.0.3:8000"}
    cluster.report(("a", "10.0.0.3"), ("b", "10.0.0.1"), ("c", "10.0.0.4"))  # passed on
    urls = dict(Replica.objects.values_list("name", "url"))
    assert urls == {"a": "http://10.0.0.3:8000", "b": "http://10.0.0.1:8000", "c": "http://10.0.0.4:8000"}
    assert "invalid" not in str(ConfigSnapshot.objects.first().document)


def test_a_new_pod_at_a_replicas_address_becomes_that_replica(cluster):
    """With ``hostNetwork`` a new pod has the node's address, as the old pod had."""
    cluster.report(("old-7f", "10.0.0.1"), "vllm-2")
    cluster.report(("new-9c", "10.0.0.1"), "vllm-2")
    assert cluster.replicas == {"old-7f": "active", "vllm-2": "active"}
    assert cluster.discovered == {"new-9c": "adopted", "vllm-2": "adopted"}


def test_an_engine_that_was_added_by_hand_is_not_adopted_again(cluster):
    add_replica(cluster.row.pool, name="by-hand", url="http://10.0.0.1:8000")
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas == {"by-hand": "active", "vllm-2": "active"}
    assert "already a replica at 'http://10.0.0.1:8000'" in cluster.row.discovered.get(key="vllm-1").problem


def test_a_name_that_another_replica_has_gets_a_stable_suffix(cluster):
    add_replica(cluster.row.pool, name="vllm-1", url="http://10.9.9.9:8000")
    cluster.report("vllm-1", "vllm-2")
    renamed = next(name for name in cluster.replicas if name.startswith("vllm-1-"))
    assert len(renamed) == len("vllm-1-") + 8
    cluster.report(("vllm-1", "10.0.7.7"), "vllm-2")
    assert Replica.objects.get(name=renamed).url == "http://10.0.7.7:8000"
    assert Replica.objects.get(name="vllm-1").url == "http://10.9.9.9:8000"


# --- missing pods --------------------------------------------------------------------------------------------


def test_the_replica_of_a_missing_pod_drains_and_is_then_removed(cluster):
    cluster.report("vllm-1", "vllm-2")
    cluster.report("vllm-1")
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "active"}  # recorded as missing only
    assert cluster.row.discovered.get(key="vllm-2").missing_since is not None
    assert cluster.row.vanished == 1
    cluster.report("vllm-1", after_s=61)
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "draining"}
    cluster.report("vllm-1", after_s=200)
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "draining"}
    cluster.report("vllm-1", after_s=60)
    assert cluster.replicas == {"vllm-1": "active"}
    assert cluster.discovered == {"vllm-1": "adopted"}
    assert recorded_kinds("replicas_missing", "replica_state_changed", "replica_removed") == [
        "replicas_missing",
        "replica_state_changed",
        "replica_removed",
    ]


def test_a_replica_drains_before_its_removal_however_late_the_next_poll_is(cluster):
    cluster.report("vllm-1", "vllm-2")
    cluster.report("vllm-1")
    cluster.report("vllm-1", after_s=100_000)
    assert cluster.replicas["vllm-2"] == "draining"
    cluster.report("vllm-1", after_s=241)
    assert cluster.replicas == {"vllm-1": "active"}


def test_the_replica_of_a_terminating_pod_drains_at_once(cluster):
    cluster.report("vllm-1", "vllm-2")
    cluster.report("vllm-1", pod("vllm-2", "10.0.0.2", ready=False, terminating=True))
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "draining"}


@pytest.mark.parametrize("mode", ["answer", "garbage", "500", "401"])
def test_empty_and_failed_polls_change_no_replica_however_long_they_last(cluster, mode):
    cluster.report("vllm-1", "vllm-2")
    if mode == "401":
        update_source(cluster.row, secret="another-token")
    for _ in range(30):
        cluster.report(mode="answer" if mode == "401" else mode, after_s=60)
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "active"}
    assert not cluster.row.discovered.exclude(missing_since=None).exists()
    assert (cluster.row.status, bool(cluster.row.error)) == ("stale", True)
    assert recorded_kinds("source_failing", "source_recovered") == ["source_failing"]
    if mode != "401":
        cluster.report("vllm-1", "vllm-2")
        assert cluster.row.status == "ok"
        assert recorded_kinds("source_failing", "source_recovered") == ["source_failing", "source_recovered"]


def test_a_source_is_failing_but_not_stale_after_one_failed_poll(cluster):
    cluster.report("vllm-1")
    cluster.report(mode="500")
    assert (cluster.row.status, cluster.row.found) == ("failing", 1)


def test_missing_replicas_drain_a_share_at_a_time_until_all_are_removed(cluster):
    names = [f"vllm-{n}" for n in range(1, 9)]
    update_source(cluster.row, max_vanished_ratio=0.25)
    cluster.report(*names)
    cluster.report("vllm-1")
    cluster.report("vllm-1", after_s=61)
    drained = [name for name, state in cluster.replicas.items() if state == "draining"]
    assert len(drained) == 2
    assert (cluster.row.status, recorded_kinds("source_holding")) == ("holding", ["source_holding"])
    assert "7 of the pool's 8 replicas are missing; at most 2 may drain" in cluster.row.hold_reason
    for _ in range(60):
        before = cluster.replicas
        cluster.report("vllm-1", after_s=60)
        now = cluster.replicas
        assert sum(state == "draining" for state in now.values()) <= max(1, len(now) // 4)
        assert all(before[name] == "draining" for name in set(before) - set(now))
        if len(now) == 1:
            break
    assert cluster.replicas == {"vllm-1": "active"}
    assert cluster.row.status == "ok"


def test_the_last_active_replica_of_a_pool_stays(cluster):
    cluster.report("vllm-1")
    cluster.report(pod("vllm-2", "10.0.0.2", ready=False), after_s=10)
    cluster.report(pod("vllm-2", "10.0.0.2", ready=False), after_s=100)
    assert cluster.replicas == {"vllm-1": "active"}
    assert "last active replica" in cluster.row.hold_reason
    cluster.report("vllm-2")  # ready now, so the other replica may drain
    assert cluster.replicas == {"vllm-1": "draining", "vllm-2": "active"}


def test_a_rejected_target_does_not_count_as_missing(cluster):
    cluster.report("vllm-1", "vllm-2")
    for _ in range(20):
        cluster.report("vllm-1", ("vllm-2", "169.254.1.1"), after_s=60)
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "active"}
    assert "link-local" in cluster.row.rejected[0]
    assert Replica.objects.get(name="vllm-2").url == "http://10.0.0.2:8000"


# --- users and sources -------------------------------------------------------------------------------------


def test_a_replica_that_a_user_removed_is_not_adopted_again(cluster):
    cluster.report("vllm-1", "vllm-2")
    remove_replica(Replica.objects.get(name="vllm-2"))
    cluster.report("vllm-1", "vllm-2")
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas == {"vllm-1": "active"}
    assert cluster.discovered["vllm-2"] == "dismissed"
    assert adopt(cluster.row.discovered.get(key="vllm-2")).name == "vllm-2"  # a user may change that


@pytest.mark.parametrize("state", [ReplicaState.DRAINING, ReplicaState.DISABLED])
def test_a_replica_that_a_user_drained_or_disabled_is_not_activated(cluster, state):
    cluster.report("vllm-1", "vllm-2")
    set_replica_state(Replica.objects.get(name="vllm-2"), state)
    cluster.report("vllm-1")
    cluster.report("vllm-1", after_s=61)
    cluster.report("vllm-1", "vllm-2")
    assert cluster.replicas["vllm-2"] == state


def test_a_missing_replica_that_a_user_activates_stays(cluster):
    cluster.report("vllm-1", "vllm-2")
    cluster.report("vllm-1")
    cluster.report("vllm-1", after_s=61)
    set_replica_state(Replica.objects.get(name="vllm-2"), ReplicaState.ACTIVE)
    for _ in range(10):
        cluster.report("vllm-1", after_s=60)
    assert cluster.replicas == {"vllm-1": "active", "vllm-2": "active"}


def test_the_last_replica_of_a_task_groups_subset_stays_with_the_reason(cluster):
    cluster.report("vllm-1", "vllm-2")
    create_task_group(cluster.row.pool, "chat", replicas=[Replica.objects.get(name="vllm-2")])
    cluster.report("vllm-1")
    cluster.report("vllm-1", after_s=61)
    cluster.report("vllm-1", after_s=300)
    assert cluster.replicas["vllm-2"] == "draining"
    assert "the only one of task group" in cluster.row.discovered.get(key="vllm-2").problem


def test_a_paused_source_is_not_polled(cluster):
    update_source(cluster.row, enabled=False)
    cluster.report("vllm-1")
    assert (cluster.api.requests, cluster.row.status) == ([], "paused")
    with pytest.raises(ConflictError, match="paused"):
        request_poll(cluster.row)


def test_a_source_is_polled_when_it_is_due_and_on_request(cluster):
    cluster.report("vllm-1")
    poll_sources()
    assert len(cluster.api.requests) == 1
    request_poll(cluster.row)
    poll_sources()
    assert len(cluster.api.requests) == 2


def test_a_source_that_always_reports_other_engines_fills_neither_table_nor_pool(cluster):
    update_source(cluster.row, max_targets=5)
    for poll in range(12):
        cluster.report(*[(f"p{poll}-{n}", f"10.1.{poll}.{n}") for n in range(1, 6)], after_s=5)
    assert len(cluster.replicas) <= 5
    assert cluster.row.discovered.count() <= 15
    assert ReplicaSource.objects.get().error == ""
