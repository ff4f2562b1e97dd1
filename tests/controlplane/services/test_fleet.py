"""Replicas, task groups and pools: events, snapshots and constraints."""

import pytest

from controlplane.errors import InUseError, InvalidError, NameTakenError
from controlplane.models import ConfigSnapshot, Event, ReplicaState
from controlplane.push.snapshot import build_config
from controlplane.services.fleet.pools import create_pool, create_project, remove_pool, update_pool
from controlplane.services.fleet.replicas import (
    add_replica,
    record_engine_facts,
    remove_replica,
    set_replica_state,
    update_replica,
)
from controlplane.services.fleet.task_groups import create_task_group, update_task_group

pytestmark = pytest.mark.django_db


def test_a_change_is_one_snapshot_and_one_event_and_no_change_is_neither(replica):
    before = ConfigSnapshot.objects.count()
    set_replica_state(replica, ReplicaState.DRAINING)
    assert ConfigSnapshot.objects.count() == before + 1
    event = Event.objects.first()
    assert (event.kind, event.replica) == ("replica_state_changed", replica)
    assert (event.detail["before"]["state"], event.detail["after"]["state"]) == ("active", "draining")

    before = (ConfigSnapshot.objects.count(), Event.objects.count())
    set_replica_state(replica, ReplicaState.DRAINING)
    update_replica(replica, url=replica.url + "/", weight=1.0)
    assert (ConfigSnapshot.objects.count(), Event.objects.count()) == before


def test_a_pool_keeps_a_replica_that_can_decode(pool, replica):
    with pytest.raises(InvalidError, match="have the role prefill"):
        update_replica(replica, role="prefill")
    add_replica(pool, name="r9", url="http://10.0.0.9:8000", role="prefill")
    assert {row["role"] for row in ConfigSnapshot.objects.first().document["pools"][0]["replicas"]} == {
        "both",
        "prefill",
    }


def test_the_reported_cache_size_is_stored_once(replica, django_assert_num_queries):
    before = ConfigSnapshot.objects.count()
    assert record_engine_facts(replica, block_tokens=16, capacity_blocks=2048)
    with django_assert_num_queries(1):
        assert not record_engine_facts(replica, block_tokens=16, capacity_blocks=2048)
    assert ConfigSnapshot.objects.count() == before + 1
    config = ConfigSnapshot.objects.first().document["pools"][0]["replicas"][0]
    assert (config["block_tokens"], config["capacity_blocks"]) == (16, 2048)

    assert not record_engine_facts(replica, block_tokens=None, capacity_blocks=None)
    assert record_engine_facts(replica, block_tokens=None, capacity_blocks=4096)
    replica.refresh_from_db()
    assert (replica.block_tokens, replica.capacity_blocks) == (16, 4096)
    update_replica(replica, data_parallel_size=4)
    assert ConfigSnapshot.objects.first().document["pools"][0]["replicas"][0]["capacity_blocks"] == 1024  # per rank


def test_a_snapshot_does_not_depend_on_the_order_of_creation(db):
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


def test_a_snapshot_takes_the_same_queries_for_any_fleet(pool, django_assert_max_num_queries):
    for number in range(20):
        replica = add_replica(pool, name=f"r{number}", url=f"http://10.0.0.{number}:8000")
        create_task_group(pool, f"g{number}", replicas=[replica])
    with django_assert_max_num_queries(9):
        config = build_config("ab" * 32)
    assert len(config.pools[0].groups) == 20


def test_names_and_addresses_are_unique(replica, pool):
    with pytest.raises(NameTakenError, match="replica 'r1'"):
        add_replica(pool, name="r1", url="http://10.0.0.9:8000")
    with pytest.raises(NameTakenError, match=r"10\.0\.0\.1"):
        add_replica(pool, name="r9", url=replica.url)
    other = add_replica(pool, name="r2", url="http://10.0.0.2:8000")
    with pytest.raises(NameTakenError):
        update_replica(other, url=replica.url)


@pytest.mark.parametrize("url", ["HTTP://10.0.0.1:8000", "http://10.0.0.1:8000/", "Http://10.0.0.1:8000"])
def test_a_url_in_another_spelling_is_the_same_address(replica, pool, url):
    with pytest.raises(NameTakenError, match=r"http://10\.0\.0\.1:8000"):
        add_replica(pool, name="r9", url=url)


def test_the_scheme_and_host_of_a_url_are_stored_in_lower_case(pool):
    replica = add_replica(pool, name="r9", url="HTTPS://GPU-9.Example:8000/Engine/", api_key="engine-key")
    assert replica.url == "https://gpu-9.example:8000/Engine"
    assert update_replica(replica, url="https://Gpu-9.example:8000/Engine").url == replica.url  # keeps its key
    assert build_config("ab" * 32).pools[0].replicas[0].url == "https://gpu-9.example:8000/Engine"


def test_a_group_uses_only_replicas_of_its_own_pool(replica):
    other = create_pool("other", models=["m"])
    with pytest.raises(InvalidError) as error:
        create_task_group(other, "chat", replicas=[replica])
    assert error.value.faults[0].path == "$.replicas[0]"


def test_a_semantic_cache_has_its_embeddings_from_a_pool_of_its_own_project(pool):
    update_pool(pool, models=["tiny"])
    settings = {"embedding_pool": "vectors", "embedding_model": "embedder"}
    vectors = create_pool("vectors", project=create_project("theirs"), models=["embedder"])
    with pytest.raises(InvalidError, match="the pool's project has no pool 'vectors'") as error:
        create_task_group(pool, "faq", response_cache={}, semantic_cache=settings)
    assert error.value.faults[0].path == "$.semantic_cache.embedding_pool"

    vectors.project = pool.project
    vectors.save()
    with pytest.raises(InvalidError, match="has no response_cache"):
        create_task_group(pool, "faq", semantic_cache=settings)
    group = create_task_group(pool, "faq", response_cache={}, semantic_cache=settings)
    assert group.semantic_cache["threshold"] == 0.95  # defaults are written out
    assert build_config("ab" * 32).pools[0].groups[0].semantic_cache.embedding_model == "embedder"
    with pytest.raises(InvalidError, match="has no model 'another'"):
        update_task_group(group, semantic_cache=settings | {"embedding_model": "another"})


def test_a_pool_with_replicas_and_the_last_replica_of_a_subset_cannot_be_removed(replica, pool):
    with pytest.raises(InUseError):
        remove_pool(pool)
    group = create_task_group(pool, "chat", replicas=[replica])
    with pytest.raises(InUseError, match=r"default\.chat"):
        remove_replica(replica)
    group.replicas.clear()
    remove_replica(replica)
    event = Event.objects.get(kind="replica_added")
    assert (event.replica, event.summary) == (None, "Replica r1 was added to pool default.")


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "0xa9fea9fe", "2852039166", "[fe80::1]", "[::ffff:169.254.169.254]", "0.0.0.0", "8.8.8.8", "0"],
)
def test_a_replica_address_outside_the_allowed_networks_is_rejected(pool, host):
    with pytest.raises(InvalidError, match="WARMPATH_FLEET_NETWORKS"):
        add_replica(pool, name="metadata", url=f"http://{host}:8000")


@pytest.mark.parametrize("host", ["10.1.2.3", "127.0.0.1", "[::1]", "[fd12::7]", "gpu-1", "gpu-1.fleet.example"])
def test_a_private_address_or_a_host_name_is_allowed(pool, host):
    assert add_replica(pool, name="gpu", url=f"http://{host}:8000").pk
