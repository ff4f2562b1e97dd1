"""Authentication, errors, query counts and probes of all REST operations."""

import json
import re
from pathlib import Path

import pytest
from django.db import OperationalError
from django.urls import resolve
from drf_spectacular.generators import SchemaGenerator
from rest_framework.test import APIClient

from controlplane.api.exceptions import PROBLEM_TYPES, SPECIFIC_TYPES, endpoint_not_found
from controlplane.models import Pool
from controlplane.services.access.tokens import create_token
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.routers import announce
from tests.rest_client import CarefulClient

ROOT = "/api/v1/"


def operations():
    """Every operation of the OpenAPI document, telemetry's too."""
    paths = SchemaGenerator().get_schema(request=None, public=True)["paths"]
    return [(method, filled(path)) for path, methods in paths.items() for method in methods]


def filled(path):
    """The path with a parameter of the right type: a name, a number or a UUID."""
    forms = ("default", "1", "00000000-0000-4000-8000-000000000000")
    addresses = [re.sub(r"{\w+}", form, path) for form in forms]
    return next(address for address in addresses if resolve(address).func is not endpoint_not_found)


@pytest.mark.django_db
def test_every_operation_needs_authentication(pool):
    all_operations = operations()
    assert len(all_operations) > 30
    for method, path in [*all_operations, ("get", f"{ROOT}openapi.json")]:
        response = getattr(APIClient(), method)(path)
        assert response.status_code == 401, f"{method} {path}"
        assert response["WWW-Authenticate"] == "Bearer"
        assert response["Content-Type"] == "application/problem+json"
    assert Pool.objects.get().name == "default"


@pytest.mark.django_db
def test_a_rejection_names_the_role_and_the_scope_that_the_request_needs(pool, client_with):
    problem = client_with("read").patch(f"{ROOT}pools/default", {"description": "x"}).json()
    assert problem["detail"] == (
        "This request needs the role editor. The token has the scope read; the scope write allows it."
    )
    assert (
        "role admin. The token has the scope write; the scope admin"
        in (client_with("write").get(f"{ROOT}tokens").json()["detail"])
    )


@pytest.mark.django_db
def test_plain_http_is_rejected_instead_of_redirected(settings, operator, pool):
    settings.SECURE_SSL_REDIRECT, settings.SECURE_REDIRECT_EXEMPT = True, [r"^api/"]
    _, text = create_token(operator, name="test", scopes=["write"])
    script = CarefulClient()
    script.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    rejected = script.patch(f"{ROOT}pools/default", {"description": "x"})
    assert (rejected.status_code, "Use HTTPS" in rejected.json()["detail"]) == (403, True)
    headers = {"If-Match": "*"}
    assert script.patch(f"{ROOT}pools/default", {"description": "x"}, secure=True, headers=headers).status_code == 200
    assert script.get("/fleet/")["Location"] == "https://testserver/fleet/"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("get", "nothing", None, 404),
        ("post", "nothing/at/all", None, 404),
        ("get", "pools/absent", None, 404),
        ("get", "pools/%00", None, 404),
        ("get", "revisions/99999999999999999", None, 404),
        ("get", "revisions/999999999999999999999", None, 404),
        ("delete", "pools", None, 405),
        ("post", "routers", "{}", 405),
        ("post", "pools", '{"name": "big", "colour": "red"}', 422),
        ("post", "alert-rules", '{"pool": "default", "name": "q", "colour": "red"}', 422),
        ("post", "pools", '{"name": "' + "x" * 1_048_576 + '"}', 413),
        ("put", "pools/default", None, 405),
        ("post", "pools", "{", 400),
        ("post", "pools", "[]", 422),
        ("post", "pools", '{"name": 7}', 422),
        ("post", "pools", '{"name": "a\\u0000"}', 422),
        ("post", "pools", "[" * 100_000, 400),
        ("put", "policies/default/draft", '{"settings": ' + '{"a":' * 65 + "1" + "}" * 66, 400),
        ("post", "replicas", '{"pool": "a\\u0000", "name": "r1", "url": "http://10.0.0.1"}', 422),
        ("get", "events?cursor=cD0xMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDA=", None, 404),
        ("get", "alerts?cursor=cD0xMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDA=", None, 404),
        ("get", "series?metric=hit_rate&pool=%00", None, 422),
        ("get", "series?metric=hit_rate&to=0001-01-01T00:00:00Z", None, 422),
        ("post", "alert-rules", '{"pool": "default", "name": "q", "settings": {"bin_s": 1' + "0" * 400 + "}}", 422),
    ],
)
@pytest.mark.usefixtures("pool")
def test_every_error_is_a_problem_document_with_the_request_id(api, method, path, body, status):
    options = {"data": body, "content_type": "application/json"} if body else {}
    response = getattr(api, method)(f"{ROOT}{path}", **options, headers={"X-Request-Id": "abc-1"})
    document = json.loads(response.content)
    assert (response.status_code, response["Content-Type"]) == (status, "application/problem+json")
    assert (document["status"], document["request_id"], document["type"]) == (
        status,
        "abc-1",
        f"urn:warmpath:problem:{PROBLEM_TYPES[status]}",
    )
    assert document["title"]
    assert document["detail"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"headers": {"Accept": "text/html"}}, 406),
        ({"content_type": "text/csv", "data": "a,b"}, 415),
        ({"headers": {"Transfer-Encoding": "chunked"}}, 411),
        ({"headers": {"Content-Length": "many"}}, 413),
        ({"headers": {"Host": "evil.example"}}, 400),
    ],
)
def test_unacceptable_headers_are_problem_documents_too(api, pool, options, status):
    response = api.post(f"{ROOT}pools", **options)
    document = json.loads(response.content)
    assert (response.status_code, response["Content-Type"]) == (status, "application/problem+json")
    assert (document["status"], document["type"]) == (status, f"urn:warmpath:problem:{PROBLEM_TYPES[status]}")
    assert document["request_id"]


@pytest.mark.django_db
def test_unknown_fields_are_rejected_by_name(api, pool):
    response = api.patch(f"{ROOT}pools/default", {"description": "x", "modles": ["a"], "colour": "red"})
    assert [fault["pointer"] for fault in response.json()["errors"]] == ["#/colour", "#/modles"]
    assert api.get(f"{ROOT}pools/default").json()["description"] == ""


def test_every_problem_type_is_in_the_readme():
    readme = (Path(__file__).resolve().parents[3] / "controlplane/api/README.md").read_text()
    for problem_type in (*PROBLEM_TYPES.values(), *SPECIFIC_TYPES.values()):
        assert f"`{problem_type}`" in readme


@pytest.mark.django_db
@pytest.mark.parametrize(("fault", "status"), [(OperationalError("unavailable"), 503), (RuntimeError("secret"), 500)])
def test_internal_errors_reveal_nothing(api, pool, monkeypatch, fault, status):
    def fail(*_args, **_options):
        raise fault

    monkeypatch.setattr("controlplane.api.viewsets.fleet.PoolViewSet.update_row", staticmethod(fail))
    response = api.patch(f"{ROOT}pools/default", {"description": "x"})
    assert (response.status_code, response["Content-Type"]) == (status, "application/problem+json")
    assert b"secret" not in response.content


@pytest.mark.django_db
def test_lists_take_a_fixed_number_of_queries(api, pool, django_assert_max_num_queries):
    for number in range(12):
        replica = add_replica(pool, name=f"r{number}", url=f"http://10.0.0.{number}:8000")
        create_task_group(pool, f"g{number}", replicas=[replica])
        announce(name=f"router-{number}", boot="b", admin_url=f"http://10.0.1.{number}:8081")
        publish_revision(save_draft(pool.policies.get(group=None), {"strategy": "round_robin"}).pk)
    api.get(f"{ROOT}pools")  # the token's use is noted once a minute
    for resource in (
        "pools",
        "replicas",
        "task-groups",
        "policies",
        "revisions",
        "rollouts",
        "routers",
        "events",
        "tokens",
    ):
        with django_assert_max_num_queries(5):
            response = api.get(f"{ROOT}{resource}")
        assert response.status_code == 200, resource
        assert response.data["results"], resource


@pytest.mark.django_db
def test_events_are_paged_by_cursor_and_filtered(api, replica):
    first = api.get(f"{ROOT}events", {"limit": 1}).data
    second = api.get(first["next"]).data
    assert first["results"][0]["id"] > second["results"][0]["id"]

    kinds = {"kind": ["pool_created", "replica_added"], "pool": "default"}
    assert len(api.get(f"{ROOT}events", kinds).data["results"]) == 2
    at = api.get(f"{ROOT}events", {"kind": "replica_added"}).data["results"][0]["at"]
    assert [e["kind"] for e in api.get(f"{ROOT}events", {"after": at}).data["results"]][-1] == "replica_added"
    assert api.get(f"{ROOT}events", {"before": "2020-01-01T00:00:00Z"}).data["results"] == []


@pytest.mark.django_db
def test_the_document_describes_errors_and_security_of_every_operation(api):
    document = json.loads(api.get(f"{ROOT}openapi.json").content)
    assert document["openapi"].startswith("3.1")
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert "application/problem+json" in operation["responses"]["default"]["content"], f"{method} {path}"
            assert operation["security"], f"{method} {path}"


@pytest.mark.django_db
def test_readyz_checks_migrations(client, monkeypatch):
    assert client.get("/readyz").json() == {"status": "ready", "worker": "never_seen"}
    monkeypatch.setattr("django.db.migrations.executor.MigrationExecutor.migration_plan", lambda *_: [1])
    response = client.get("/readyz")
    assert (response.status_code, response.json()["status"]) == (503, "not_ready")


def test_readyz_checks_the_database(client, monkeypatch):
    def fail(*_args):
        raise OperationalError

    monkeypatch.setattr("controlplane.urls.MigrationExecutor", fail)
    assert client.get("/readyz").status_code == 503


def test_the_document_is_generated_without_warnings(capsys):
    SchemaGenerator().get_schema(request=None, public=True)
    assert capsys.readouterr().err == ""


@pytest.mark.django_db
@pytest.mark.parametrize(("fault", "status"), [(OperationalError("unavailable"), 503), (RuntimeError("secret"), 500)])
def test_an_unreadable_session_is_503_and_an_internal_error_500(operator, monkeypatch, fault, status):
    browser = APIClient(raise_request_exception=False)
    browser.force_login(operator)

    def fail(*_args):
        raise fault

    monkeypatch.setattr("django.contrib.sessions.backends.db.SessionStore.load", fail)
    response = browser.get(f"{ROOT}pools")
    document = json.loads(response.content)
    assert (response.status_code, response["Content-Type"]) == (status, "application/problem+json")
    assert (document["status"], bool(document["request_id"])) == (status, True)
    page = browser.get("/fleet/")
    assert (page.status_code, page["Content-Type"]) == (status, "text/html; charset=utf-8")
    assert b"secret" not in response.content + page.content
