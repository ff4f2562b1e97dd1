"""``?dry_run=true`` validates and describes a change, and changes, announces and wakes nothing."""

import copy
from datetime import timedelta

import pytest
import redis
from django.contrib.auth import get_user_model
from django.db import connection
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.access.rules import RULES
from controlplane.celery import app
from controlplane.models import ApiToken, Pool, Router
from controlplane.services.access.tokens import create_token
from controlplane.services.fleet.pools import update_project
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import create_policy, publish_revision, save_draft
from controlplane.services.policies.rollouts import pause_rollout
from telemetry.models import Heartbeat, Notification, NotificationState
from telemetry.services.alerts.alerts import acknowledge
from tests.controlplane.access.conftest import create_project_with_objects
from tests.controlplane.rollouts import publish_stages

pytestmark = pytest.mark.django_db
ROOT = "/api/v1/"
DRAFT = {"settings": {"strategy": "prefix_hash"}, "reason": "warmer"}

# A path and a valid body for every changing operation. {…} are keys of ``object_keys``.
EXAMPLES = {
    ("api:config", "PUT"): ("config", {"format": 1, "pools": [{"name": "here-pool", "description": "new"}]}),
    ("api:project-list", "POST"): ("projects", {"name": "new"}),
    ("api:project-detail", "PATCH"): ("projects/here", {"needs_approval": True}),
    ("api:project-detail", "DELETE"): ("projects/bare", None),
    ("api:pool-list", "POST"): ("pools", {"name": "new", "models": ["m"]}),
    ("api:pool-detail", "PATCH"): ("pools/here-pool", {"description": "new"}),
    ("api:pool-detail", "DELETE"): ("pools/bare-pool", None),
    ("api:replica-list", "POST"): ("replicas", {"pool": "here-pool", "name": "new", "url": "http://10.0.9.9:8000"}),
    ("api:replica-detail", "PATCH"): ("replicas/here-replica", {"weight": 2}),
    ("api:replica-detail", "DELETE"): ("replicas/here-replica", None),
    ("api:replica-state", "POST"): ("replicas/here-replica/state", {"state": "draining"}),
    ("api:replica-source-list", "POST"): (
        "replica-sources",
        {"pool": "here-pool", "name": "new", "kind": "dns", "settings": {"host": "new.test"}},
    ),
    ("api:replica-source-detail", "PATCH"): ("replica-sources/here-source", {"interval_s": 60}),
    ("api:replica-source-detail", "DELETE"): ("replica-sources/here-source", None),
    ("api:replica-source-poll", "POST"): ("replica-sources/here-source/poll", None),
    ("api:discovered-replica-adopt", "POST"): ("discovered-replicas/{discovered}/adopt", {}),
    ("api:router-detail", "DELETE"): ("routers/router-1", None),
    ("api:task-group-list", "POST"): ("task-groups", {"pool": "here-pool", "name": "new"}),
    ("api:task-group-detail", "PATCH"): ("task-groups/{group}", {"owner": "web"}),
    ("api:task-group-detail", "DELETE"): ("task-groups/{group}", None),
    ("api:task-group-purge-response-cache", "POST"): ("task-groups/{group}/purge-response-cache", {"namespace": ""}),
    ("api:policy-list", "POST"): ("policies", {"group": "{plain}"}),
    ("api:policy-detail", "DELETE"): ("policies/here-pool.here-group", None),
    ("api:policy-draft", "PUT"): ("policies/here-pool/draft", DRAFT),
    ("api:policy-draft", "DELETE"): ("policies/here-pool.here-group/draft", None),
    ("api:policy-publish", "POST"): ("policies/here-pool.here-group/publish", {"reason": "why not"}),
    ("api:policy-revert", "POST"): ("policies/here-pool/revert", {"revision": 1}),
    ("api:rollout-pause", "POST"): ("rollouts/{canary}/pause", {"reason": "lunch"}),
    ("api:rollout-abort", "POST"): ("rollouts/{canary}/abort", {"reason": "no"}),
    ("api:rollout-resume", "POST"): ("rollouts/{paused}/resume", None),
    ("api:rollout-promote", "POST"): ("rollouts/{paused}/promote", None),
    ("api:rollout-approve", "POST"): ("rollouts/{awaiting}/approve", None),
    ("api:client-key-list", "POST"): ("client-keys", {"project": "here", "name": "new", "groups": ["here-group"]}),
    ("api:client-key-detail", "PATCH"): ("client-keys/{key}", {"requests_per_s": 5}),
    ("api:client-key-detail", "DELETE"): ("client-keys/{key}", None),
    ("api:fleet-settings", "PATCH"): ("fleet-settings", {"needs_key": True}),
    ("api:token-list", "POST"): ("tokens", {"name": "ci", "scopes": ["read"]}),
    ("api:token-detail", "DELETE"): ("tokens/{token}", None),
    ("telemetry-api:alert-rule-list", "POST"): ("alert-rules", {"pool": "here-pool", "name": "new"}),
    ("telemetry-api:alert-rule-detail", "PATCH"): ("alert-rules/{rule}", {"enabled": False}),
    ("telemetry-api:alert-rule-detail", "DELETE"): ("alert-rules/{rule}", None),
    ("telemetry-api:alert-acknowledge", "POST"): ("alerts/{alert}/acknowledge", {"note": "mine"}),
    ("telemetry-api:alert-unacknowledge", "POST"): ("alerts/{alert}/unacknowledge", None),
    ("telemetry-api:what-if-list", "POST"): (
        "what-ifs",
        {"pool": "here-pool", "candidates": [{"name": "random", "settings": {"strategy": "random"}}]},
    ),
    ("telemetry-api:what-if-cancel", "POST"): ("what-ifs/{what_if}/cancel", None),
    ("telemetry-api:silence-list", "POST"): (
        "silences",
        {
            "project": "here",
            "matchers": [{"label": "pool", "op": "=~", "value": "here-.*"}],
            "ends_at": (timezone.now() + timedelta(days=1)).isoformat(),
            "comment": "work",
        },
    ),
    ("telemetry-api:silence-detail", "PATCH"): ("silences/{silence}", {"comment": "more work"}),
    ("telemetry-api:silence-detail", "DELETE"): ("silences/{silence}", None),
    ("telemetry-api:channel-list", "POST"): ("channels", {"name": "new", "config": {"url": "https://hooks.example/x"}}),
    ("telemetry-api:channel-detail", "PATCH"): ("channels/{channel}", {"enabled": False}),
    ("telemetry-api:channel-detail", "DELETE"): ("channels/{channel}", None),
    ("telemetry-api:channel-test", "POST"): ("channels/{channel}/test", None),
    ("telemetry-api:metrics-server-list", "POST"): ("metrics-servers", {"name": "new", "url": "http://10.0.0.9:9090"}),
    ("telemetry-api:metrics-server-detail", "PATCH"): ("metrics-servers/{server}", {"lookback_s": 30}),
    ("telemetry-api:metrics-server-detail", "DELETE"): ("metrics-servers/{server}", None),
    ("telemetry-api:channel-rotate", "POST"): ("channels/{channel}/rotate", None),
    ("telemetry-api:heartbeat", "POST"): ("heartbeat", {"url": "https://watch.example/x", "every_s": 60}),
    ("telemetry-api:heartbeat", "PATCH"): ("heartbeat", {"every_s": 30}),
    ("telemetry-api:heartbeat", "DELETE"): ("heartbeat", None),
    ("telemetry-api:delivery-replay", "POST"): ("deliveries/{notification}/replay", None),
}


def test_every_changing_route_has_an_example():
    writes = {
        (route, method)
        for route, rule in RULES.items()
        for method in rule.roles
        if route.partition(":")[0] in {"api", "telemetry-api"} and method != "GET"
    }
    writes -= {("api:router-explain", "POST"), ("telemetry-api:metrics-server-test", "POST")}  # ask, and change nothing
    writes -= {("telemetry-api:alert-rule-preview", "POST"), ("telemetry-api:silence-preview", "POST")}  # nor do these
    assert writes == set(EXAMPLES), "add an address and a body to EXAMPLES, so that its dry run is tested"


def store_objects():
    """One object of every kind, and a token that is not the script's; their keys and the script's client."""
    operator = get_user_model().objects.create_user("olga", is_superuser=True)
    here = create_project_with_objects("here", 1)
    bare = create_project_with_objects("bare", 2)
    for row in (bare.alert, bare.rule, bare.policy, bare.group, bare.source, bare.replica):
        row.delete()
    Router.objects.update(lost_at=timezone.now())
    Notification.objects.update(state=NotificationState.FAILED)
    publish_revision(save_draft(here.pool.policies.get(group=None), {"strategy": "least_load"}).pk)
    update_project(bare.project, needs_approval=True)
    awaiting = publish_revision(save_draft(bare.pool.policies.get(), {"strategy": "least_load"}).pk)
    paused = pause_rollout(publish_stages(here.pool.policies.get(group=None)).pk, by=operator)
    own = create_policy(here.pool, create_task_group(here.pool, "own"))
    publish_revision(save_draft(own, {"strategy": "random"}).pk)
    rollouts = {"awaiting": awaiting.pk, "paused": paused.pk, "canary": publish_stages(own).pk}
    plain = create_task_group(here.pool, "plain")
    other, _ = create_token(operator, name="other", scopes=["read"])
    acknowledge(here.alert, by=operator)
    named = ("group", "key", "rule", "alert", "silence", "channel", "server", "notification", "discovered", "what_if")
    keys = {name: getattr(here, name).pk for name in named}
    return {**keys, **rollouts, "plain": plain.pk, "token": other.pk}, client_of(operator)


def client_of(operator):
    """A client with a token whose use is not recorded."""
    _, text = create_token(operator, name="test", scopes=["admin"])
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    client.defaults["HTTP_IF_MATCH"] = "*"
    ApiToken.objects.update(last_used_at=timezone.now() + timedelta(days=1))
    return client


@pytest.fixture(scope="module")
def stored(once_for_module):
    return once_for_module(store_objects)


@pytest.fixture
def object_keys(stored):
    return stored[0]


@pytest.fixture
def script(stored):
    return copy.deepcopy(stored[1])


@pytest.fixture
def broker(valkey, monkeypatch):
    """A connection to a real broker with an empty queue."""
    monkeypatch.setattr(app.conf, "broker_url", valkey)
    path = valkey.removeprefix("redis+socket://").partition("?")[0]
    with redis.Redis(unix_socket_path=path) as queue:
        queue.flushall()
        yield queue


def everything():
    """A digest of every row of every table."""
    with connection.cursor() as cursor:
        digests = {}
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"select count(*), md5(string_agg(t::text, '|' order by t::text)) from {table} t")
            digests[table] = cursor.fetchone()
    return digests


def fill_in(value, keys):
    if isinstance(value, dict):
        return {key: fill_in(inner, keys) for key, inner in value.items()}
    return value.format(**keys) if isinstance(value, str) else value


@pytest.mark.parametrize(("route", "method"), sorted(EXAMPLES))
def test_a_dry_run_describes_the_change_and_changes_nothing(
    script, object_keys, broker, django_capture_on_commit_callbacks, route, method
):
    path, body = (fill_in(part, object_keys) for part in EXAMPLES[route, method])
    if (route, method) == ("api:project-detail", "DELETE"):
        Pool.objects.get(name="bare-pool").delete()
    if (route, method) == ("telemetry-api:heartbeat", "POST"):
        Heartbeat.objects.all().delete()
        del script.defaults["HTTP_IF_MATCH"]  # no heartbeat exists, so there is no version
    send, before = getattr(script, method.lower()), everything()

    with django_capture_on_commit_callbacks(execute=True):
        plan = send(f"{ROOT}{path}?dry_run=true", body)

    assert plan.status_code == 200, plan.content
    assert (plan["Dry-Run"], plan.json()["dry_run"]) == ("true", True)
    assert everything() == before
    assert broker.keys() == []
    response = send(f"{ROOT}{path}", body)
    assert response.status_code == plan.json()["status"], response.content
    assert everything() != before, "the example changes nothing without a dry run either"


def test_a_dry_run_shows_changes_configuration_and_events(script):
    plan = script.patch(f"{ROOT}replicas/here-replica?dry_run=true", {"weight": 2}).json()
    change = {"before": 1.0, "after": 2.0}
    assert {**change, "pointer": "#/weight"} in plan["changes"]
    assert plan["result"]["weight"] == 2.0
    configuration = plan["effect"]["configuration"]
    assert configuration["after"] == configuration["before"] + 1
    pointer = "#/pools/here-pool/replicas/here-replica/weight"
    assert configuration["changes"] == [{**change, "pointer": pointer}]
    assert plan["effect"]["events"] == [{"kind": "replica_changed", "summary": "Replica here-replica was changed."}]

    quiet = script.patch(f"{ROOT}pools/here-pool?dry_run=true", {"description": "new"}).json()
    assert quiet["effect"]["configuration"] is None
    assert quiet["effect"]["events"]


def test_a_dry_run_shows_no_new_secret(script):
    for path, body, field in (
        ("tokens", {"name": "ci", "scopes": ["read"]}, "token"),
        ("channels", {"name": "c", "config": {"url": "https://hooks.example/x"}}, "secret"),
    ):
        plan = script.post(f"{ROOT}{path}?dry_run=true", body).json()
        assert plan["result"][field] is None
        assert plan["changes"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("pools/here-pool?dry_run=true", {"models": 7}, 422),
        ("pools/absent?dry_run=true", {}, 404),
        ("replicas/here-replica?dry_run=maybe", {"weight": 2}, 422),
        ("replicas/here-replica?dry_run=true", {"weight": -1}, 422),
        ("replicas/here-replica?dry_run=true", {"wieght": 2}, 422),
    ],
)
def test_a_dry_run_rejects_what_the_change_rejects(script, path, body, status):
    assert script.patch(f"{ROOT}{path}", body).status_code == status


def test_a_dry_run_checks_if_match(script):
    stale = {"If-Match": '"stale"'}
    assert script.patch(f"{ROOT}pools/here-pool?dry_run=true", {"description": "x"}, headers=stale).status_code == 412
    response = script.patch(f"{ROOT}pools/here-pool?dry_run=false", {"description": "x"})
    assert (response.status_code, response.has_header("Dry-Run")) == (200, False)
