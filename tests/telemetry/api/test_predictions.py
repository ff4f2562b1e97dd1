"""``/api/v1/predictions``: what was predicted for rollouts, and what became of them."""

from __future__ import annotations

import pytest

from controlplane.services.fleet.pools import create_pool
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from telemetry.models import Prediction
from telemetry.services.lab.prediction_records import create_record
from tests.telemetry.what_if_results import predict_draft, predictions_of_every_kind

pytestmark = pytest.mark.django_db
URL = "/api/v1/predictions"


@pytest.fixture
def rollouts(db):
    """A predicted rollout of the pool ``chat``, and one of ``code``."""
    rollouts = []
    for name in ("chat", "code"):
        pool = create_pool(name, models=[name])
        draft = save_draft(pool.policies.select_related("pool").get(), {"strategy": "tiered"})
        predict_draft(draft)
        rollouts.append(publish_revision(draft.pk))
        create_record(rollouts[-1])
    return rollouts


def test_a_prediction_is_shown_with_its_outcome_and_errors(api, rollouts):
    predictions_of_every_kind()
    (shown,) = api.get(f"{URL}?pool=chat").json()["results"]
    assert (shown["rollout"], shown["policy"], shown["revision"]) == (rollouts[0].pk, "chat", 2)
    assert (shown["state"], shown["predicted"]["hit_rate"], shown["measured"]["hit_rate"]) == ("measured", 0.62, 0.605)
    assert shown["hit_rate_error"] == pytest.approx(0.015)
    assert shown["ttft_p50_error"] == pytest.approx(0.4 / 0.44 - 1)
    assert api.get(f"{URL}/{shown['id']}").json()["measured"]["requests"] == 4200


def test_what_is_unknown_is_null(api, rollouts):
    (shown,) = api.get(f"{URL}?rollout={rollouts[1].pk}").json()["results"]
    assert (shown["state"], shown["measured"], shown["hit_rate_error"]) == ("waiting", None, None)
    assert shown["predicted"]["difference"]["ttft_p50"]["high"] == pytest.approx(0.05)


def test_lists_are_filtered_and_newest_first(api, rollouts):
    listed = [row["rollout"] for row in api.get(URL).json()["results"]]
    assert listed == [rollouts[1].pk, rollouts[0].pk]
    assert api.get(f"{URL}?policy=chat&state=measured").json()["results"] == []
    assert api.get(f"{URL}?state=other").status_code == 422


def test_predictions_are_read_only(api, rollouts):
    record = Prediction.objects.first()
    assert api.post(URL, {}).status_code in {403, 405}
    assert api.delete(f"{URL}/{record.pk}").status_code in {403, 405}
    assert Prediction.objects.count() == 2
