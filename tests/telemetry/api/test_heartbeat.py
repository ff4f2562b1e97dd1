"""The heartbeat over REST: one, which is begun, changed and ended."""

import pytest

from telemetry.models import Heartbeat
from telemetry.services.notifications.heartbeats import target

pytestmark = pytest.mark.django_db
HEARTBEAT = "/api/v1/heartbeat"
SECRET = "https://watch.example/ping/7c1e"


def test_a_heartbeat_lives_from_beginning_to_end_and_never_tells_its_address(api):
    assert api.get(HEARTBEAT).status_code == 404
    begun = api.post(HEARTBEAT, {"url": SECRET})
    assert (begun.status_code, begun["Location"]) == (201, HEARTBEAT)
    assert (begun.data["target"], begun.data["every_s"]) == ("https://watch.example/...", 60)

    changed = api.patch(HEARTBEAT, {"every_s": 30}, headers={"If-Match": begun["ETag"]})
    assert (changed.status_code, changed.data["every_s"]) == (200, 30)
    assert target(Heartbeat.objects.get()) == "https://watch.example/...", "the address stays where none is given"
    stale = api.patch(HEARTBEAT, {"every_s": 40}, headers={"If-Match": begun["ETag"]})
    assert stale.status_code == 412
    assert [one["after"] for one in stale.data["changes"]] == [40]

    for answer in (begun, changed, stale, api.get(HEARTBEAT), api.get("/api/v1/audit")):
        assert "7c1e" not in answer.content.decode()
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
def test_what_cannot_be_is_refused_where_it_stands(api, body, pointer):
    answer = api.post(HEARTBEAT, body)
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.data["errors"]] == [pointer]
    assert not Heartbeat.objects.exists()


def test_there_is_one_at_most(api):
    assert api.post(HEARTBEAT, {"url": SECRET}).status_code == 201
    assert api.post(HEARTBEAT, {"url": SECRET}).status_code == 409
    assert api.post(HEARTBEAT + "?dry_run=true", {"url": SECRET}).status_code == 409
