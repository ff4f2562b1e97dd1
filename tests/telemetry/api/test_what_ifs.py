"""``/api/v1/what-ifs``: asking for predictions, following them, cancelling, and the trace."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.services.fleet.pools import create_pool
from routing.schema import RoundRobinSettings
from telemetry.models import WhatIf
from telemetry.services.lab import what_if_runs
from tests.telemetry.services.lab.what_if_world import add_fleet, publish_and_store, traffic

pytestmark = pytest.mark.django_db
URL = "/api/v1/what-ifs"
CANDIDATE = {"name": "lowest_cost", "settings": {"strategy": "lowest_cost"}}


def test_a_prediction_is_queued_run_and_shown(api, pool):
    start = datetime.now(UTC) - timedelta(hours=1)
    publish_and_store(add_fleet(pool), traffic(2, seconds=240), RoundRobinSettings(), start)
    window = {"start": start.isoformat(), "end": (start + timedelta(minutes=4)).isoformat()}

    created = api.post(URL, {"pool": "chat", "candidates": [CANDIDATE], **window})
    assert created.status_code == 201, created.data
    assert (created.data["state"], created.data["result"]) == ("queued", None)
    assert created["Location"] == f"{URL}/{created.data['id']}"
    what_if_runs.run_queued()

    done = api.get(created["Location"]).data
    assert done["state"] == "done", done["reason"]
    assert done["result"]["candidates"][1]["verdict"] in {"better", "unknown"}
    assert done["result"]["candidates"][1]["figures"]["hit_rate"] > done["result"]["measured"]["hit_rate"]
    (row,) = api.get(f"{URL}?pool=chat&state=done").data["results"]
    assert "result" not in row

    trace = api.get(f"{created['Location']}/trace")
    assert trace["Content-Type"] == "application/x-ndjson"
    assert len(trace.content.splitlines()) == done["result"]["replayed_requests"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"candidates": [CANDIDATE]}, "pool"),
        ({"pool": "other", "candidates": [CANDIDATE]}, "pool"),
        ({"pool": "chat"}, "candidates"),
        ({"pool": "chat", "candidates": [{"name": "a", "settings": {"strategy": "magic"}}]}, "candidates"),
        ({"pool": "chat", "candidates": [CANDIDATE], "typo": 1}, "typo"),
        ({"pool": "chat", "candidates": [CANDIDATE], "start": "yesterday"}, "start"),
    ],
)
def test_an_invalid_request_names_the_field(api, body, field):
    create_pool("chat")
    response = api.post(URL, body)
    assert response.status_code == 422
    assert field in str(response.data["errors"])
    assert not WhatIf.objects.exists()
