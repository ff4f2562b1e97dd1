"""Clients of the REST API."""

import pytest

from controlplane.services.access.tokens import create_token
from tests.rest_client import CarefulClient


@pytest.fixture
def client_with(db, django_user_model):
    """Creates clients whose token has the given scopes."""
    operator = django_user_model.objects.create_user("olga", password="a long enough password", is_superuser=True)

    def make(*scopes: str) -> CarefulClient:
        _, text = create_token(operator, name="test", scopes=scopes)
        client = CarefulClient()
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
        return client

    return make


@pytest.fixture
def api(client_with) -> CarefulClient:
    """A client with the write scope."""
    return client_with("write")
