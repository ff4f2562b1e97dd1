"""REST API of series, alert rules, alerts, silences, channels and deliveries."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.models import Router
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from telemetry.api.viewsets import METRICS
from telemetry.models import Alert, AlertRule, Channel, Notification
from telemetry.services.alerts.rules import default_rules
from telemetry.services.notifications import outbox
from telemetry.services.notifications.channels import create_channel, open_config
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading, gap, route_reading, router_scraped
from tests.telemetry.services.notifications.scripted import queue_messages

pytestmark = pytest.mark.django_db
ROOT = "/api/v1"


def get_series(api, **query):
    return api.get(f"{ROOT}/series", {"from": T0.isoformat(), "to": (T0 + timedelta(seconds=30)).isoformat(), **query})


def test_a_series_has_a_reason_for_each_gap(api, pool):
    r1 = add_replica(pool, name="r1", url="http://127.0.0.1:9101")
    engine_reading(r1, T0 + timedelta(seconds=10), queries=10, hits=5)
    gap(r1, T0 + timedelta(seconds=20))

    response = get_series(api, metric="hit_rate", by="replica", pool="chat", step=10)

    assert response.status_code == 200
    body = response.json()
    assert (body["metric"], body["by"], body["step_s"]) == ("hit_rate", "replica", 10)
    (line,) = body["series"]
    assert [(point["value"], point["state"]) for point in line["points"]] == [
        (0.5, "ok"), (None, "stale"), (None, "unknown"),
    ]  # fmt: skip
    assert line["points"][0]["at"] == "2031-03-04T12:00:00Z"


def test_a_quantile_above_the_last_bucket_has_no_upper_bound(api, pool):
    r1 = add_replica(pool, name="r1", url="http://127.0.0.1:9101")
    engine_reading(r1, T0 + timedelta(seconds=10), queries=10, hits=5, ttft={4: 3})

    response = get_series(api, metric="ttft", step=10)

    point = response.json()["series"][0]["points"][0]
    assert (point["value"], point["low"], point["high"]) == (5.0, 5.0, None)
    json.loads(response.content, parse_constant=pytest.fail)  # no Infinity, no NaN


@pytest.mark.parametrize(
    "metric",
    sorted(METRICS),
)
def test_every_metric_can_be_drawn(api, pool, metric):
    for by in METRICS[metric]:
        assert get_series(api, metric=metric, by=by).status_code == 200


def series_values(api, **query):
    """The values of each line, by its label."""
    body = get_series(api, pool="chat", step=10, **query).json()
    return {line["label"]: [point["value"] for point in line["points"]] for line in body["series"]}


def test_requests_errors_and_tokens_are_sums_over_each_step(api, pool):
    router = Router.objects.create(name="router-1", admin_url="http://127.0.0.1:8081", boot="b", last_seen_at=T0)
    for at in (5, 15):
        router_scraped(router, T0 + timedelta(seconds=at))
    first = T0 + timedelta(seconds=5)
    reported = {"usage_reported": 1, "prompt_tokens": 90, "cached_tokens": 60}
    route_reading(router, first, group="coding", requests=5, ok_requests=3, replica_error_requests=2, **reported)
    route_reading(router, first, group="", requests=4, ok_requests=4)

    # 0 in a step that was scraped without requests; unknown in a step that was not scraped, or without reported tokens
    assert series_values(api, metric="requests") == {"coding": [5, 0, None], "no group": [4, 0, None]}
    assert series_values(api, metric="requests", by="pool") == {"chat": [9, 0, None]}
    assert series_values(api, metric="errors", by="pool") == {"chat": [2, 0, None]}
    assert series_values(api, metric="prompt_tokens") == {"coding": [90, 0, None], "no group": [None, 0, None]}
    assert series_values(api, metric="cached_tokens", by="pool") == {"chat": [60, 0, None]}


@pytest.mark.parametrize(
    ("query", "pointer"),
    [
        ({}, "#/metric"),
        ({"metric": "colour"}, "#/metric"),
        ({"metric": "ttft", "by": "replica"}, "#/by"),
        ({"metric": "hit_rate", "pool": "nowhere"}, "#/pool"),
        ({"metric": "hit_rate", "step": "0"}, "#/step"),
        ({"metric": "hit_rate", "from": "2031-03-05T12:00:00Z"}, "#/to"),
        ({"metric": "hit_rate", "from": "2030-03-04T12:00:00Z", "step": "1"}, "#/step"),
        ({"metric": "hit_rate", "from": "yesterday"}, "#/from"),
    ],
)
def test_an_invalid_series_query_is_rejected_by_field(api, pool, query, pointer):
    response = get_series(api, **query)

    assert response.status_code == 422
    assert response["content-type"].startswith("application/problem+json")
    assert pointer in [error["pointer"] for error in response.json()["errors"]]


def test_a_rule_is_created_changed_and_deleted(api, pool):
    created = api.post(f"{ROOT}/alert-rules", {"pool": "chat", "name": "Strict", "settings": {"drop_points": 5}})
    assert created.status_code == 201
    address = f"{ROOT}/alert-rules/{created.json()['id']}"
    assert created.json()["effective_settings"]["bin_s"] == 10

    changed = api.patch(address, {"settings": {"drop_points": 25}, "enabled": False})
    assert (changed.json()["settings"], changed.json()["enabled"]) == ({"drop_points": 25}, False)
    names = [rule["name"] for rule in api.get(f"{ROOT}/alert-rules").json()["results"]]
    assert sorted(names) == sorted(["Strict", *(rule.name for rule in default_rules(5.0))])

    assert api.delete(address).status_code == 204
    assert api.get(address).status_code == 404


def test_invalid_rule_settings_are_rejected_by_field(api, pool):
    response = api.post(f"{ROOT}/alert-rules", {"pool": "chat", "name": "x", "settings": {"drop_points": 0}})

    assert response.status_code == 422
    assert response.json()["errors"] == [{"pointer": "#/settings/drop_points", "detail": "Expected `float` >= 1.0"}]


def test_a_second_rule_of_the_same_name_is_rejected(api, pool):
    assert api.post(f"{ROOT}/alert-rules", {"pool": "chat", "name": "Hit rate drop"}).status_code == 409


def test_alerts_are_listed_and_filtered(api, pool):
    rule = AlertRule.objects.get(kind="hit_rate_drop")
    for state in ("firing", "resolved"):
        Alert.objects.create(rule=rule, pool=pool, state=state, started_at=T0, last_breach_at=T0)

    assert len(api.get(f"{ROOT}/alerts").json()["results"]) == 2
    (firing,) = api.get(f"{ROOT}/alerts", {"state": "firing", "pool": "chat"}).json()["results"]
    assert (firing["state"], firing["rule"]) == ("firing", "Hit rate drop")


def test_no_response_but_the_first_has_a_channels_secrets(api):
    created = api.post(f"{ROOT}/channels", {"name": "ops", "config": {"url": "https://hooks.example/s3cret-path"}})

    assert created.status_code == 201
    assert created["cache-control"] == "private, no-store"
    secret = created.json()["secret"]
    assert secret == open_config(Channel.objects.get())["secret"]
    address = f"{ROOT}/channels/{created.json()['id']}"
    for response in (api.get(address), api.get(f"{ROOT}/channels"), api.patch(address, {"enabled": False})):
        assert "hooks.example" in response.content.decode()
        assert "s3cret-path" not in response.content.decode()
        assert secret not in response.content.decode()


def test_an_invalid_config_is_rejected_without_quoting_it(api):
    response = api.post(f"{ROOT}/channels", {"name": "ops", "config": {"url": "ftp://hooks.example/s3cret-path"}})

    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == "#/config/url"
    assert "s3cret-path" not in response.content.decode()


def test_a_test_message_is_listed_as_a_delivery_and_can_be_replayed(api, receiver):
    channel = create_channel("ops", config={"url": receiver.url})

    sent = api.post(f"{ROOT}/channels/{channel.pk}/test")
    assert sent.status_code == 202
    outbox.deliver_due()

    address = f"{ROOT}/deliveries/{sent.json()['id']}"
    delivery = api.get(address).json()
    assert (delivery["state"], delivery["attempts"][0]["status"]) == ("delivered", 200)
    assert api.post(f"{address}/replay").status_code == 202
    outbox.deliver_due()
    assert len(receiver.received) == 2


def test_the_deliveries_of_an_alert_include_messages_about_several(api, receiver):
    channel = create_channel("ops", config={"url": receiver.url})
    queue_messages(channel, "firing", alert=7)
    both, _ = queue_messages(channel, "firing", "test", alert=8)
    Notification.objects.filter(pk=both.pk).update(alert_ids=[7, 8])

    found = {alert: len(api.get(f"{ROOT}/deliveries?alert={alert}").json()["results"]) for alert in (7, 8, 9)}
    assert found == {7: 2, 8: 2, 9: 0}


def test_reads_need_a_token_and_changes_need_the_write_scope(client_with, pool):
    assert APIClient().get(f"{ROOT}/alerts").status_code == 401
    reader = client_with("read")
    assert reader.get(f"{ROOT}/alert-rules").status_code == 200
    assert reader.post(f"{ROOT}/alert-rules", {"pool": "chat", "name": "x"}).status_code == 403
    assert reader.post(f"{ROOT}/channels", {"name": "x", "config": {}}).status_code == 403


@pytest.mark.parametrize(
    ("address", "queries"), [("alert-rules", 3), ("alerts", 2), ("channels", 3), ("deliveries", 3)]
)
def test_the_number_of_queries_does_not_grow_with_a_list(api, pool, address, queries, django_assert_max_num_queries):
    rule = AlertRule.objects.get(kind="hit_rate_drop")
    channel = create_channel("ops", config={"url": "https://hooks.example/x"})
    for number in range(5):
        Alert.objects.create(rule=rule, pool=pool, state="resolved", started_at=T0, last_breach_at=T0)
        create_channel(f"c{number}", config={"url": "https://hooks.example/x"})
        outbox.Notification.objects.create(channel=channel, kind="test", payload={}, next_at=T0, created_at=T0)
    with django_assert_max_num_queries(queries + 2):  # two for authentication
        assert api.get(f"{ROOT}/{address}").status_code == 200


def test_a_rule_of_another_kind_is_created_filtered_and_previewed(api, pool):
    create_task_group(pool, "coding")
    rule = {"pool": "chat", "name": "Floor", "kind": "hit_rate_floor", "group": "coding", "severity": "critical"}
    created = api.post(f"{ROOT}/alert-rules", {**rule, "settings": {"floor_ratio": 0.4}, "repeat_s": 0}).json()
    assert (created["group"], created["severity"], created["repeat_s"]) == ("coding", "critical", 0)
    assert created["effective_settings"]["floor_ratio"] == 0.4
    assert len(api.get(f"{ROOT}/alert-rules", {"kind": "hit_rate_floor"}).json()["results"]) == 1

    preview_input = {"pool": "chat", "kind": "hit_rate_drop", "settings": {"days": 0}, "days": 0.1}
    preview = api.post(f"{ROOT}/alert-rules/preview", preview_input).json()
    assert (preview["fired"], preview["episodes"]) == (0, [])
    assert "too little history" in preview["summary"]
    invalid = api.post(f"{ROOT}/alert-rules/preview", {**preview_input, "settings": {"bin_s": 1}})
    assert invalid.json()["errors"][0]["pointer"] == "#/settings/bin_s"


def test_an_alert_is_acknowledged_and_silenced(api, pool):
    rule = AlertRule.objects.get(kind="hit_rate_drop")
    alert = Alert.objects.create(
        rule=rule, pool=pool, state="firing", started_at=T0, last_breach_at=T0, labels={"pool": "chat"}
    )
    address = f"{ROOT}/alerts/{alert.pk}"
    acknowledged = api.post(f"{address}/acknowledge", {"note": "looking into it"}).json()
    assert (acknowledged["acknowledged_by"], acknowledged["history"][0]["transition"]) == ("olga", "acknowledged")
    assert api.post(f"{address}/unacknowledge").json()["acknowledged_at"] is None
    assert len(api.get(f"{ROOT}/alerts", {"acknowledged": "false"}).json()["results"]) == 1

    matchers = ["pool=chat", {"label": "pool", "op": "!=", "value": "lab, old"}]  # a matcher as an object
    preview = api.post(f"{ROOT}/silences/preview", {"matchers": matchers}).json()
    assert [row["id"] for row in preview["alerts"]] == [alert.pk]
    ends_at = (timezone.now() + timedelta(hours=1)).isoformat()
    created = api.post(f"{ROOT}/silences", {"matchers": matchers, "ends_at": ends_at, "comment": "work"})
    assert (created.status_code, created.json()["matchers"]) == (201, ["pool=chat", 'pool!="lab, old"'])
    assert api.post(f"{ROOT}/silences/preview", {"matchers": [7]}).status_code == 422
    silence = f"{ROOT}/silences/{created.json()['id']}"
    assert api.patch(silence, {"comment": "more work"}).json()["comment"] == "more work"
    assert api.delete(silence).status_code == 204
    assert api.get(silence).json()["ends_at"] <= timezone.now().isoformat()
    Alert.objects.update(state="resolved")
    assert api.post(f"{address}/acknowledge", {}).status_code == 409
