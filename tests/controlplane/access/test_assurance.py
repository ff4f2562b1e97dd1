"""Sessions: how long they last, and what asks for a fresh proof of who is there."""

import pytest
from django.test import Client
from rest_framework.test import APIClient

from controlplane.access.rules import RULES
from controlplane.models import Pool, Role, RoleAssignment, Scope
from controlplane.services.access.tokens import create_token
from controlplane.services.fleet.client_keys import create_client_key

PASSWORD = "a long enough password"
NOON = "2026-11-21T12:00Z"
pytestmark = pytest.mark.django_db


@pytest.fixture
def admin(client, here, person_with, time_machine):
    """Signed in at noon."""
    time_machine.move_to(NOON, tick=False)
    person = person_with("admin", everywhere=True)
    client.force_login(person)
    return person


def test_what_cannot_be_undone_asks_again_after_a_quarter_of_an_hour(client, admin, here, time_machine):
    time_machine.move_to("2026-11-21T12:14:59Z", tick=False)
    assert client.get(f"/fleet/pools/{here.pool.pk}/remove/").status_code == 200
    time_machine.move_to("2026-11-21T12:15:00Z", tick=False)
    assert client.get("/fleet/").status_code == 200
    asked = client.get(f"/fleet/pools/{here.pool.pk}/remove/")
    assert asked["Location"] == f"/accounts/confirm/?next=%2Ffleet%2Fpools%2F{here.pool.pk}%2Fremove%2F"
    wrong = client.post(asked["Location"], {"password": "wrong wrong wrong"})
    assert wrong.status_code == 200
    back = client.post(asked["Location"], {"password": PASSWORD})
    assert back["Location"] == f"/fleet/pools/{here.pool.pk}/remove/"
    assert client.get(back["Location"]).status_code == 200


def test_a_form_that_comes_too_late_leads_back_to_its_page(client, admin, here, person_with, time_machine):
    someone = person_with("viewer")
    time_machine.move_to("2026-11-21T13:00Z", tick=False)
    page = f"/people/{someone.pk}/"
    sent = client.post(f"{page}role/", {"role": "admin"}, HTTP_REFERER=f"http://testserver{page}")
    assert not RoleAssignment.objects.filter(user=someone, role=Role.ADMIN).exists()
    answer = client.post(sent["Location"], {"password": PASSWORD}, follow=True)
    assert answer.request["PATH_INFO"] == page
    assert "submit the form once more" in answer.text
    client.post(f"{page}role/", {"role": "admin"})
    assert RoleAssignment.objects.filter(user=someone, role=Role.ADMIN).exists()


def test_a_referrer_of_another_site_is_not_gone_back_to(client, admin, time_machine):
    time_machine.move_to("2026-11-21T13:00Z", tick=False)
    sent = client.post("/tokens/", {"name": "x"}, HTTP_REFERER="http://evil.example/tokens/")
    assert sent["Location"] == "/accounts/confirm/?next=%2F"
    answer = client.post("/accounts/confirm/?next=//evil.example/", {"password": PASSWORD})
    assert answer["Location"] == "/"


def test_every_such_route_refuses_a_stale_session(client, admin, here, time_machine):
    from django.urls import NoReverseMatch, reverse

    key, _ = create_client_key(here.project, "agents")
    time_machine.move_to("2026-11-21T13:00Z", tick=False)
    values = {
        "pool_id": here.pool.pk,
        "project_id": here.project.pk,
        "person_id": admin.pk,
        "token_id": 1,
        "session_id": 1,
    }
    values |= {
        "name": here.pool.name,
        "key_id": key.pk,
        "server_id": here.server.pk,
        "channel_id": here.channel.pk,
        "pk": 1,
    }
    names = [{}, *({name: value} for name, value in values.items())]
    rest = APIClient()
    rest.cookies = client.cookies
    for route, method in [(route, method) for route, rule in RULES.items() for method in rule.confirm]:
        for kwargs in names:
            try:
                address = reverse(route, kwargs=kwargs)
            except NoReverseMatch:
                continue
            answer = getattr(rest if "api:" in route else client, method.lower())(address)
            refused = answer.status_code == 403 if "api:" in route else answer.status_code == 302
            assert refused, (route, method, answer.status_code)
            assert "confirm" in (answer.get("Location") or answer.text), (route, method)
            break
        else:
            pytest.fail(f"no address of {route}")
    assert Pool.objects.filter(pk=here.pool.pk).exists()


def test_a_script_proves_itself_with_each_request(admin, here, time_machine):
    _, text = create_token(admin, name="x", scopes=[Scope.ADMIN])
    time_machine.move_to("2026-11-21T13:00Z", tick=False)
    script = APIClient()
    script.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    assert script.post("/api/v1/projects", {"name": "short"}).status_code == 201
    assert script.delete("/api/v1/projects/short", headers={"If-Match": "*"}).status_code == 204


def test_a_session_ends_twelve_hours_after_the_last_request_of_a_person(client, admin, time_machine):
    time_machine.move_to("2026-11-21T23:59Z", tick=False)
    assert client.get("/fleet/").status_code == 200
    time_machine.move_to("2026-11-22T11:58Z", tick=False)
    assert client.get("/fleet/").status_code == 200, "twelve hours after the last, not after the first"
    time_machine.move_to("2026-11-22T23:59Z", tick=False)
    assert client.get("/fleet/").status_code == 302


def test_a_page_that_refreshes_itself_keeps_nobody_signed_in(client, admin, time_machine):
    for hour in range(13, 24):
        time_machine.move_to(f"2026-11-21T{hour}:00Z", tick=False)
        assert client.get("/live/", headers={"HX-Request": "true"}).status_code == 200
    time_machine.move_to("2026-11-22T00:01Z", tick=False)
    assert client.get("/fleet/").status_code == 302


def test_signing_in_makes_a_new_session_and_changes_the_token_of_forms(here, person_with):
    client = Client()
    person = person_with("viewer")
    client.get("/accounts/login/")
    session = client.session
    session["planted"] = "by an attacker"
    session.save()
    client.cookies["sessionid"] = session.session_key
    before, token = session.session_key, client.cookies["csrftoken"].value
    client.post("/accounts/login/", {"login": person.username, "password": PASSWORD})
    assert client.cookies["sessionid"].value != before
    assert client.cookies["csrftoken"].value != token


def test_cookies_are_kept_from_scripts_and_other_sites(here, person_with):
    client, person = Client(), person_with("viewer")
    client.post("/accounts/login/", {"login": person.username, "password": PASSWORD})
    cookie = client.cookies["sessionid"]
    assert (cookie["httponly"], cookie["samesite"], cookie["max-age"]) == (True, "Lax", 12 * 3600)


EVERYWHERE = ["/accounts/login/", "/accounts/confirm/", "/fleet/", "/healthz", "/no-such-page/", "/api/v1/pools"]


@pytest.mark.parametrize("path", EVERYWHERE)
def test_nobody_puts_a_page_of_ours_into_theirs(client, admin, path):
    answer = client.get(path)
    policy = answer["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")  # no object, and nothing inline
    assert "base-uri 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert answer["X-Frame-Options"] == "DENY"
