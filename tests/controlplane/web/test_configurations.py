import pytest

from controlplane.models import ConfigSnapshot
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.routers import announce, record_ack


@pytest.fixture
def history(pool, policy, operator):
    """Four configurations: the pool, two replicas, a policy."""
    for number in (1, 2):
        add_replica(pool, name=f"r{number}", url=f"http://10.0.0.{number}:8000", by=operator)
    publish_revision(save_draft(policy, {"strategy": "prefix_hash"}).pk, by=operator)
    return list(ConfigSnapshot.objects.order_by("number"))


def test_each_configuration_shows_its_number_reason_and_routers(visitor, history):
    third = history[2]
    router = announce(name="router-1", boot="b", admin_url="http://10.0.1.1:8081")
    record_ack(router.pk, number=third.number, sha256=third.sha256)

    text = visitor.get("/configurations/").text

    rows = text.split("<tr>")
    assert "router-1" in next(row for row in rows if "eplica r2 added" in row)
    assert "newest" in next(row for row in rows if "efault r2" in row)
    assert text.index("efault r2") < text.index("eplica r2 added") < text.index("eplica r1 added")


def test_a_configuration_shows_its_effects_compared_with_the_previous_one(visitor, history):
    text = visitor.get(f"/configurations/{history[-1].number}/").text

    assert "placed by prefix_hash instead of round_robin" in text
    assert "olga" in text
    assert "First configuration" in visitor.get(f"/configurations/{history[0].number}/").text
    assert visitor.get("/configurations/99/").status_code == 404


def test_any_two_configurations_can_be_compared(visitor, history):
    first, last = history[0].number, history[-1].number

    text = visitor.get(f"/configurations/compare/?from={first}&to={last}").text

    assert "placed by prefix_hash instead of round_robin" in text
    assert "Replica r1 of pool default is added." in text
    assert "No effect on any request" in visitor.get(f"/configurations/compare/?from={last}&to={last}").text
    assert "Select two configurations" in visitor.get("/configurations/compare/?from=x").text
    assert visitor.get(f"/configurations/compare/?from={first}&to=99").status_code == 404


def test_older_ones_are_a_plain_link_away_in_a_fixed_number_of_queries(visitor, pool, django_assert_num_queries):
    for number in range(30):
        add_replica(pool, name=f"r{number}", url=f"http://10.0.0.{number + 1}:8000")

    with django_assert_num_queries(6):
        first = visitor.get("/configurations/").text

    older = first[first.index("?before=") :].split('"')[0]
    assert "ool default" in visitor.get(f"/configurations/{older}").text
    assert "No older configuration" in visitor.get("/configurations/?before=1").text


def test_an_empty_history_says_the_next_step(visitor):
    assert "The first pool creates the first configuration." in visitor.get("/configurations/").text
