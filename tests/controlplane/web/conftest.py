"""A browser's requests, without a browser."""

import pytest
from django.test import Client


@pytest.fixture
def visitor(client: Client, operator) -> Client:
    """A client that is signed in."""
    client.force_login(operator)
    return client
