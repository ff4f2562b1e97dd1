"""Every row that users edit has a version: of two editors of one version, through REST or pages, one gets an error."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.apps import apps
from django.db import connection, models, transaction

from controlplane.access.rules import RULES
from controlplane.models import VersionedModel
from controlplane.services.fleet.pools import fleet_settings
from controlplane.services.policies.lifecycle import save_draft
from tests.controlplane.access.conftest import create_project_with_objects
from tests.controlplane.web.test_router_settings import filled

pytestmark = pytest.mark.django_db
ROOT = "/api/v1/"
KUBERNETES = {"service": "vllm", "namespace": "models", "api_url": "https://k8s.example"}

# Two edits of each kind of object by REST. A secret, which no representation shows, where the object has one.
EDITS = {
    "api:project-detail": ("projects/here", {"description": "a"}, {"description": "b"}),
    "api:pool-detail": ("pools/here-pool", {"models": ["m"]}, {"description": "b"}),
    "api:replica-detail": ("replicas/here-replica", {"api_key": "first"}, {"api_key": "second"}),
    "api:replica-source-detail": ("replica-sources/cluster", {"secret": "first"}, {"secret": "second"}),
    "api:task-group-detail": ("task-groups/{group}", {"replicas": ["here-replica"]}, {"replicas": []}),
    "api:client-key-detail": ("client-keys/{key}", {"burst": 5, "requests_per_s": 1}, {"requests_per_s": 5}),
    "api:fleet-settings": ("fleet-settings", {"needs_key": True}, {"needs_key": False}),
    "telemetry-api:alert-rule-detail": ("alert-rules/{rule}", {"repeat_s": 60}, {"severity": "info"}),
    "telemetry-api:silence-detail": ("silences/{silence}", {"comment": "a"}, {"comment": "b"}),
    "telemetry-api:channel-detail": (
        "channels/{channel}",
        {"config": {"url": "https://hooks.example/a"}},
        {"config": {"url": "https://hooks.example/b"}},
    ),
    "telemetry-api:metrics-server-detail": (
        "metrics-servers/{server}",
        {"credentials": {"token": "first"}},
        {"credentials": {"token": "second"}},
    ),
    "telemetry-api:heartbeat": ("heartbeat", {"url": "https://watch.example/a"}, {"url": "https://watch.example/b"}),
}
# Pages that edit an object, and the edit by REST that was made since the page was opened.
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


@pytest.fixture
def keys():
    """The keys of one object of every kind."""
    here = create_project_with_objects("here", 1)
    type(here.source).objects.update(name="cluster", kind="kubernetes", settings=KUBERNETES)
    fleet_settings()
    return {name: row.pk for name, row in vars(here).items()}


@pytest.fixture
def visitor(client, operator):
    client.force_login(operator)
    return client


def test_every_object_that_users_change_has_an_example():
    assert set(EDITS) == {
        route for route, rule in RULES.items() if "PATCH" in rule.roles and route.split(":")[0].endswith("api")
    }


@pytest.mark.parametrize("route", EDITS)
def test_a_stale_editor_is_rejected(script, keys, route):
    path, first, second = EDITS[route]
    url = ROOT + path.format(**keys)
    stale = script.get(url)["ETag"]

    replaced = script.patch(url, first, headers={"If-Match": stale})
    late = script.patch(url, second, headers={"If-Match": stale})

    assert (replaced.status_code, late.status_code) == (200, 412), replaced.content
    assert replaced["ETag"] == replaced.json()["etag"] == late.json()["etag"] == script.get(url)["ETag"] != stale
    assert script.patch(url, second, headers={"If-Match": replaced["ETag"]}).status_code == 200


def test_a_removed_and_created_object_has_another_version(script, keys):
    url, body = f"{ROOT}heartbeat", {"url": "https://watch.example/a", "every_s": 60}
    stale = script.get(url)["ETag"]
    assert script.delete(url, headers={"If-Match": stale}).status_code == 204
    assert script.post(url, body).status_code == 201
    assert script.patch(url, {"every_s": 30}, headers={"If-Match": stale}).status_code == 412


@pytest.mark.parametrize("address", PAGES)
def test_a_page_does_not_replace_what_was_changed_since_it_was_opened(visitor, script, keys, address):
    path, change, _ = EDITS[PAGES[address]]
    url, page = ROOT + path.format(**keys), address.format(**keys)
    opened = filled(visitor.get(page).text)
    assert script.patch(url, change, headers={"If-Match": "*"}).status_code == 200
    changed = script.get(url).json()

    answer = visitor.post(page, opened)

    assert (answer.status_code, "was changed since you opened this form" in answer.text) == (422, True)
    assert script.get(url).json() == changed
    assert visitor.post(page, filled(answer.text)).status_code == 302  # with the new version, knowingly


def test_a_page_does_not_replace_a_draft_that_was_saved_since_it_was_opened(visitor, keys, policy):
    page = f"/policies/{policy.pk}/edit/?strategy=prefix_hash"
    opened = filled(visitor.get(page).text)
    theirs = save_draft(policy, {"strategy": "random"})

    answer = visitor.post(page, opened)

    assert (answer.status_code, policy.draft().digest) == (422, theirs.digest)
    (version,) = re.findall(r'name="version" value="([^"]*)"', answer.text)
    assert visitor.post(page, opened | {"version": version.replace("&quot;", '"')}).status_code == 302
    assert policy.draft().strategy == "prefix_hash"


def versioned_models():
    return [model for model in apps.get_models() if issubclass(model, VersionedModel)]


def unversioned(model):
    """The columns that workers write: the arguments of the table's trigger."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select encode(tgargs, 'escape') from pg_trigger where tgname = %s", [f"{model._meta.db_table}_version"]
        )
        ((arguments,),) = cursor.fetchall()
    return [name for name in arguments.split("\\000") if name]


def other_value(row, field):
    """Another value than the row has in a column."""
    value = getattr(row, field.attname)
    if isinstance(field, models.ForeignKey | models.BooleanField):
        return None if isinstance(field, models.ForeignKey) else not value
    if isinstance(field, models.DateTimeField):
        return row.created_at if hasattr(row, "created_at") and value is None else "2026-01-01T00:00:00Z"
    if isinstance(field, models.JSONField):
        return {"other": value}
    return (value or 0) + 7 if isinstance(field, models.IntegerField | models.FloatField) else f"{value}x"[-8:]


@pytest.mark.parametrize("model", versioned_models(), ids=lambda model: model.__name__)
def test_the_database_increases_the_version_with_each_edit_and_with_nothing_that_workers_write(keys, model):
    rows = model._base_manager.filter(pk=model._base_manager.order_by("-pk").values("pk")[:1])
    row, columns = rows.get(), {field.attname: field for field in model._meta.concrete_fields}
    written = unversioned(model)
    assert set(written) <= set(columns)

    for name in written:
        values = {name: other_value(row, columns[name])}
        if name.startswith("fault"):  # a constraint wants both
            values = {"fault": "alert", "fault_alert": 3}
        assert rows.update(**values) == 1
    assert rows.get().version == row.version
    row.refresh_from_db()
    row.save()
    assert row.version == rows.get().version == rows.values_list("version", flat=True)[0]

    before, edited = row.version, next(name for name in EDITED if name in columns)
    rows.update(**{edited: other_value(row, columns[edited])})
    assert rows.get().version > before


# A column that users change, of each model the first that it has.
EDITED = ("description", "weight", "interval_s", "owner", "tenant", "needs_key", "why", "reason", "repeat_s", "every_s")
EDITED += ("comment", "kind", "lookback_s")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", ["project", "pool", "replica", "group", "source", "draft", "rollout"])
def test_an_edit_does_not_lock_out_rows_that_refer_to_the_edited_one(name):
    """As the check of a foreign key locks the row; a writer of both would wait for the edit, and the edit for it."""
    row = getattr(create_project_with_objects("here", 1), name)

    def refer():
        try:
            type(row).objects.raw(f"select id from {row._meta.db_table} where id = %s for key share nowait", [row.pk])[
                0
            ]
        finally:
            connection.close()

    with transaction.atomic(), ThreadPoolExecutor(1) as thread:
        row.save()
        thread.submit(refer).result(20)
