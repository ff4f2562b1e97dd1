"""The REST API of telemetry, through its addresses."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.models import Router
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from telemetry.api.viewsets import CHARTS
from telemetry.models import Alert, AlertRule, Channel
from telemetry.services.alerts.rules import default_rules
from telemetry.services.notifications import outbox
from telemetry.services.notifications.channels import create_channel, open_config
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading, gap, route_reading, router_scraped

pytestmark = pytest.mark.django_db
ROOT = "/api/v1"


def chart(api, **query):
    return api.get(f"{ROOT}/series", {"from": T0.isoformat(), "to": (T0 + timedelta(seconds=30)).isoformat(), **query})


def test_a_chart_as_json_with_a_reason_for_each_gap(api, pool):
    r1 = add_replica(pool, name="r1", url="http://127.0.0.1:9101")
    engine_reading(r1, T0 + timedelta(seconds=10), queries=10, hits=5)
    gap(r1, T0 + timedelta(seconds=20))

    answer = chart(api, metric="hit_rate", by="replica", pool="chat", step=10)

    assert answer.status_code == 200
    body = answer.json()
    assert (body["metric"], body["by"], body["step_s"]) == ("hit_rate", "replica", 10)
    (line,) = body["series"]
    assert [(point["value"], point["state"]) for point in line["points"]] == [
        (0.5, "ok"), (None, "stale"), (None, "unknown"),
    ]  # fmt: skip
    assert line["points"][0]["at"] == "2031-03-04T12:00:00Z"


def test_a_quantile_above_the_last_edge_has_no_end_in_json(api, pool):
    r1 = add_replica(pool, name="r1", url="http://127.0.0.1:9101")
    engine_reading(r1, T0 + timedelta(seconds=10), queries=10, hits=5, ttft={4: 3})

    answer = chart(api, metric="ttft", step=10)

    point = answer.json()["series"][0]["points"][0]
    assert (point["value"], point["low"], point["high"]) == (5.0, 5.0, None)
    json.loads(answer.content, parse_constant=pytest.fail)  # no Infinity, no NaN


@pytest.mark.parametrize(
    "metric",
    sorted(CHARTS),
)
def test_every_metric_can_be_drawn(api, pool, metric):
    for by in CHARTS[metric]:
        assert chart(api, metric=metric, by=by).status_code == 200


def drawn(api, **query):
    """The values of each line, by its label."""
    answer = chart(api, pool="chat", step=10, **query).json()
    return {line["label"]: [point["value"] for point in line["points"]] for line in answer["series"]}


def test_requests_errors_and_tokens_are_sums_over_each_step(api, pool):
    router = Router.objects.create(name="router-1", admin_url="http://127.0.0.1:8081", boot="b", last_seen_at=T0)
    for at in (5, 15):
        router_scraped(router, T0 + timedelta(seconds=at))
    first = T0 + timedelta(seconds=5)
    told = {"usage_reported": 1, "prompt_tokens": 90, "cached_tokens": 60}
    route_reading(router, first, group="coding", requests=5, ok_requests=3, replica_error_requests=2, **told)
    route_reading(router, first, group="", requests=4, ok_requests=4)

    # read and quiet is 0; not read is unknown, and so are tokens that no response told
    assert drawn(api, metric="requests") == {"coding": [5, 0, None], "no group": [4, 0, None]}
    assert drawn(api, metric="requests", by="pool") == {"chat": [9, 0, None]}
    assert drawn(api, metric="errors", by="pool") == {"chat": [2, 0, None]}
    assert drawn(api, metric="prompt_tokens") == {"coding": [90, 0, None], "no group": [None, 0, None]}
    assert drawn(api, metric="cached_tokens", by="pool") == {"chat": [60, 0, None]}


def test_latency_of_plain_responses_is_apart_from_that_of_streams(api, pool):
    router = Router.objects.create(name="router-1", admin_url="http://127.0.0.1:8081", boot="b", last_seen_at=T0)
    route_reading(router, T0 + timedelta(seconds=5), plain={100: 4})

    assert {label: values[0] is not None for label, values in drawn(api, metric="latency").items()} == {
        "p50 plain (router)": True,
        "p95 plain (router)": True,
    }
    assert drawn(api, metric="latency", by="streamed")["p50 streamed (router)"] == [None, None, None]


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
def test_a_chart_that_cannot_be_drawn_is_refused_by_field(api, pool, query, pointer):
    answer = chart(api, **query)

    assert answer.status_code == 422
    assert answer["content-type"].startswith("application/problem+json")
    assert pointer in [error["pointer"] for error in answer.json()["errors"]]


def test_a_rule_is_made_changed_and_removed(api, pool):
    made = api.post(f"{ROOT}/alert-rules", {"pool": "chat", "name": "Strict", "settings": {"drop_points": 5}})
    assert made.status_code == 201
    address = f"{ROOT}/alert-rules/{made.json()['id']}"
    assert made.json()["effective_settings"]["bin_s"] == 10

    changed = api.patch(address, {"settings": {"drop_points": 25}, "enabled": False})
    assert (changed.json()["settings"], changed.json()["enabled"]) == ({"drop_points": 25}, False)
    names = [rule["name"] for rule in api.get(f"{ROOT}/alert-rules").json()["results"]]
    assert sorted(names) == sorted(["Strict", *(one.name for one in default_rules(5.0))])

    assert api.delete(address).status_code == 204
    assert api.get(address).status_code == 404


def test_settings_that_no_rule_can_have_are_refused_by_field(api, pool):
    answer = api.post(f"{ROOT}/alert-rules", {"pool": "chat", "name": "x", "settings": {"drop_points": 0}})

    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"pointer": "#/settings/drop_points", "detail": "Expected `float` >= 1.0"}]


def test_two_rules_of_a_pool_never_share_a_name(api, pool):
    assert api.post(f"{ROOT}/alert-rules", {"pool": "chat", "name": "Hit rate drop"}).status_code == 409


def test_alerts_are_read_and_narrowed(api, pool):
    rule = AlertRule.objects.get(kind="hit_rate_drop")
    for state in ("firing", "resolved"):
        Alert.objects.create(rule=rule, pool=pool, state=state, started_at=T0, last_breach_at=T0)

    assert len(api.get(f"{ROOT}/alerts").json()["results"]) == 2
    (firing,) = api.get(f"{ROOT}/alerts", {"state": "firing", "pool": "chat"}).json()["results"]
    assert (firing["state"], firing["rule"]) == ("firing", "Hit rate drop")


def test_a_channel_s_secrets_go_in_and_never_come_out(api):
    made = api.post(f"{ROOT}/channels", {"name": "ops", "config": {"url": "https://hooks.example/s3cret-path"}})

    assert made.status_code == 201
    assert made["cache-control"] == "private, no-store"
    secret = made.json()["secret"]
    assert secret == open_config(Channel.objects.get())["secret"]
    address = f"{ROOT}/channels/{made.json()['id']}"
    for answer in (api.get(address), api.get(f"{ROOT}/channels"), api.patch(address, {"enabled": False})):
        assert "hooks.example" in answer.content.decode()
        assert "s3cret-path" not in answer.content.decode()
        assert secret not in answer.content.decode()


def test_a_config_that_cannot_be_is_refused_without_repeating_it(api):
    answer = api.post(f"{ROOT}/channels", {"name": "ops", "config": {"url": "ftp://hooks.example/s3cret-path"}})

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "#/config/url"
    assert "s3cret-path" not in answer.content.decode()


def test_a_test_message_can_be_followed_in_the_deliveries_and_replayed(api, receiver):
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


def test_reading_needs_a_token_and_changing_the_scope_for_it(client_with, pool):
    assert APIClient().get(f"{ROOT}/alerts").status_code == 401
    reader = client_with("read")
    assert reader.get(f"{ROOT}/alert-rules").status_code == 200
    assert reader.post(f"{ROOT}/alert-rules", {"pool": "chat", "name": "x"}).status_code == 403
    assert reader.post(f"{ROOT}/channels", {"name": "x", "config": {}}).status_code == 403


@pytest.mark.parametrize(
    ("address", "queries"), [("alert-rules", 3), ("alerts", 2), ("channels", 3), ("deliveries", 3)]
)
def test_lists_cost_the_same_queries_however_long(api, pool, address, queries, django_assert_max_num_queries):
    rule = AlertRule.objects.get(kind="hit_rate_drop")
    channel = create_channel("ops", config={"url": "https://hooks.example/x"})
    for number in range(5):
        Alert.objects.create(rule=rule, pool=pool, state="resolved", started_at=T0, last_breach_at=T0)
        create_channel(f"c{number}", config={"url": "https://hooks.example/x"})
        outbox.Notification.objects.create(channel=channel, kind="test", payload={}, next_at=T0, created_at=T0)
    with django_assert_max_num_queries(queries + 2):  # and signing in
        assert api.get(f"{ROOT}/{address}").status_code == 200


def test_a_rule_of_any_kind_is_narrowed_previewed_and_described(api, pool):
    create_task_group(pool, "coding")
    rule = {"pool": "chat", "name": "Floor", "kind": "hit_rate_floor", "group": "coding", "severity": "critical"}
    made = api.post(f"{ROOT}/alert-rules", {**rule, "settings": {"floor_ratio": 0.4}, "repeat_s": 0}).json()
    assert (made["group"], made["severity"], made["repeat_s"]) == ("coding", "critical", 0)
    assert made["effective_settings"]["floor_ratio"] == 0.4
    assert len(api.get(f"{ROOT}/alert-rules", {"kind": "hit_rate_floor"}).json()["results"]) == 1

    asked = {"pool": "chat", "kind": "hit_rate_drop", "settings": {"days": 0}, "days": 0.1}
    preview = api.post(f"{ROOT}/alert-rules/preview", asked).json()
    assert (preview["fired"], preview["episodes"]) == (0, [])
    assert "too little history" in preview["sentence"]
    wrong = api.post(f"{ROOT}/alert-rules/preview", {**asked, "settings": {"bin_s": 1}})
    assert wrong.json()["errors"][0]["pointer"] == "#/settings/bin_s"


def test_an_alert_is_acknowledged_and_silenced(api, pool):
    rule = AlertRule.objects.get(kind="hit_rate_drop")
    alert = Alert.objects.create(
        rule=rule, pool=pool, state="firing", started_at=T0, last_breach_at=T0, labels={"pool": "chat"}
    )
    address = f"{ROOT}/alerts/{alert.pk}"
    taken = api.post(f"{address}/acknowledge", {"note": "mine"}).json()
    assert (taken["acknowledged_by"], taken["steps"][0]["move"]) == ("olga", "acknowledged")
    assert api.post(f"{address}/release").json()["acknowledged_at"] is None
    assert len(api.get(f"{ROOT}/alerts", {"acknowledged": "false"}).json()["results"]) == 1

    matchers = ["pool=chat", {"label": "pool", "op": "!=", "value": "lab, old"}]  # as before: in parts
    found = api.post(f"{ROOT}/silences/preview", {"matchers": matchers}).json()
    assert [one["id"] for one in found["alerts"]] == [alert.pk]
    until = (timezone.now() + timedelta(hours=1)).isoformat()
    made = api.post(f"{ROOT}/silences", {"matchers": matchers, "ends_at": until, "comment": "work"})
    assert (made.status_code, made.json()["matchers"]) == (201, ["pool=chat", 'pool!="lab, old"'])
    assert api.post(f"{ROOT}/silences/preview", {"matchers": [7]}).status_code == 422
    silence = f"{ROOT}/silences/{made.json()['id']}"
    assert api.patch(silence, {"comment": "more work"}).json()["comment"] == "more work"
    assert api.delete(silence).status_code == 204
    assert api.get(silence).json()["ends_at"] <= timezone.now().isoformat()
    Alert.objects.update(state="resolved")
    assert api.post(f"{address}/acknowledge", {}).status_code == 409
