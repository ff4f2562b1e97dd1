"""Signatures of pushed configurations, and their renewal before they expire."""

from datetime import timedelta

import pytest
from django.core.management import call_command
from django.utils import timezone

from controlplane.models import ConfigSnapshot, Router
from controlplane.push.client import public_key, sign, signing_key_id
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.snapshots import newest_snapshot, snapshot_document
from controlplane.tasks import reconcile_routers
from routing.schema import load_snapshot
from tests.reliability.fleet import fleet

pytestmark = pytest.mark.django_db(transaction=True)
KEYS = "WARMPATH_ROUTER_CONFIG_KEYS"


@pytest.fixture
def router(pool, tmp_path, settings):
    """A real router that accepts the current key."""
    with fleet(tmp_path, 1, settings.ROUTER_ADMIN_TOKEN, keys=public_key()) as (router,):
        yield router


def stored_router() -> Router:
    return Router.objects.get()


def test_a_router_with_the_key_applies_a_configuration_and_reports_it_as_verified(router, client, admin_user):
    router.announce()
    reconcile_routers()
    assert router.revision == newest_snapshot().number
    row = stored_router()
    assert (row.signature_state, row.signature_key) == ("verified", signing_key_id())
    assert timedelta(days=6) < row.signature_expires_at - timezone.now() < timedelta(days=8)
    client.force_login(admin_user)
    assert "verified" in client.get("/routers/").text


def test_a_router_rejects_another_key_until_it_is_configured(router, settings, client, admin_user):
    settings.CONFIG_SIGNING_KEY = "a key that no router is set up with " * 2
    router.announce()
    reconcile_routers()
    assert router.revision is None
    assert stored_router().last_nack["path"] == "$.signature.key"
    client.force_login(admin_user)
    assert f"signature: it is signed with {signing_key_id()}" in client.get("/routers/").text

    settings.CONFIG_SIGNING_KEY = ""
    Router.objects.update(push_after=None)
    reconcile_routers()
    assert router.revision == newest_snapshot().number
    assert stored_router().last_nack is None


def test_a_signature_is_renewed_after_half_its_validity_without_a_new_number(router, time_machine_at):
    router.announce()
    reconcile_routers()
    first, number = stored_router().signature_expires_at, router.revision
    time_machine_at(2 * 86_400)
    router.announce()
    reconcile_routers()
    assert stored_router().signature_expires_at == first
    time_machine_at(4 * 86_400)
    router.announce()
    reconcile_routers()
    assert stored_router().signature_expires_at > first + timedelta(days=3)
    assert (router.revision, ConfigSnapshot.objects.count()) == (number, number)


def test_routers_that_accept_both_keys_get_a_new_signature_when_the_key_changes(pool, tmp_path, settings):
    keys = public_key()
    settings.CONFIG_SIGNING_KEY = "the next key, which is long enough too"
    keys += f",{public_key()}"
    settings.CONFIG_SIGNING_KEY = ""
    with fleet(tmp_path, 1, settings.ROUTER_ADMIN_TOKEN, keys=keys) as (router,):
        router.announce()
        reconcile_routers()
        before = stored_router().signature_key
        settings.CONFIG_SIGNING_KEY = "the next key, which is long enough too"
        router.announce()
        reconcile_routers()
        assert stored_router().signature_key == signing_key_id() != before


def test_a_router_without_keys_applies_configurations_and_the_page_shows_unchecked(
    pool, tmp_path, settings, client, admin_user
):
    with fleet(tmp_path, 1, settings.ROUTER_ADMIN_TOKEN) as (router,):
        router.announce()
        reconcile_routers()
        assert router.revision == newest_snapshot().number
        assert stored_router().signature_state == "unchecked"
        pushed = stored_router().last_ack_at
        reconcile_routers()
        assert stored_router().last_ack_at == pushed  # nothing to renew
    client.force_login(admin_user)
    assert "WARMPATH_ROUTER_CONFIG_KEYS to the keys that manage.py config_key prints" in client.get("/routers/").text


def test_a_router_rejects_a_recorded_document_that_is_expired_or_older(router, pool):
    expired = sign(snapshot_document(newest_snapshot()), timezone.now() - timedelta(days=30))
    router.announce()
    response = router.put(expired)
    assert (response.status_code, response.json()["path"]) == (422, "$.signature.expires_at")
    reconcile_routers()
    recorded = sign(snapshot_document(newest_snapshot()), timezone.now())
    add_replica(pool, name="r1", url="http://127.0.0.1:9")
    reconcile_routers()
    response = router.put(recorded)
    assert (response.status_code, response.json()["path"]) == (409, "$.revision")


def test_signing_changes_neither_number_nor_digest_nor_bytes(pool):
    plain = snapshot_document(newest_snapshot())
    signed = load_snapshot(sign(plain, timezone.now()))
    assert (signed.revision, signed.sha256, signed.config) == (
        (before := load_snapshot(plain)).revision,
        before.sha256,
        before.config,
    )


def test_the_key_is_printed_as_the_routers_setting(capsys):
    call_command("config_key")
    assert capsys.readouterr().out == f"{KEYS}={public_key()}\n"
