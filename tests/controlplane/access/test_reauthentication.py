"""Lifetime of sessions, re-authentication, cookies and framing."""

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
def admin(client, here, user_with, time_machine):
    """Signed in at noon."""
    time_machine.move_to(NOON, tick=False)
    user = user_with("admin", everywhere=True)
    client.force_login(user)
    return user


def test_irreversible_pages_need_an_authentication_of_the_last_15_minutes(client, admin, here, time_machine):
    time_machine.move_to("2026-11-21T12:14:59Z", tick=False)
    assert client.get(f"/fleet/pools/{here.pool.pk}/remove/").status_code == 200
    time_machine.move_to("2026-11-21T12:15:00Z", tick=False)
    assert client.get("/fleet/").status_code == 200
    redirect = client.get(f"/fleet/pools/{here.pool.pk}/remove/")
    assert redirect["Location"] == f"/accounts/confirm/?next=%2Ffleet%2Fpools%2F{here.pool.pk}%2Fremove%2F"
    wrong = client.post(redirect["Location"], {"password": "wrong wrong wrong"})
    assert wrong.status_code == 200
    confirmed = client.post(redirect["Location"], {"password": PASSWORD})
    assert confirmed["Location"] == f"/fleet/pools/{here.pool.pk}/remove/"
    assert client.get(confirmed["Location"]).status_code == 200


def test_reauthentication_returns_to_the_page_of_the_form(client, admin, here, user_with, time_machine):
    viewer = user_with("viewer")
    time_machine.move_to("2026-11-21T13:00Z", tick=False)
    page = f"/users/{viewer.pk}/"
    redirect = client.post(f"{page}role/", {"role": "admin"}, HTTP_REFERER=f"http://testserver{page}")
    assert not RoleAssignment.objects.filter(user=viewer, role=Role.ADMIN).exists()
    response = client.post(redirect["Location"], {"password": PASSWORD}, follow=True)
    assert response.request["PATH_INFO"] == page
    assert "submit the form once more" in response.text
    client.post(f"{page}role/", {"role": "admin"})
    assert RoleAssignment.objects.filter(user=viewer, role=Role.ADMIN).exists()


def test_reauthentication_never_redirects_to_another_site(client, admin, time_machine):
    time_machine.move_to("2026-11-21T13:00Z", tick=False)
    redirect = client.post("/tokens/", {"name": "x"}, HTTP_REFERER="http://evil.example/tokens/")
    assert redirect["Location"] == "/accounts/confirm/?next=%2F"
    response = client.post("/accounts/confirm/?next=//evil.example/", {"password": PASSWORD})
    assert response["Location"] == "/"


def test_every_confirmed_route_rejects_a_stale_session(client, admin, here, time_machine):
    from django.urls import NoReverseMatch, reverse

    key, _ = create_client_key(here.project, "agents")
    time_machine.move_to("2026-11-21T13:00Z", tick=False)
    values = {
        "pool_id": here.pool.pk,
        "project_id": here.project.pk,
        "user_id": admin.pk,
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
            response = getattr(rest if "api:" in route else client, method.lower())(address)
            is_rejected = response.status_code == 403 if "api:" in route else response.status_code == 302
            assert is_rejected, (route, method, response.status_code)
            assert "confirm" in (response.get("Location") or response.text), (route, method)
            break
        else:
            pytest.fail(f"no address of {route}")
    assert Pool.objects.filter(pk=here.pool.pk).exists()


def test_tokens_need_no_reauthentication(admin, here, time_machine):
    _, text = create_token(admin, name="x", scopes=[Scope.ADMIN])
    time_machine.move_to("2026-11-21T13:00Z", tick=False)
    script = APIClient()
    script.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    assert script.post("/api/v1/projects", {"name": "short"}).status_code == 201
    assert script.delete("/api/v1/projects/short", headers={"If-Match": "*"}).status_code == 204


def test_a_session_ends_twelve_hours_after_its_last_request(client, admin, time_machine):
    time_machine.move_to("2026-11-21T23:59Z", tick=False)
    assert client.get("/fleet/").status_code == 200
    time_machine.move_to("2026-11-22T11:58Z", tick=False)
    assert client.get("/fleet/").status_code == 200, "twelve hours after the last request, not after the first"
    time_machine.move_to("2026-11-22T23:59Z", tick=False)
    assert client.get("/fleet/").status_code == 302


def test_automatic_refreshes_do_not_prolong_a_session(client, admin, time_machine):
    for hour in range(13, 24):
        time_machine.move_to(f"2026-11-21T{hour}:00Z", tick=False)
        assert client.get("/live/", headers={"HX-Request": "true"}).status_code == 200
    time_machine.move_to("2026-11-22T00:01Z", tick=False)
    assert client.get("/fleet/").status_code == 302


def test_signing_in_replaces_the_session_and_the_csrf_token(here, user_with):
    client = Client()
    user = user_with("viewer")
    client.get("/accounts/login/")
    session = client.session
    session["planted"] = "by an attacker"
    session.save()
    client.cookies["sessionid"] = session.session_key
    before, token = session.session_key, client.cookies["csrftoken"].value
    client.post("/accounts/login/", {"login": user.username, "password": PASSWORD})
    assert client.cookies["sessionid"].value != before
    assert client.cookies["csrftoken"].value != token


def test_session_cookies_are_http_only_and_same_site(here, user_with):
    client, user = Client(), user_with("viewer")
    client.post("/accounts/login/", {"login": user.username, "password": PASSWORD})
    cookie = client.cookies["sessionid"]
    assert (cookie["httponly"], cookie["samesite"], cookie["max-age"]) == (True, "Lax", 12 * 3600)


PATHS = ["/accounts/login/", "/accounts/confirm/", "/fleet/", "/healthz", "/no-such-page/", "/api/v1/pools"]


@pytest.mark.parametrize("path", PATHS)
def test_every_page_forbids_framing_and_inline_scripts(client, admin, path):
    response = client.get(path)
    policy = response["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")  # no plugins, and nothing inline
    assert "base-uri 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert response["X-Frame-Options"] == "DENY"
