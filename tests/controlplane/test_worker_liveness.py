"""The worker records its liveness, and a missing worker is reported."""

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.isolation import record_worker_seen, worker_silence_s
from controlplane.models import WorkerLiveness
from controlplane.tasks import reconcile_routers
from telemetry.models import Alert
from telemetry.services.self_monitoring import telemetry_status

pytestmark = pytest.mark.django_db


def record_seen(seconds_ago):
    WorkerLiveness.objects.all().delete()
    record_worker_seen(timezone.now() - timedelta(seconds=seconds_ago))


def silences():
    """The values of the silence metric in ``/metrics``."""
    lines = Client().get("/metrics").content.decode().splitlines()
    samples = (line.split() for line in lines if line.startswith("warmpath_controlplane_worker_silence_seconds"))
    return [float(value) for _name, value in samples]


def test_the_worker_records_its_liveness():
    assert worker_silence_s(timezone.now()) is None
    reconcile_routers()
    assert worker_silence_s(timezone.now()) < 10
    reconcile_routers()
    assert WorkerLiveness.objects.count() == 1


@pytest.mark.parametrize(("seconds_ago", "state", "required"), [(5, "ok", 200), (95, "late", 503)])
def test_readyz_reports_the_worker(seconds_ago, state, required):
    record_seen(seconds_ago)
    response = Client().get("/readyz")
    assert (response.status_code, response.json()) == (200, {"status": "ready", "worker": state})
    strict = Client().get("/readyz?require=worker")
    assert strict.status_code == required
    if required == 503:
        assert "no worker" in strict.json()["reason"]


def test_a_worker_that_never_ran_is_unknown_rather_than_late():
    assert Client().get("/readyz").json()["worker"] == "never_seen"
    assert Client().get("/readyz?require=worker").status_code == 503
    assert silences() == []


def test_metrics_have_the_silence_of_the_worker():
    record_seen(95)
    (silence_s,) = silences()
    assert 95 <= silence_s < 110


@pytest.mark.parametrize(("seconds_ago", "late"), [(5, False), (95, True)])
def test_every_page_warns_about_a_missing_worker(seconds_ago, late):
    record_seen(seconds_ago)
    assert (telemetry_status(Alert.objects.none(), timezone.now()).worker_silence_s is not None) is late


def test_publishing_pages_warn_about_a_missing_worker(pool, admin_client):
    policy = pool.policies.get(group=None)
    pages = [f"/policies/{policy.pk}/", "/routers/"]
    record_seen(5)
    assert not any("No worker has run" in admin_client.get(page).content.decode() for page in pages)
    record_seen(95)
    for page in pages:
        assert "No worker has run for 1 min" in admin_client.get(page).content.decode(), page
