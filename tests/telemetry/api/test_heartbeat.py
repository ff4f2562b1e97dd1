"""REST API of the heartbeat."""

import pytest

from telemetry.models import Heartbeat
from telemetry.services.notifications.heartbeats import masked_url

pytestmark = pytest.mark.django_db
HEARTBEAT = "/api/v1/heartbeat"
SECRET = "https://watch.example/ping/7c1e"


def test_a_heartbeat_is_created_changed_and_removed_and_no_response_has_its_url(api):
    assert api.get(HEARTBEAT).status_code == 404
    created = api.post(HEARTBEAT, {"url": SECRET})
    assert (created.status_code, created["Location"]) == (201, HEARTBEAT)
    assert (created.data["target"], created.data["every_s"]) == ("https://watch.example/...", 60)

    changed = api.patch(HEARTBEAT, {"every_s": 30}, headers={"If-Match": created["ETag"]})
    assert (changed.status_code, changed.data["every_s"]) == (200, 30)
    assert masked_url(Heartbeat.objects.get()) == "https://watch.example/...", "a change without a URL keeps the URL"
    stale = api.patch(HEARTBEAT, {"every_s": 40}, headers={"If-Match": created["ETag"]})
    assert stale.status_code == 412
    assert [change["after"] for change in stale.data["changes"]] == [40]

    for response in (created, changed, stale, api.get(HEARTBEAT), api.get("/api/v1/audit")):
        assert "7c1e" not in response.content.decode()
    assert api.delete(HEARTBEAT, headers={"If-Match": changed["ETag"]}).status_code == 204
    assert api.get(HEARTBEAT).status_code == 404


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "#/url"),
        ({"url": "ftp://watch.example"}, "#/url"),
        ({"url": SECRET, "every_s": 9}, "#/every_s"),
        ({"url": SECRET, "every_s": 86_401}, "#/every_s"),
        ({"url": SECRET, "every": 60}, "#/every"),
    ],
)
def test_an_invalid_heartbeat_is_rejected_by_field(api, body, pointer):
    response = api.post(HEARTBEAT, body)
    assert response.status_code == 422
    assert [error["pointer"] for error in response.data["errors"]] == [pointer]
    assert not Heartbeat.objects.exists()


def test_a_second_heartbeat_is_rejected(api):
    assert api.post(HEARTBEAT, {"url": SECRET}).status_code == 201
    assert api.post(HEARTBEAT, {"url": SECRET}).status_code == 409
    assert api.post(HEARTBEAT + "?dry_run=true", {"url": SECRET}).status_code == 409
