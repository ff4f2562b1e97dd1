"""Clients of the REST API."""

import pytest
from rest_framework.test import APIClient

from controlplane.services.access.tokens import create_token
from tests.rest_client import CarefulClient


@pytest.fixture
def client_with(operator):
    """A client that signs in with a token of the given scopes."""

    def make(*scopes: str) -> CarefulClient:
        _, text = create_token(operator, name="test", scopes=scopes)
        client = CarefulClient()
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
        return client

    return make


@pytest.fixture
def api(client_with) -> CarefulClient:
    """A client that may do everything."""
    return client_with("admin")


@pytest.fixture
def script(operator) -> APIClient:
    """A client that sends no If-Match by itself."""
    _, text = create_token(operator, name="test", scopes=["admin"])
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    return client
