"""The page of predictions and outcomes, its charts, and the part of a rollout's page."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.models import Rollout
from controlplane.services.fleet.pools import create_pool
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from telemetry.models import Prediction
from telemetry.services.lab.prediction_records import create_record
from tests.telemetry.what_if_results import predict_draft, predictions_of_every_kind

pytestmark = pytest.mark.django_db
URL = "/what-if/predictions/"


@pytest.fixture
def browser(client, django_user_model):
    client.force_login(django_user_model.objects.create_user("ada", is_superuser=True))
    return client


@pytest.fixture
def rollout(pool) -> Rollout:
    """A rollout of the pool ``chat`` with a prediction."""
    draft = save_draft(pool.policies.select_related("pool").get(), {"strategy": "tiered"})
    predict_draft(draft)
    return publish_revision(draft.pk)


def test_the_page_shows_errors_and_what_the_summary_rests_on(browser, rollout):
    assert "No rollouts yet" in browser.get(URL).content.decode()
    predictions_of_every_kind()
    text = browser.get(URL).content.decode()
    for part in (
        "1 prediction compared",
        "1.5 points",
        "+1.5 points",
        "\u22129 %",
        "Of 1 rollout: 1 compared",
        "chat r2",
    ):
        assert part in text, part


def test_a_pool_is_selected_in_the_url(browser, rollout):
    other = create_pool("code", models=["code"])
    publish_revision(save_draft(other.policies.get(), {"strategy": "random"}).pk)
    predictions_of_every_kind()
    assert "chat r2" in browser.get(URL).content.decode()
    text = browser.get(f"{URL}?pool=code").content.decode()
    assert "code r2" in text
    assert "chat r2" not in text
    assert "No rollouts yet" in browser.get(f"{URL}?pool=none").content.decode()


def test_the_charts_have_the_errors_of_each_pool(browser, rollout):
    predictions_of_every_kind()
    hit_rate = browser.get(f"{URL}figures/hit-rate/").json()
    assert [(line["name"], line["y"]) for line in hit_rate["data"]] == [("chat", [1.5])]
    ttft = browser.get(f"{URL}figures/ttft/?pool=chat").json()
    assert ttft["data"][0]["y"] == [pytest.approx(-9.09)]
    assert browser.get(f"{URL}figures/other/").status_code == 404


def test_a_rollouts_page_shows_prediction_and_outcome(browser, rollout):
    part = f"/what-if/rollouts/{rollout.pk}/"
    assert part in browser.get(f"/rollouts/{rollout.pk}/").content.decode()
    assert "recorded within a minute" in browser.get(part).content.decode()
    create_record(rollout)
    waiting = browser.get(part).content.decode()
    assert "45.0 %" in waiting
    assert "every 15s" in waiting
    predictions_of_every_kind()
    text = browser.get(part).content.decode()
    for shown in ("62.0 %", "60.5 %", "+1.5 points", "4,200 requests", "100.0 %"):
        assert shown in text, shown
    assert "every 15s" not in text


def test_what_was_not_predicted_or_measured_says_why(browser, rollout):
    part = f"/what-if/rollouts/{rollout.pk}/"
    Prediction.objects.create(
        rollout=rollout, reason="No what-if.", state="unmeasured", measured_reason="Another change came first."
    )
    text = browser.get(part).content.decode()
    assert "Not predicted: No what-if." in text
    assert "Not measured: Another change came first." in text
    Prediction.objects.all().delete()
    Rollout.objects.update(started_at=timezone.now() - timedelta(days=30))
    assert "before predictions were recorded" in browser.get(part).content.decode()
