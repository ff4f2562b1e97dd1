from django.utils import timezone

from controlplane.models import Pool, Replica, ReplicaState, Router
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.routers import announce


def test_the_fleet_costs_the_same_whatever_its_size(visitor, pool, django_assert_num_queries):
    for number in range(12):
        add_replica(pool, name=f"r{number}", url=f"http://10.0.0.{number}:8000")

    with django_assert_num_queries(7):
        text = visitor.get("/fleet/").text

    assert "http://10.0.0.11:8000" in text


def test_roles_are_listed_where_they_matter(visitor, pool):
    add_replica(pool, name="r0", url="http://10.0.0.1:8000")
    assert ">Prefill<" not in visitor.get("/fleet/").text
    add_replica(pool, name="r1", url="http://10.0.0.2:8000", role="prefill")
    assert visitor.get("/fleet/").text.count(">Prefill<") == 1


def told(name, **warming):
    """A router's heartbeat that tells of replicas that it warms up: openings and tokens, done and in all."""
    words = ("prefixes_done", "prefixes", "tokens_done", "tokens")
    warming = {replica: dict(zip(words, figures, strict=True)) for replica, figures in warming.items()}
    announce(name=name, boot="b", admin_url="http://10.0.1.1:8081", warming=warming)


def test_a_replica_that_is_warmed_up_shows_how_far_all_routers_are_with_it(visitor, replica):
    assert "Warming up" not in visitor.get("/fleet/").text
    told("router-1", r1=(10, 40, 30_000, 120_000))
    told("router-2", r1=(40, 40, 60_000, 120_000), gone=(1, 2, 3, 4))
    told("router-3")
    for path in ("/fleet/", "/fleet/warming/"):
        text = visitor.get(path).text
        assert "37.5 %" in text
        assert "50 of 80" in text
        assert "gone" not in text
    assert "<html" not in visitor.get("/fleet/warming/").text
    Router.objects.filter(name="router-2").update(lost_at=timezone.now())
    assert "25.0 %" in visitor.get("/fleet/warming/").text
    told("router-1")
    assert visitor.get("/fleet/warming/").text.strip() == ""


def test_a_warm_up_of_which_nothing_is_known_yet_is_no_division(visitor, replica):
    told("router-1", r1=(0, 0, 0, 0))
    assert "0.0 %" in visitor.get("/fleet/warming/").text


def test_columns_sort_by_plain_links(visitor, pool):
    for name, weight in (("a", 1), ("b", 3), ("c", 2)):
        add_replica(pool, name=name, url=f"http://{name}:8000", weight=weight)

    text = visitor.get("/fleet/?sort=-weight").text

    assert text.index("http://b:") < text.index("http://c:") < text.index("http://a:")
    assert 'aria-sort="descending"' in text
    assert 'href="?sort=weight"' in text


def test_an_unknown_sort_column_is_ignored(visitor, replica):
    assert visitor.get("/fleet/?sort=__class__").status_code == 200


def test_a_pool_and_its_first_replica_are_added(visitor):
    visitor.post("/fleet/pools/new/", {"name": "chat", "models": "llama\n\nmistral\n"})
    pool = Pool.objects.get()
    answer = visitor.post(
        f"/fleet/pools/{pool.pk}/replicas/new/",
        {"name": "gpu-1", "url": "http://gpu-1:8000/", "weight": "2"},
        follow=True,
    )

    assert pool.models == ["llama", "mistral"]
    replica = Replica.objects.get()
    assert (replica.url, replica.weight) == ("http://gpu-1:8000", 2.0)
    assert "gpu-1" in answer.text


def test_a_name_that_is_taken_is_refused_above_the_form(visitor, replica):
    form = {"name": "r1", "url": "http://elsewhere:8000", "weight": "1"}

    answer = visitor.post(f"/fleet/pools/{replica.pool_id}/replicas/new/", form)

    assert "There is already a replica" in answer.text


def test_what_will_happen_is_said_before_a_replica_is_drained(visitor, replica):
    path = f"/fleet/replicas/{replica.pk}/state/draining/"

    asked = visitor.get(path).text
    assert "Running requests finish" in asked
    assert "the only active replica" in asked
    assert Replica.objects.get().state == ReplicaState.ACTIVE

    visitor.post(path)
    assert Replica.objects.get().state == ReplicaState.DRAINING


def test_a_state_that_does_not_exist_is_not_found(visitor, replica):
    assert visitor.get(f"/fleet/replicas/{replica.pk}/state/asleep/").status_code == 404


def test_a_replica_is_removed_after_a_confirmation(visitor, replica):
    path = f"/fleet/replicas/{replica.pk}/remove/"

    assert "compute its prefixes again" in visitor.get(path).text
    visitor.post(path)

    assert not Replica.objects.exists()


def test_a_pool_with_replicas_stays(visitor, replica):
    answer = visitor.post(f"/fleet/pools/{replica.pool_id}/remove/", follow=True)

    assert "Nothing was changed" in answer.text
    assert Pool.objects.exists()


def test_routers_cost_the_same_whatever_their_number(visitor, pool, django_assert_num_queries):
    for number in range(5):
        announce(name=f"router-{number}", boot="b", admin_url=f"http://10.0.1.{number}:8081")

    with django_assert_num_queries(5):
        text = visitor.get("/routers/?sort=-name").text

    assert text.index("router-4") < text.index("router-0")


def test_a_refresh_of_the_routers_is_the_table_alone(visitor, pool):
    announce(name="router-1", boot="b", admin_url="http://10.0.1.1:8081")

    text = visitor.get("/routers/", headers={"HX-Request": "true"}).text

    assert "router-1" in text
    assert "<html" not in text


def test_without_a_router_the_page_says_how_to_start_one(visitor):
    assert not Router.objects.exists()
    assert "python -m routing serve --control-plane http://testserver" in visitor.get("/routers/").text


def test_task_groups_are_added_changed_and_removed(visitor, pool, replica, django_assert_num_queries):
    visitor.post(f"/task-groups/new/{pool.pk}/", {"name": "coding", "owner": "tools", "replicas": [replica.pk]})
    group = pool.groups.get()
    assert list(group.replicas.all()) == [replica]

    visitor.post(f"/task-groups/{group.pk}/", {"owner": "agents"})
    group.refresh_from_db()
    assert (group.owner, group.replicas.count()) == ("agents", 0)

    visitor.post(f"/task-groups/{group.pk}/remove/")
    assert not pool.groups.exists()


def test_the_list_of_task_groups_costs_the_same_whatever_its_length(visitor, pool, django_assert_num_queries):
    for name in ("a", "b", "c", "d"):
        create_task_group(pool, name)

    with django_assert_num_queries(6):
        visitor.get("/task-groups/")
