"""Responses conform to the OpenAPI document, for generated valid and invalid requests."""

import json

import pytest
import schemathesis
from django.contrib.auth import get_user_model
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections, transaction
from drf_spectacular.generators import SchemaGenerator
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from controlplane.services.access.tokens import create_token
from tests.controlplane.access.conftest import create_project_with_objects
from tests.pace import examples

# Not that everything outside the document is refused: a number where text is expected is read as text, as DRF does.
CHECKS = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.missing_required_header,
    checks.unsupported_method,
    checks.ignored_auth,
)


DOCUMENT = json.loads(json.dumps(SchemaGenerator().get_schema(request=None, public=True)))
api = schemathesis.openapi.from_dict(DOCUMENT)
_inner = get_wsgi_application()


def application(environ, start_response):
    """The application, with each request rolled back, so that all start with the same rows."""
    with transaction.atomic():
        response = _inner(environ, start_response)
        transaction.set_rollback(True)
    return response


api.app = application


OPERATIONS = sorted(f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods)


@schemathesis.hook
def map_query(_context, query):
    """Shorten long polls, which other tests cover."""
    if query and isinstance(query.get("wait"), int | float):
        query["wait"] = min(query["wait"], 0.1)
    return query


def store_everything():
    """One object of every kind; the token of an admin."""
    create_project_with_objects("here", 1)
    operator = get_user_model().objects.create_user("olga", is_superuser=True)
    return create_token(operator, name="test", scopes=["admin"])[1]


@pytest.fixture(scope="module")
def token(once_for_module):
    return once_for_module(store_everything)


@pytest.fixture
def script(token, db):
    """Headers of an admin. Requests run in the test's transaction."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield {"Authorization": f"Bearer {token}"}
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


@pytest.mark.generated
@pytest.mark.parametrize("operation", OPERATIONS)
def test_responses_conform_to_the_document(operation, script):
    method, path = operation.split()
    described = api[path][method]
    right, wrong = (described.as_strategy(generation_mode=mode) for mode in GenerationMode)

    @settings(
        max_examples=examples(15),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=right | wrong if described.body or described.query else right)
    def holds(case):
        case.call_and_validate(checks=CHECKS, headers=script)

    holds()
