"""Every row that users edit has a version: of two editors of one version, through REST or pages, one gets an error."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
from django.apps import apps
from django.db import connection, models, transaction
from rest_framework.test import APIClient

from controlplane.api.bundle import _Application
from controlplane.models import Event, Pool, Replica, VersionedModel
from controlplane.services.access.tokens import create_token
from controlplane.services.fleet.pools import fleet_settings
from controlplane.services.fleet.replicas import add_replica, update_replica
from controlplane.services.policies.lifecycle import save_draft
from tests.controlplane.access.conftest import create_project_with_objects
from tests.controlplane.web.test_router_settings import filled

pytestmark = pytest.mark.django_db
ROOT = "/api/v1/"
DRAFT = {"settings": {"strategy": "prefix_hash"}}


@pytest.fixture
def keys():
    """The keys of one object of every kind."""
    here = create_project_with_objects("here", 1)
    fleet_settings()
    return {name: row.pk for name, row in vars(here).items()}


@pytest.fixture
def visitor(client, operator):
    client.force_login(operator)
    return client


def test_a_removed_and_created_object_has_another_version(script, keys):
    url, body = f"{ROOT}heartbeat", {"url": "https://watch.example/a", "every_s": 60}
    stale = script.get(url)["ETag"]
    assert script.delete(url, headers={"If-Match": stale}).status_code == 204
    assert script.post(url, body).status_code == 201
    assert script.patch(url, {"every_s": 30}, headers={"If-Match": stale}).status_code == 412


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
        row = cursor.fetchone()
    assert row is not None, "version_triggers in the model's migration"
    return [name for name in row[0].split("\\000") if name]


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
    written = unversioned(model)
    rows = model._base_manager.filter(pk=model._base_manager.order_by("-pk").values("pk")[:1])
    row, columns = rows.get(), {field.attname: field for field in model._meta.concrete_fields}
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


# --- what REST says of versions -----------------------------------------------------------------------------------


def tag(client, path):
    return client.get(f"{ROOT}{path}")["ETag"]


def test_a_412_shows_the_present_object_and_its_etag(script, pool):
    tag_before = tag(script, "pools/default")
    assert (
        script.patch(f"{ROOT}pools/default", {"description": "a"}, headers={"If-Match": tag_before}).status_code == 200
    )
    rejected = script.patch(f"{ROOT}pools/default", {"description": "b"}, headers={"If-Match": tag_before})
    assert (rejected.status_code, rejected.data["current"]["description"]) == (412, "a")
    assert rejected.data["changes"] == [{"pointer": "#/description", "before": "a", "after": "b"}]
    assert rejected.data["etag"] == tag(script, "pools/default")
    again = script.patch(f"{ROOT}pools/default", {"description": "b"}, headers={"If-Match": rejected.data["etag"]})
    assert (again.status_code, again["ETag"]) == (200, tag(script, "pools/default"))


def test_draft_and_publication_return_the_next_etag(script, policy):
    saved = script.put(f"{ROOT}policies/default/draft", DRAFT, headers={"If-Match": tag(script, "policies/default")})
    assert saved["ETag"] == tag(script, "policies/default")
    published = script.post(f"{ROOT}policies/default/publish", {}, headers={"If-Match": saved["ETag"]})
    assert (published.status_code, published["ETag"]) == (202, tag(script, "policies/default"))


def test_lists_carry_the_tag_of_each_object(script, replica):
    for resource, name in (("pools", "default"), ("replicas", "r1"), ("policies", "default"), ("projects", "default")):
        (row,) = script.get(f"{ROOT}{resource}").data["results"]
        assert row["etag"] == tag(script, f"{resource}/{name}")


@pytest.mark.django_db(transaction=True)
def test_of_fifty_concurrent_edits_of_a_version_one_succeeds(operator, replica):
    _, text = create_token(operator, name="test", scopes=["write"])
    script = APIClient()
    script.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    tag_before, before = tag(script, "replicas/r1"), Event.objects.filter(kind="replica_changed").count()

    def edit(number):
        try:
            client = APIClient()
            client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
            response = client.patch(f"{ROOT}replicas/r1", {"weight": number}, headers={"If-Match": tag_before})
            return number, response.status_code, json.loads(response.content)
        finally:
            connection.close()

    with ThreadPoolExecutor(50) as threads:
        outcomes = list(threads.map(edit, range(2, 52), timeout=60))
    ((winner, _, shown),) = [outcome for outcome in outcomes if outcome[1] == 200]
    losers = [body for _, status, body in outcomes if status == 412]
    assert len(losers) == 49
    assert all(body["current"]["weight"] == winner and body["etag"] == shown["etag"] for body in losers)
    assert Event.objects.filter(kind="replica_changed").count() == before + 1


@pytest.mark.django_db(transaction=True)
def test_a_change_during_the_application_of_a_bundle_is_a_conflict(api, pool, replica, monkeypatch):
    """Another connection changes a replica after the bundle's version was compared."""
    add_replica(pool, name="r2", url="http://10.0.0.2:8000")
    apply_pool = _Application.apply_pool

    def change_meanwhile(self, *arguments):
        if not change_meanwhile.done:
            change_meanwhile.done = True
            thread = Thread(target=change_replica)
            thread.start()
            thread.join(20)
        return apply_pool(self, *arguments)

    def change_replica():
        update_replica(Replica.objects.get(name="r2"), weight=9)
        connection.close()

    change_meanwhile.done = False
    monkeypatch.setattr(_Application, "apply_pool", change_meanwhile)
    bundle = {"pools": [{"name": "default", "description": "mine", "replicas": [{"name": "r1", "weight": 4}]}]}
    response = api.put(f"{ROOT}config", {"format": 1, **bundle}, format="json")
    assert response.status_code == 409
    assert [(row.name, row.weight) for row in Replica.objects.order_by("name")] == [("r1", 1.0), ("r2", 9.0)]
    assert Pool.objects.get().description == ""
