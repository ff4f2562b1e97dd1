"""Short links, the menu and the search: where they lead, and for whom."""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import pytest
import time_machine
from django.urls import reverse

from controlplane.models import PolicyRevision, Role, Rollout, Router
from controlplane.services.access.users import add_user, set_role
from controlplane.services.fleet.pools import create_project
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from telemetry.models import Alert, Decision, ShortLink
from telemetry.services import navigation
from telemetry.services.metrics_servers import create_server
from telemetry.services.notifications.channels import create_channel
from telemetry.web.decisions import place_of
from tests.decision_history import decisions_at_work
from tests.fleet_history import drop_alert
from tests.telemetry.web.conftest import NOW

VIEW = "/?pool=chat&range=6h&hide=hit-rate%3Agpu-1&table=ttft"


def shorten(visitor, view):
    return visitor.post("/links/", {"view": view}, follow=True)


@contextmanager
def at(visitor, who, **later):
    """Later, when sessions of noon are over."""
    with time_machine.travel(NOW + timedelta(**later), tick=False):
        visitor.force_login(who)
        yield


def test_a_view_has_one_link_which_leads_there_with_all_of_its_state(visitor, fleet):
    page = shorten(visitor, VIEW)
    link = ShortLink.objects.get()

    assert page.redirect_chain == [(f"/links/{link.code}/", 302)]
    assert f"http://testserver/s/{link.code}/" in page.text
    assert visitor.get(f"/s/{link.code}/").url == VIEW
    assert shorten(visitor, VIEW).redirect_chain == page.redirect_chain
    assert ShortLink.objects.count() == 1


def test_a_link_to_a_live_range_can_be_fixed_to_the_current_range(visitor, fleet):
    shown = shorten(visitor, VIEW).context["fixed"]
    assert parse_qs(urlsplit(shown).query) == {
        "pool": ["chat"], "hide": ["hit-rate:gpu-1"], "table": ["ttft"],
        "from": ["2031-03-04T06:00:00"], "to": ["2031-03-04T12:00:00"],
    }  # fmt: skip
    assert shorten(visitor, shown).context["fixed"] is None
    assert ShortLink.objects.count() == 2


@pytest.mark.parametrize(
    "view",
    [
        "", "pools/", "https://evil.example/", "//evil.example/", "/\\evil.example/", "/no-such-page/", "/api/v1/pools",
        "/accounts/logout/", "javascript:alert(1)", "/\n/evil.example", "/pools/caf\u00e9/", "/?" + "x" * 2000, "/[",
    ],
)  # fmt: skip
def test_a_url_of_another_site_gets_no_short_link(visitor, view):
    page = shorten(visitor, view)
    assert "The short link could not be created: $.view: expected the address of" in page.text
    assert not ShortLink.objects.exists()


def test_an_unknown_code_is_not_found(visitor):
    assert [visitor.get(path).status_code for path in ("/s/none/", "/links/none/")] == [404, 404]


def test_a_short_link_opens_after_signing_in(visitor, fleet, client):
    shorten(visitor, VIEW)
    path = f"/s/{ShortLink.objects.get().code}/"
    client.logout()
    assert client.get(path).url == f"/accounts/login/?next={path}"


def test_unused_short_links_are_deleted_the_least_recently_opened_first(visitor, operator, monkeypatch):
    monkeypatch.setattr(navigation, "MAX_LINKS", 2)
    for seconds, view in enumerate(("/?range=1h", "/?range=2h")):
        with time_machine.travel(NOW + timedelta(seconds=seconds), tick=False):
            shorten(visitor, view)
    first = ShortLink.objects.get(view="/?range=1h")
    with at(visitor, operator, days=2):
        assert visitor.get(f"/s/{first.code}/").status_code == 302
        shorten(visitor, "/?range=3h")
    assert set(ShortLink.objects.values_list("view", flat=True)) == {"/?range=1h", "/?range=3h"}
    with at(visitor, operator, days=403):
        shorten(visitor, "/?range=4h")
    assert list(ShortLink.objects.values_list("view", flat=True)) == ["/?range=4h"]


def test_a_user_can_create_a_limited_number_of_short_links_per_day(visitor, operator, monkeypatch):
    monkeypatch.setattr(navigation, "MAX_LINKS_PER_DAY", 1)
    shorten(visitor, "/?range=1h")
    assert "You created 1 short links within a day." in shorten(visitor, "/?range=2h").text
    with at(visitor, operator, days=1, seconds=1):
        shorten(visitor, "/?range=2h")
    assert ShortLink.objects.count() == 2


def found(visitor, text):
    """Search results by kind: names."""
    by_kind = {}
    for row in visitor.get("/search/", {"format": "json", "q": text}).json()["found"]:
        by_kind.setdefault(row["kind"], []).append(row["name"])
    return by_kind


@pytest.fixture
def searched(fleet, noon, operator):
    """A fleet with a row of each kind that a search finds; a request of it."""
    policy = fleet.policies.get(group=None)
    publish_revision(save_draft(policy, {"strategy": "random"}, by=operator).pk, by=operator)
    drop_alert(fleet, noon)
    create_channel("night-shift", config={"url": "https://hooks.example/x"})
    create_server(name="cluster", url="http://10.0.0.9:9090")
    router = Router.objects.first() or Router.objects.create(name="edge-1", admin_url="http://x", last_seen_at=noon)
    decisions_at_work(fleet, router, noon)
    return Decision.objects.exclude(request_id="").first()


def test_search_finds_each_kind(visitor, searched, operator):
    live = PolicyRevision.objects.filter(state="live", policy__group=None).get()
    revision = f"Revision {live.number} of chat"
    rollout, alert = Rollout.objects.latest("pk"), Alert.objects.get()

    assert found(visitor, "policies")["Pages"] == ["Policies"]
    assert found(visitor, "capacity")["Pages"] == ["Capacity and cost"]
    assert found(visitor, "chat")["Pools"] == ["chat"]
    assert found(visitor, "gpu-1") == {"Replicas": ["gpu-1"]}
    assert found(visitor, "cod")["Task groups"] == ["chat / coding"]
    assert found(visitor, "chat")["Policies"][0] == "chat"
    for text in (f"r{live.number}", f"revision {live.number}", str(live.number)):
        assert found(visitor, text)["Revisions"] == [revision], text
    by_strategy = found(visitor, "random")
    assert by_strategy["Policies"] == ["chat"], "the policy that uses it"
    assert by_strategy["Strategies"] == ["random"]
    assert found(visitor, "round robin")["Strategies"] == ["round_robin"]
    assert found(visitor, f"rollout {rollout.pk}")["Rollouts"] == [f"Rollout {rollout.pk}: {revision.lower()}"]
    assert found(visitor, f"alert {alert.pk}")["Alerts"] == [alert.summary]
    assert found(visitor, alert.summary[:12])["Alerts"] == [alert.summary]
    assert found(visitor, searched.request_id)["Requests"][0] == searched.request_id
    assert searched.request_id in found(visitor, searched.request_id[-8:])["Requests"]
    assert found(visitor, place_of(searched)) == {"Requests": [searched.request_id]}  # from the address of its page
    assert not found(visitor, f"r{rollout.pk}").keys() & {"Rollouts", "Alerts"}
    for text in ("hit rate drop", "night", "cluster", "olga", Router.objects.first().name):
        assert found(visitor, text)["Settings"], text
    assert found(visitor, "nothing-of-this-name") == {}


def test_search_offers_actions_and_each_leads_to_its_page(visitor, searched):
    assert found(visitor, "drain") == {"Actions": [f"Drain replica gpu-{n}" for n in range(1, 5)]}
    assert found(visitor, "drain gpu-2") == {"Actions": ["Drain replica gpu-2"]}
    assert found(visitor, "publish")["Actions"] == ["Edit and publish policy chat"]
    assert found(visitor, "roll back")["Actions"] == ["Roll back policy chat"]
    assert found(visitor, "silence")["Actions"] == ["New silence", "Silences"]
    assert found(visitor, "add channel")["Actions"] == ["Add channel for notifications"]
    assert found(visitor, "sign out")["Actions"] == ["Sign out"]
    assert found(visitor, "price")["Actions"] == ["Set the price of a GPU-hour in pool chat"]
    for name, route in navigation._ACTIONS:
        assert name in found(visitor, name)["Actions"]
        assert visitor.get(reverse(route)).status_code in {200, 302}, name
    words = ("chat", "gpu-1", "r1", "random", "drain", "publish", "roll", "add", "rule", "channel", "user", "alert")
    for text in words:
        for row in visitor.get("/search/", {"format": "json", "q": text}).json()["found"]:
            assert visitor.get(row["href"], follow=True).status_code == 200, row


def test_search_shows_keys_and_counts_and_carries_pool_and_range(visitor, searched):
    page = visitor.get("/search/?q=rollouts&pool=chat&range=6h").text
    assert "<kbd>g</kbd> <kbd>l</kbd>" in page
    assert 'href="/rollouts/?pool=chat&amp;range=6h"' in page
    assert "1 result." in visitor.get("/search/?q=gpu-1").text
    assert "4 results." in visitor.get("/search/?q=gpu").text


def test_search_respects_roles(client, searched):
    """A viewer of another project finds nothing of this one; a viewer of all finds no form."""
    other = create_project("elsewhere")
    for project, sees in ((other, False), (None, True)):
        set_role(user := add_user(f"vera-{sees}".lower(), password="a long enough password"), Role.VIEWER, project)
        client.force_login(user)
        for text in ("chat", "gpu-1", "r1", "coding", "random", f"alert {Alert.objects.get().pk}", searched.request_id):
            assert bool(found(client, text).keys() - {"Strategies"}) == sees, (text, sees)
        denied = (
            "drain",
            "publish",
            "roll",
            "olga",
            "cluster",
            "night-shift",
            "hit rate drop",
            "add",
            "users",
            "audit",
        )
        for text in denied:
            assert found(client, text).keys() <= {"Pages", "Alerts", "Policies", "Rollouts"}, text
        pages = client.get("/search/?format=json&q=").json()["found"]
        assert {row["kind"] for row in pages} == {"Pages"}
        for row in pages:
            assert client.get(row["href"]).status_code == 200, row


def test_search_runs_a_bounded_number_of_queries(visitor, searched, django_assert_max_num_queries):
    for text in ("gpu", "r1 chat", "add new roll drain publish", searched.request_id):
        with django_assert_max_num_queries(25):
            visitor.get("/search/", {"format": "json", "q": text})


@pytest.mark.parametrize("role", Role)
def test_each_page_in_the_menu_opens_for_its_roles_and_is_marked(client, searched, role):
    set_role(user := add_user("nina", password="a long enough password"), role, None)
    client.force_login(user)
    rows = client.get("/search/?format=json&q=").json()["found"]
    assert {"Overview", "Alerts", "Policies", "Your account"} <= {row["name"] for row in rows}
    assert ("Users" in {row["name"] for row in rows}) == (role == Role.ADMIN)
    for row in rows:
        page = client.get(row["href"])
        assert page.status_code == 200, row
        assert f'<a href="{row["href"]}" aria-current="page">{row["name"]}</a>' in page.text, row
        assert page.text.count('aria-current="page"') == 1, row
        assert re.search(rf'<li><a href="[^"]+" aria-current="true"><svg.*?<span>{row["note"]}</span>', page.text), row


def test_error_pages_keep_the_menu(client, visitor, fleet, monkeypatch):
    monkeypatch.setattr("telemetry.web.views.links.search", lambda *_: 1 / 0)
    visitor.raise_request_exception = False
    set_role(user := add_user("vera", password="a long enough password"), Role.VIEWER, None)
    menu = '<nav class="rail"'
    assert menu in visitor.get("/no-such-page/").text
    broken = visitor.get("/search/?q=x")
    assert broken.status_code == 500
    assert menu in broken.text
    monkeypatch.setattr("controlplane.web.navigation.may_open", lambda *_: 1 / 0)
    broken = visitor.get("/search/?q=x")
    assert broken.status_code == 500
    assert "Something went wrong" in broken.text
    assert menu not in broken.text
    monkeypatch.undo()
    client.force_login(user)
    forbidden = client.get("/users/")
    assert forbidden.status_code == 403
    assert menu in forbidden.text
