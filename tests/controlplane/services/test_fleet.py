import pytest

from controlplane.errors import InUseError, InvalidError, NameTakenError
from controlplane.models import ConfigSnapshot, Event, ReplicaState
from controlplane.services.fleet.pools import create_pool, remove_pool
from controlplane.services.fleet.replicas import (
    add_replica,
    record_engine_facts,
    remove_replica,
    set_replica_state,
    update_replica,
)
from controlplane.services.fleet.task_groups import create_task_group

pytestmark = pytest.mark.django_db


def snapshots() -> int:
    return ConfigSnapshot.objects.count()


def test_every_change_that_routers_see_is_one_number_and_one_event(replica):
    before = snapshots()
    set_replica_state(replica, ReplicaState.DRAINING)
    assert snapshots() == before + 1
    event = Event.objects.first()
    assert (event.kind, event.replica) == ("replica_state_changed", replica)
    assert (event.detail["before"]["state"], event.detail["after"]["state"]) == ("active", "draining")


def test_a_change_that_changes_nothing_is_neither(replica):
    before = (snapshots(), Event.objects.count())
    set_replica_state(replica, ReplicaState.ACTIVE)
    update_replica(replica, url=replica.url + "/", weight=1.0)
    assert (snapshots(), Event.objects.count()) == before


def test_what_the_engine_says_of_its_cache_is_noted_once(replica, django_assert_num_queries):
    before = snapshots()
    assert record_engine_facts(replica, block_tokens=16, capacity_blocks=2048)
    with django_assert_num_queries(1):
        assert not record_engine_facts(replica, block_tokens=16, capacity_blocks=2048)
    assert snapshots() == before + 1
    shown = ConfigSnapshot.objects.first().document["pools"][0]["replicas"][0]
    assert (shown["block_tokens"], shown["capacity_blocks"]) == (16, 2048)


def test_routers_are_told_the_cache_of_each_rank_as_each_is_a_target(replica):
    update_replica(replica, data_parallel_size=4)
    record_engine_facts(replica, block_tokens=16, capacity_blocks=8192)  # of all its engines

    assert ConfigSnapshot.objects.first().document["pools"][0]["replicas"][0]["capacity_blocks"] == 2048


def test_what_the_engine_does_not_say_leaves_what_is_known(replica):
    record_engine_facts(replica, block_tokens=16, capacity_blocks=2048)
    assert not record_engine_facts(replica, block_tokens=None, capacity_blocks=None)
    assert record_engine_facts(replica, block_tokens=None, capacity_blocks=4096)
    replica.refresh_from_db()
    assert (replica.block_tokens, replica.capacity_blocks) == (16, 4096)


def test_equal_rows_give_equal_bytes_in_whatever_order_they_were_made(db):
    def digest_after(names):
        pool = create_pool("default", models=["b", "a"])
        for name in names:
            add_replica(pool, name=name, url=f"http://{name}:8000")
        create_task_group(pool, "chat", replicas=pool.replicas.filter(name__in=names[:2]).order_by("-name"))
        digest = ConfigSnapshot.objects.first().sha256
        pool.groups.all().delete()
        pool.replicas.all().delete()
        remove_pool(pool)
        return digest

    assert digest_after(["r1", "r2", "r10"]) != digest_after(["r1", "r2", "r3"])
    assert digest_after(["r2", "r1", "r3"]) == digest_after(["r1", "r2", "r3"])


def test_a_snapshot_costs_the_same_queries_whatever_the_fleets_size(pool, django_assert_max_num_queries):
    from controlplane.push.snapshot import build_config

    for number in range(20):
        create_task_group(
            pool, f"g{number}", replicas=[add_replica(pool, name=f"r{number}", url=f"http://10.0.0.{number}:8000")]
        )
    with django_assert_max_num_queries(9):
        config = build_config("ab" * 32)
    assert len(config.pools[0].groups) == 20


def test_names_and_addresses_belong_to_one(replica, pool):
    with pytest.raises(NameTakenError, match="replica 'r1'"):
        add_replica(pool, name="r1", url="http://10.0.0.9:8000")
    with pytest.raises(NameTakenError, match=r"10\.0\.0\.1"):
        add_replica(pool, name="r9", url=replica.url)
    other = add_replica(pool, name="r2", url="http://10.0.0.2:8000")
    with pytest.raises(NameTakenError):
        update_replica(other, url=replica.url)


def test_a_group_takes_replicas_of_its_own_pool_alone(replica):
    other = create_pool("other", models=["m"])
    with pytest.raises(InvalidError) as refusal:
        create_task_group(other, "chat", replicas=[replica])
    assert refusal.value.faults[0].path == "$.replicas[0]"


def test_the_last_replica_of_a_subset_stays(replica, pool):
    group = create_task_group(pool, "chat", replicas=[replica])
    with pytest.raises(InUseError, match=r"default\.chat"):
        remove_replica(replica)
    group.replicas.clear()
    remove_replica(replica)


def test_a_pool_in_use_stays(replica, pool):
    with pytest.raises(InUseError):
        remove_pool(pool)


def test_an_event_outlives_what_it_tells_of(replica):
    remove_replica(replica)
    event = Event.objects.get(kind="replica_added")
    assert (event.replica, event.summary) == (None, "Replica r1 was added to pool default.")


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "0xa9fea9fe", "2852039166", "[fe80::1]", "[::ffff:169.254.169.254]", "0.0.0.0", "8.8.8.8", "0"],
)
def test_a_replica_cannot_be_at_an_address_where_no_replica_may_be(pool, host):
    with pytest.raises(InvalidError, match="WARMPATH_FLEET_NETWORKS"):
        add_replica(pool, name="metadata", url=f"http://{host}:8000")


@pytest.mark.parametrize("host", ["10.1.2.3", "127.0.0.1", "[::1]", "[fd12::7]", "gpu-1", "gpu-1.fleet.example"])
def test_a_replica_can_be_at_a_private_address_or_a_name(pool, host):
    assert add_replica(pool, name="gpu", url=f"http://{host}:8000").pk
