"""``/api/v1/scaling``, the pool's page and ``/metrics`` show the same signals."""

from __future__ import annotations

from html import unescape

import pytest
import time_machine

from tests.telemetry.conftest import T0
from tests.telemetry.services.lab.test_scaling import LOAD, replicas, routed  # noqa: F401 - a fixture

pytestmark = pytest.mark.django_db


def test_rest_metrics_and_the_pools_page_show_the_same(pool, replicas, api, client, admin_user):  # noqa: F811
    routed("a", {"chat": LOAD | {"saturation_ratio": 0.9}})
    with time_machine.travel(T0, tick=False):
        client.force_login(admin_user)
        body = api.get("/api/v1/scaling?pool=chat").json()
        page = client.get("/?pool=chat").text
        exposed = client.get("/metrics").text

    assert (body["replicas"], body["recommended_replicas"], body["limited_by"]) == (4, 6, "prefill")
    assert (body["saturation_ratio"], body["waiting_work_s"], body["kv_usage_ratio"]) == (0.9, 1.5, 0.1)
    assert "<strong>6 replicas</strong>, 4 serve" in page
    assert body["reason"] in unescape(page)
    for line in ("saturation_ratio 0.9", "waiting_work_seconds 1.5", "replicas 4.0", "recommended_replicas 6.0"):
        name, value = line.split()
        assert f'warmpath_controlplane_pool_{name}{{pool="chat"}} {value}' in exposed


def test_an_unknown_recommendation_is_null_and_has_no_sample(pool, api, client):
    body = api.get("/api/v1/scaling?pool=chat").json()

    assert (body["recommended_replicas"], body["saturation_ratio"]) == (None, None)
    assert "pool_recommended_replicas{" not in client.get("/metrics").text
    assert api.get("/api/v1/scaling?pool=other").status_code == 422
