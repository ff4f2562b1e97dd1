"""What holds for every change over REST, by the table of routes: who may make it, of which version, and a dry run."""

import copy
import re
from datetime import timedelta
from uuid import UUID

import pytest
import redis
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.access.rules import RULES
from controlplane.celery import app
from controlplane.models import ApiToken, AuditEntry, Event, Pool, ReplicaSource, Role, Router
from controlplane.services.access.tokens import create_token
from controlplane.services.access.users import set_role
from controlplane.services.fleet.pools import update_project
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import create_policy, publish_revision, save_draft
from controlplane.services.policies.rollouts import pause_rollout
from telemetry.models import Heartbeat, Notification, NotificationState
from telemetry.services.alerts.alerts import acknowledge
from tests.controlplane.access.conftest import create_project_with_objects
from tests.controlplane.api.test_document import DOCUMENT
from tests.controlplane.rollouts import publish_stages
from tests.controlplane.web.test_router_settings import filled

pytestmark = pytest.mark.django_db
ROOT = "/api/v1/"
DRAFT = {"settings": {"strategy": "prefix_hash"}, "reason": "warmer"}
KUBERNETES = {"service": "vllm", "namespace": "models", "api_url": "https://k8s.example"}

# A path and a valid body for every changing operation; where an object has a secret, which no response shows, the
# change is one of the secret. {…} are keys of ``stored``.
EXAMPLES = {
    ("api:config", "PUT"): ("config", {"format": 1, "pools": [{"name": "here-pool", "description": "new"}]}),
    ("api:project-list", "POST"): ("projects", {"name": "new"}),
    ("api:project-detail", "PATCH"): ("projects/here", {"needs_approval": True}),
    ("api:project-detail", "DELETE"): ("projects/bare", None),
    ("api:pool-list", "POST"): ("pools", {"name": "new", "models": ["m"]}),
    ("api:pool-detail", "PATCH"): ("pools/here-pool", {"description": "new"}),
    ("api:pool-detail", "DELETE"): ("pools/bare-pool", None),
    ("api:replica-list", "POST"): ("replicas", {"pool": "here-pool", "name": "new", "url": "http://10.0.9.9:8000"}),
    ("api:replica-detail", "PATCH"): ("replicas/here-replica", {"api_key": "new"}),
    ("api:replica-detail", "DELETE"): ("replicas/here-replica", None),
    ("api:replica-state", "POST"): ("replicas/here-replica/state", {"state": "draining"}),
    ("api:replica-source-list", "POST"): (
        "replica-sources",
        {"pool": "here-pool", "name": "new", "kind": "dns", "settings": {"host": "new.test"}},
    ),
    ("api:replica-source-detail", "PATCH"): ("replica-sources/here-source", {"secret": "new"}),
    ("api:replica-source-detail", "DELETE"): ("replica-sources/here-source", None),
    ("api:replica-source-poll", "POST"): ("replica-sources/here-source/poll", None),
    ("api:discovered-replica-adopt", "POST"): ("discovered-replicas/{discovered}/adopt", {}),
    ("api:router-detail", "DELETE"): ("routers/router-1", None),
    ("api:task-group-list", "POST"): ("task-groups", {"pool": "here-pool", "name": "new"}),
    ("api:task-group-detail", "PATCH"): ("task-groups/{group}", {"replicas": ["here-replica"]}),
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
    ("telemetry-api:channel-detail", "PATCH"): ("channels/{channel}", {"config": {"url": "https://hooks.example/new"}}),
    ("telemetry-api:channel-detail", "DELETE"): ("channels/{channel}", None),
    ("telemetry-api:channel-test", "POST"): ("channels/{channel}/test", None),
    ("telemetry-api:metrics-server-list", "POST"): ("metrics-servers", {"name": "new", "url": "http://10.0.0.9:9090"}),
    ("telemetry-api:metrics-server-detail", "PATCH"): ("metrics-servers/{server}", {"credentials": {"token": "new"}}),
    ("telemetry-api:metrics-server-detail", "DELETE"): ("metrics-servers/{server}", None),
    ("telemetry-api:channel-rotate", "POST"): ("channels/{channel}/rotate", None),
    ("telemetry-api:heartbeat", "POST"): ("heartbeat", {"url": "https://watch.example/x", "every_s": 60}),
    ("telemetry-api:heartbeat", "PATCH"): ("heartbeat", {"url": "https://watch.example/new"}),
    ("telemetry-api:heartbeat", "DELETE"): ("heartbeat", None),
    ("telemetry-api:delivery-replay", "POST"): ("deliveries/{notification}/replay", None),
}
# Pages that edit an object, and the change by REST that was made since the page was opened.
PAGES = {
    "/fleet/pools/{pool}/": "api:pool-detail",
    "/fleet/replicas/{replica}/": "api:replica-detail",
    "/fleet/sources/{source}/": "api:replica-source-detail",
    "/task-groups/{group}/": "api:task-group-detail",
    "/client-keys/{key}/": "api:client-key-detail",
    "/fleet/limits/": "api:fleet-settings",
    "/alerts/rules/{rule}/": "telemetry-api:alert-rule-detail",
    "/channels/{channel}/": "telemetry-api:channel-detail",
    "/metrics-servers/{server}/": "telemetry-api:metrics-server-detail",
    "/channels/heartbeat/": "telemetry-api:heartbeat",
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
    assert writes == set(EXAMPLES), "add an address and a body to EXAMPLES, so that the change is tested"


def store_objects():
    """One object of every kind; their keys, and clients of users with each role, by role."""
    operator = get_user_model().objects.create_user("root", is_superuser=True)
    here = create_project_with_objects("here", 1)
    bare = create_project_with_objects("bare", 2)
    for row in (bare.alert, bare.rule, bare.policy, bare.group, bare.source, bare.replica):
        row.delete()
    ReplicaSource.objects.update(kind="kubernetes", settings=KUBERNETES)
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
    keys = {name: row.pk for name, row in vars(here).items()}
    clients = {"superuser": client_of(operator), "reader": client_of(operator, "read")}
    for role in Role:
        user = get_user_model().objects.create_user(f"some-{role}")
        set_role(user, role, None)
        clients[role] = client_of(user)
    return {**keys, **rollouts, "plain": plain.pk, "token": other.pk}, clients


def client_of(user, scope="admin"):
    """A client with a token whose use is not recorded."""
    _, text = create_token(user, name="test", scopes=[scope])
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    ApiToken.objects.update(last_used_at=timezone.now() + timedelta(days=1))
    return client


@pytest.fixture(scope="module")
def stored(once_for_module):
    return once_for_module(store_objects)


@pytest.fixture
def script(stored):
    return copy.deepcopy(stored[1]["superuser"])


@pytest.fixture
def browser(client, db):
    client.force_login(get_user_model().objects.get(username="root"))
    return client


@pytest.fixture
def broker(valkey, monkeypatch):
    """A connection to a real broker with an empty queue."""
    monkeypatch.setattr(app.conf, "broker_url", valkey)
    path = valkey.removeprefix("redis+socket://").partition("?")[0]
    with redis.Redis(unix_socket_path=path) as queue:
        queue.flushall()
        yield queue


def needs_version(example):
    """Whether the document says that ``If-Match`` is required."""
    url, method = ROOT + EXAMPLES[example][0], example[1].lower()
    (operation,) = (
        methods[method]
        for template, methods in DOCUMENT["paths"].items()
        if re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), url) and method in methods
    )
    return any(part["name"] == "If-Match" and part["required"] for part in operation["parameters"])


VERSIONED = list(filter(needs_version, sorted(EXAMPLES)))


class Change:
    """An example with the keys of the stored objects, ready to be sent."""

    def __init__(self, route, method, keys):
        path, self.body = (fill_in(part, keys) for part in EXAMPLES[route, method])
        self.route, self.method, self.url = route, method, ROOT + path
        self.object_url = ROOT + "/".join(path.split("/")[:2])

    def send(self, client, version="*", **query):
        """Send the change of a version; None: without If-Match."""
        headers = {"If-Match": version} if version is not None and (self.route, self.method) in VERSIONED else {}
        return getattr(client, self.method.lower())(self.url, self.body, headers=headers, query_params=query)


def fill_in(value, keys):
    if isinstance(value, dict):
        return {key: fill_in(inner, keys) for key, inner in value.items()}
    return value.format(**keys) if isinstance(value, str) else value


@pytest.fixture(params=sorted(EXAMPLES), ids="-".join)
def change(request, stored, db):
    if request.param == ("api:project-detail", "DELETE"):
        Pool.objects.get(name="bare-pool").delete()
    if request.param == ("telemetry-api:heartbeat", "POST"):
        Heartbeat.objects.all().delete()
    return Change(*request.param, stored[0])


# --- who may change ---------------------------------------------------------------------------------------------


def test_a_change_needs_the_role_of_its_rule_and_a_token_that_may_write(stored, change):
    roles = list(Role)
    lower = roles[roles.index(RULES[change.route].roles[change.method]) - 1]
    before = AuditEntry.objects.count()
    for client in (lower, "reader"):
        assert change.send(stored[1][client]).status_code in {403, 404}, client
    assert AuditEntry.objects.count() == before


@pytest.mark.parametrize("headers", [{}, {"X-CSRFToken": "x" * 32}, {"Origin": "https://evil.example"}])
def test_every_change_of_a_session_needs_the_csrf_token(operator, headers):
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(operator)
    before = (Event.objects.count(), AuditEntry.objects.count())
    for template, methods in DOCUMENT["paths"].items():
        path = re.sub(r"\{\w+\}", str(UUID(int=0)) if "/deliveries/" in template else "1", template)
        for method in methods.keys() - {"get"} if not path.endswith("/announce") else ():  # which needs another token
            response = strict.generic(method.upper(), path, "{}", content_type="application/json", headers=headers)
            assert (response.status_code, "CSRF" in response.json()["detail"]) == (403, True), (method, path)
    assert (Event.objects.count(), AuditEntry.objects.count()) == before


def test_a_session_with_the_csrf_token_can_change_things(operator):
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(operator)
    strict.get("/")
    headers = {"X-CSRFToken": strict.cookies["csrftoken"].value}
    created = strict.post(f"{ROOT}projects", {"name": "made"}, content_type="application/json", headers=headers)
    assert created.status_code == 201
    schemes = DOCUMENT["components"]["securitySchemes"]
    assert {"apiKey", "http"} <= {scheme["type"] for scheme in schemes.values()}


# --- versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", VERSIONED, indirect=True, ids="-".join)
def test_a_change_needs_the_present_version_in_if_match(script, change):
    before, version = Event.objects.count(), script.get(change.object_url)["ETag"]
    missing = change.send(script, None)
    assert (missing.status_code, missing.data["type"]) == (428, "urn:warmpath:problem:precondition-required")
    for stale in ('"0123456789abcdef01234567"', "nonsense", "", f"W/{version}"):
        rejected = change.send(script, stale)
        assert (rejected.status_code, rejected.data["type"]) == (412, "urn:warmpath:problem:changed-meanwhile"), stale
        assert rejected.data["etag"] == version
    assert Event.objects.count() == before

    changed = change.send(script, version)
    assert changed.status_code < 300, changed.content
    if change.method == "PATCH":
        late = change.send(script, version)
        assert late.status_code == 412
        assert changed["ETag"] == changed.json()["etag"] == late.json()["etag"] != version
        assert script.get(change.object_url)["ETag"] == changed["ETag"]


@pytest.mark.parametrize("address", PAGES)
def test_a_page_does_not_replace_what_was_changed_since_it_was_opened(browser, script, stored, address):
    change, page = Change(PAGES[address], "PATCH", stored[0]), address.format(**stored[0])
    opened = filled(browser.get(page).text)
    assert change.send(script).status_code == 200
    changed = script.get(change.url).json()

    answer = browser.post(page, opened)

    assert (answer.status_code, "was changed since you opened this form" in answer.text) == (422, True)
    assert script.get(change.url).json() == changed
    assert browser.post(page, filled(answer.text)).status_code == 302  # with the new version, knowingly


# --- dry runs ---------------------------------------------------------------------------------------------------


def everything():
    """A digest of every row of every table."""
    with connection.cursor() as cursor:
        digests = {}
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"select count(*), md5(string_agg(t::text, '|' order by t::text)) from {table} t")
            digests[table] = cursor.fetchone()
    return digests


def test_a_dry_run_describes_the_change_and_changes_nothing(script, broker, change, django_capture_on_commit_callbacks):
    before = everything()

    with django_capture_on_commit_callbacks(execute=True):
        plan = change.send(script, dry_run="true")

    assert plan.status_code == 200, plan.content
    assert (plan["Dry-Run"], plan.json()["dry_run"]) == ("true", True)
    assert everything() == before
    assert broker.keys() == []
    response = change.send(script)
    assert response.status_code == plan.json()["status"], response.content
    assert everything() != before, "the example changes nothing without a dry run either"


def patch(client, path, body, **headers):
    return client.patch(f"{ROOT}{path}", body, headers={"If-Match": "*"} | headers)


def test_a_dry_run_shows_changes_configuration_and_events(script):
    plan = patch(script, "replicas/here-replica?dry_run=true", {"weight": 2}).json()
    change = {"before": 1.0, "after": 2.0}
    assert {**change, "pointer": "#/weight"} in plan["changes"]
    assert plan["result"]["weight"] == 2.0
    configuration = plan["effect"]["configuration"]
    assert configuration["after"] == configuration["before"] + 1
    pointer = "#/pools/here-pool/replicas/here-replica/weight"
    assert configuration["changes"] == [{**change, "pointer": pointer}]
    assert plan["effect"]["events"] == [{"kind": "replica_changed", "summary": "Replica here-replica was changed."}]

    quiet = patch(script, "pools/here-pool?dry_run=true", {"description": "new"}).json()
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
    assert patch(script, path, body).status_code == status


def test_a_dry_run_checks_if_match(script):
    stale = {"If-Match": '"stale"'}
    assert patch(script, "pools/here-pool?dry_run=true", {"description": "x"}, **stale).status_code == 412
    response = patch(script, "pools/here-pool?dry_run=false", {"description": "x"})
    assert (response.status_code, response.has_header("Dry-Run")) == (200, False)
