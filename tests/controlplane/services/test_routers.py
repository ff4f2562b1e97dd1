import pytest
from django.utils import timezone

from controlplane.errors import InvalidError
from controlplane.models import ConfigSnapshot, Event, Router
from controlplane.services import routers
from controlplane.services.routers import announce, claim_pushes, mark_lost_routers, record_ack, record_unreachable
from controlplane.services.snapshots import newest_snapshot

pytestmark = pytest.mark.django_db
TOLD = {"name": "router-1", "boot": "b1", "admin_url": "http://127.0.0.1:8081"}


def test_a_router_is_known_from_its_first_word(pool):
    announce(**TOLD)
    announce(**TOLD)
    assert Router.objects.get().running_number is None
    assert list(Event.objects.filter(router__name="router-1").values_list("kind", flat=True)) == ["router_joined"]


@pytest.mark.parametrize("change", [{"name": ""}, {"name": "A"}, {"admin_url": "x"}, {"data_url": "http://u:p@h"}])
def test_a_router_without_a_usable_name_or_address_is_refused(change, db):
    with pytest.raises(InvalidError):
        announce(**{**TOLD, **change})
    assert not Router.objects.exists()


def test_what_a_router_warms_up_is_known_until_it_no_longer_says_so(pool):
    progress = {"gpu-7": {"prefixes_done": 1, "prefixes": 9, "tokens_done": 800, "tokens": 9000}}
    announce(**TOLD, warming=progress)
    assert Router.objects.get().warming == progress
    announce(**TOLD)
    assert Router.objects.get().warming == {}


def test_a_router_that_moved_is_pushed_to_where_it_is_now(pool):
    announce(**TOLD)
    announce(**{**TOLD, "admin_url": "http://127.0.0.1:9999", "boot": "b2"})
    assert Router.objects.get().admin_url == "http://127.0.0.1:9999"


def test_a_push_is_claimed_by_one_worker_until_it_is_answered(pool):
    announce(**TOLD)
    desired = newest_snapshot()
    assert len(claim_pushes(desired)) == 1
    assert claim_pushes(desired) == []


def test_a_claim_that_nobody_answered_ends_by_itself(pool, time_machine_at):
    announce(**TOLD)
    desired = newest_snapshot()
    claim_pushes(desired)
    time_machine_at(routers.LEASE_S + 1)
    assert len(claim_pushes(desired)) == 1


def test_pauses_grow_while_a_router_is_away_and_never_beyond_twenty_seconds(pool):
    router = announce(**TOLD)
    desired = newest_snapshot()
    pauses = []
    for _ in range(6):
        Router.objects.update(push_after=None)
        claim_pushes(desired)
        record_unreachable(router.pk, number=desired.number, reason="refused")
        router.refresh_from_db()
        pauses.append(round((router.push_after - timezone.now()).total_seconds()))
    assert pauses == [5, 10, 20, 20, 20, 20]


def test_a_router_that_returns_is_told_at_once_whatever_pause_it_had(pool):
    router = announce(**TOLD)
    desired = newest_snapshot()
    claim_pushes(desired)
    record_unreachable(router.pk, number=desired.number, reason="refused")
    assert claim_pushes(desired) == []
    announce(**TOLD)
    assert len(claim_pushes(desired)) == 1


def test_a_restart_without_its_disk_is_believed(pool):
    router = announce(**TOLD)
    desired = newest_snapshot()
    record_ack(router.pk, number=desired.number, sha256=desired.sha256)
    announce(**{**TOLD, "boot": "b2"})
    router.refresh_from_db()
    assert router.running_number is None
    assert len(claim_pushes(desired)) == 1


def test_what_a_router_says_for_long_is_believed_even_if_it_is_less(pool, time_machine_at):
    router = announce(**TOLD)
    desired = newest_snapshot()
    record_ack(router.pk, number=desired.number, sha256=desired.sha256)
    time_machine_at(11)
    announce(**TOLD)
    router.refresh_from_db()
    assert router.running_number is None


def test_an_answer_of_a_router_that_was_removed_is_no_error(pool):
    router = announce(**TOLD)
    Router.objects.all().delete()
    record_ack(router.pk, number=1, sha256="0" * 64)
    record_unreachable(router.pk, number=1, reason="gone")


def test_silence_of_thirty_seconds_is_a_loss_and_less_is_none(pool, time_machine_at):
    announce(**TOLD)
    time_machine_at(29)
    assert mark_lost_routers() == 0
    time_machine_at(31)
    assert (mark_lost_routers(), mark_lost_routers()) == (1, 0)


def test_there_is_nothing_to_push_before_the_first_pool(db):
    from controlplane.tasks import push_config, reconcile_routers

    router = announce(**TOLD)
    push_config(router.pk)
    reconcile_routers()
    assert not ConfigSnapshot.objects.exists()
