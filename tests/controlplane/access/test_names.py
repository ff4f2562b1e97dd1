"""Conflicts with names and URLs of invisible objects do not reveal them."""

import json

import pytest
from rest_framework.test import APIClient

from controlplane.models import DiscoveredReplica, Role
from controlplane.services.access.users import set_role
from controlplane.services.discovery.adoption import adopt
from controlplane.services.discovery.sources import create_source
from controlplane.services.fleet.pools import create_pool, create_project
from controlplane.services.fleet.replicas import add_replica

pytestmark = pytest.mark.django_db
DNS = {"host": "vllm.example"}
TAKEN = [
    ("pools", {"name": "their-pool", "project": "ours"}),
    ("replicas", {"pool": "our-pool", "name": "their-replica", "url": "http://10.0.0.9:8000"}),
    ("replicas", {"pool": "our-pool", "name": "new", "url": "http://10.0.0.1:8000"}),
    ("replica-sources", {"pool": "our-pool", "name": "their-source", "kind": "dns", "settings": DNS}),
]


@pytest.fixture
def pools(db):
    """A pool of theirs, with a replica and a source, and a pool of ours."""
    theirs = create_pool("their-pool", project=create_project("theirs"))
    add_replica(theirs, name="their-replica", url="http://10.0.0.1:8000")
    create_source(theirs, name="their-source", kind="dns", settings=DNS)
    return theirs, create_pool("our-pool", project=create_project("ours"), models=["ours"])


def client_of(user):
    client = APIClient()
    client.force_login(user)
    return client


@pytest.mark.parametrize(("path", "body"), TAKEN)
def test_a_name_conflict_does_not_reveal_an_invisible_object(pools, django_user_model, operator, path, body):
    stranger = django_user_model.objects.create_user("sam")
    set_role(stranger, Role.ADMIN, project=pools[1].project)
    response = client_of(stranger).post(f"/api/v1/{path}", body, format="json")
    assert response.status_code == 409, response.content
    assert "cannot be used here" in response.data["detail"]
    assert "already" not in json.dumps(response.json())
    admin_response = client_of(operator).post(f"/api/v1/{path}", body, format="json")
    assert (admin_response.status_code, "There is already a" in admin_response.data["detail"]) == (409, True)


def test_adopting_a_taken_url_does_not_reveal_an_invisible_replica(pools):
    ours = create_source(pools[1], name="our-source", kind="dns", settings=DNS)
    row = DiscoveredReplica.objects.create(
        source=ours, key="their-replica", name="their-replica", url="http://10.0.0.1:8000", condition="ready"
    )
    with pytest.raises(Exception, match="cannot be used here"):
        adopt(row)
