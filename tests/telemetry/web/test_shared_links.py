"""Read-only links, the wall and saved views: what they show, to whom, and until when."""

from __future__ import annotations

import logging
import re
from datetime import timedelta

import pytest
import time_machine
from django.contrib.auth.models import User
from django.test import Client

from controlplane.models import AuditEntry, EventKind, Pool, Role
from controlplane.request_origin import without_tokens
from controlplane.services import rates
from controlplane.services.access.users import set_role
from controlplane.services.events import record_event
from controlplane.services.fleet.pools import create_pool, create_project
from telemetry.models import Alert, AlertRule, SavedView, SharedLink
from telemetry.services import navigation
from telemetry.web.views import links
from tests.fleet_history import drop_alert
from tests.telemetry.web.conftest import NOW

CHARTS = ("hit-rate", "ttft")


def share(browser, pool="chat", **fields):
    """The path of a new link."""
    page = browser.post("/views/", {"pool": pool, "range": "15m", "hours": "168"} | fields)
    found = re.search(r'value="http://testserver(/shared/[^"]+)"', page.text)
    assert found, page.text
    return found[1]


@pytest.fixture
def stranger(settings, monkeypatch):
    """A browser without an account; nothing is kept between its requests."""
    monkeypatch.setattr(links, "_shared_contents", links.SharedContent())
    settings.LIVE_PARTS_FRESH_S = settings.API_RATE_UNAUTHENTICATED = 0
    return Client()


@pytest.fixture
def user(fleet):
    """Creates a signed-in client with a role in the pool's project."""

    def make(name, role, project=None):
        person, browser = User.objects.create_user(name), Client()
        set_role(person, role, project or fleet.project)
        browser.force_login(person)
        return browser

    return make


def paths(link):
    return [link, f"{link}live/", *(f"{link}charts/{slug}/figure/" for slug in CHARTS)]


def test_a_link_shows_the_wall_of_its_pool_and_nothing_else(visitor, stranger, fleet, noon):
    other = create_pool("secret-pool", project=create_project("other"), models=["m"])
    alert = drop_alert(fleet, noon)
    record_event(EventKind.REPLICA_DOWN, "olga-the-admin drained it.", pool=fleet)
    record_event(EventKind.ROUTER_LOST, "Router secret-router is lost.")
    lost = AlertRule.objects.get(pool=fleet, kind="router_lost", name="Router lost")
    times = {"started_at": NOW, "last_breach_at": NOW, "fired_at": NOW}
    Alert.objects.create(rule=lost, pool=fleet, state="firing", summary="Router secret-router is lost.", **times)
    link = share(visitor)
    responses = [stranger.get(path) for path in paths(link)]

    page, live, *figures = responses
    assert [response.status_code for response in responses] == [200] * 4
    assert alert.summary in page.text
    assert "gpu-1" in live.text
    assert "<html" not in live.text
    assert figures[0].json()["meta"]["title"] == "Hit rate and reachable hit rate"
    everything = "".join(response.text for response in responses)
    for hidden in ("olga", other.name, "secret-router", "<form", "<nav", "csrf", "<a "):
        assert hidden not in everything
    addresses = set(re.findall(r'(?:href|src|hx-get|data-src|action)="([^"?]+)', page.text))
    assert {path for path in addresses if not path.startswith("/static/")} == {
        "live/", *(f"charts/{slug}/figure/" for slug in CHARTS)
    }  # fmt: skip
    for response in responses:
        assert not response.cookies
        assert "no-store" in response["Cache-Control"]
        assert response["Referrer-Policy"] == "no-referrer"
        assert response["X-Frame-Options"] == "DENY"
    assert stranger.get("/").status_code == 302


def test_a_query_or_a_session_changes_nothing(visitor, stranger, fleet):
    create_pool("secret-pool", project=create_project("other"), models=["m"])
    link = share(visitor, range="30m")
    shown = stranger.get(link, headers={"X-Request-Id": "a"})
    asked = stranger.get(f"{link}?pool=secret-pool&range=7d&group=x", headers={"X-Request-Id": "a"})
    signed_in = visitor.get(link, headers={"X-Request-Id": "a"})
    assert shown.content == asked.content == signed_in.content
    assert "last 30 min" in shown.text
    assert not signed_in.cookies


def test_every_refusal_is_the_same(visitor, stranger, fleet, operator):
    """Unknown, expired, revoked, of a disabled user, of a removed pool, and a chart that the wall has not."""

    def refused(path):
        response = stranger.get(path, headers={"X-Request-Id": "a"})
        return response.status_code, response.content, sorted(response.headers.items())

    unknown = refused("/shared/none/")
    assert unknown[0] == 404
    link, brief = share(visitor), share(visitor, hours="1")
    assert refused(f"{link}charts/requests/figure/") == refused(f"{link}charts/none/figure/") == unknown
    with time_machine.travel(NOW + timedelta(hours=1), tick=False):
        assert [refused(path) for path in paths(brief)] == [unknown] * 4
        assert stranger.get(link).status_code == 200
    visitor.post(f"/views/shared/{SharedLink.objects.get(expires_at__gt=NOW + timedelta(days=2)).pk}/revoke/")
    assert [refused(path) for path in paths(link)] == [unknown] * 4
    link = share(visitor)
    User.objects.filter(pk=operator.pk).update(is_active=False)
    assert refused(link) == unknown
    User.objects.filter(pk=operator.pk).update(is_active=True)
    assert stranger.get(link).status_code == 200
    gone = share(visitor, pool=create_pool("brief", project=fleet.project, models=["m"]).name)
    Pool.objects.get(name="brief").delete()
    assert refused(gone) == unknown


def test_only_reading_is_possible_and_requests_are_counted(visitor, stranger, fleet, settings, monkeypatch):
    link = share(visitor)
    assert [getattr(Client(enforce_csrf_checks=True), verb)(link).status_code for verb in ("post", "delete")] == [
        405
    ] * 2
    settings.API_RATE_UNAUTHENTICATED = 3
    spent = rates.Allowance(3, -1, 42)
    monkeypatch.setattr(rates.Counter, "charge", lambda *_: spent)
    response = stranger.get(link)
    assert (response.status_code, response["Retry-After"]) == (429, "42")


def test_a_token_is_in_no_log_no_audit_entry_and_no_table(visitor, stranger, fleet, caplog):
    caplog.set_level(logging.DEBUG)
    link = share(visitor)
    token = link.split("/")[2]
    assert len(token) >= 43  # 256 bits
    for path in (f"{link}charts/none/figure/", f"{link}nothing/", f"/shared/{token}x/"):
        assert stranger.get(path).status_code == 404
    stranger.post(link)
    visitor.post(f"/views/shared/{SharedLink.objects.get().pk}/revoke/")
    created, revoked = AuditEntry.objects.filter(kind__in=("link_shared", "link_revoked")).order_by("number")
    assert (created.actor, created.pool, revoked.actor) == ("olga", "chat", "olga")
    assert created.after == {"range": "range=15m", "expires_at": "2031-03-11T12:00:00+00:00"}
    assert "/shared/***/" in caplog.text
    assert token not in caplog.text
    assert token not in str(list(AuditEntry.objects.values()))
    assert token not in visitor.get("/views/").text + visitor.get("/audit/").text + visitor.get("/events/").text
    assert without_tokens(f"/shared/{token}/live/") == "/shared/***/live/"  # as in traces


def test_editors_create_and_revoke_links(user, visitor, stranger, fleet):
    elsewhere = create_project("elsewhere")
    editor, other_editor, viewer = user("eddie", Role.EDITOR), user("edna", Role.EDITOR), user("vic", Role.VIEWER)
    abroad = user("abe", Role.EDITOR, elsewhere)
    assert viewer.post("/views/", {"pool": "chat", "hours": "1"}).status_code == 403
    assert "New read-only link" not in viewer.get("/views/").text
    refused = abroad.post("/views/", {"pool": "chat", "range": "1h", "hours": "1"})
    assert (refused.status_code, SharedLink.objects.count()) == (422, 0)
    for fields in (
        {"hours": "1000"},
        {"range": "soon"},
        {"start": "2031-03-04T12:00"},
        {"start": "2031-03-04T12:00", "end": "yesterday"},
    ):
        assert editor.post("/views/", {"pool": "chat", "hours": "1"} | fields).status_code == 422
    form = editor.get("/views/?pool=chat&from=2031-03-04T11:00&to=2031-03-04T11:30").text
    assert ('value="2031-03-04T11:00"' in form, 'value="2031-03-04T11:30"' in form) == (True, True)
    link = share(editor, start="2031-03-04T11:00", end="2031-03-04T11:30")
    assert "in this range" in stranger.get(link).text
    path = f"/views/shared/{SharedLink.objects.get().pk}/revoke/"
    listed = viewer.get("/views/").text
    assert "by eddie" in listed
    assert path not in listed
    assert [browser.post(path).status_code for browser in (abroad, viewer, other_editor)] == [404, 403, 302]
    assert not SharedLink.objects.exists()


def test_a_pool_has_a_bounded_number_of_links(visitor, fleet, monkeypatch):
    monkeypatch.setattr(navigation, "MAX_SHARED_LINKS", 1)
    share(visitor)
    assert "Pool chat has 1 read-only links" in visitor.post("/views/", {"pool": "chat", "hours": "1"}).text
    with time_machine.travel(NOW + timedelta(days=8), tick=False):
        visitor.force_login(User.objects.get(username="olga"))
        share(visitor)


def test_the_wall_is_the_overview_without_menu_and_refreshes_as_a_wall(visitor, fleet):
    page = visitor.get("/?wall=1&pool=chat&range=1h").text
    assert 'class="wall"' in page
    assert 'id="status"' in page
    assert 'href="/?pool=chat&amp;range=1h" data-leave' in page
    assert not re.search(r'class="(rail|top)"|<dialog', page)
    live = visitor.get("/live/?wall=1&pool=chat&range=1h").text
    assert 'id="strips"' in live
    assert "<html" not in live
    assert live.count('class="strip"') == 4


def save(browser, view, name):
    return browser.post("/links/", {"view": view, "name": name}, follow=True)


def test_saved_views_are_the_users_own_and_saving_again_renames(visitor, user, fleet):
    assert "Night  shift" not in save(visitor, "/?range=6h&pool=chat", " Night  shift ").text
    other = user("vic", Role.VIEWER)
    save(other, "/?range=6h&pool=chat", "Night shift")
    found = visitor.get("/search/", {"format": "json", "q": "night"}).json()["found"]
    (row,) = [row for row in found if row["kind"] == "Views"]
    assert visitor.get(row["href"]).url == "/?range=6h&pool=chat"
    save(visitor, "/?range=6h&pool=chat", "Late")
    save(visitor, "/?range=1h", "Late")
    olga = SavedView.objects.filter(user__username="olga")
    assert list(olga.values_list("name", "link__view")) == [("Late", "/?range=1h")]
    path = f"/views/{olga.get().pk}/remove/"
    assert (other.post(path).status_code, visitor.post(path).status_code) == (404, 302)
    assert list(SavedView.objects.values_list("user__username", "name")) == [("vic", "Night shift")]
