"""Short links: a code leads to a view with all of its state, and nowhere else."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import pytest
import time_machine

from telemetry.models import ShortLink
from telemetry.services import navigation
from tests.telemetry.web.conftest import NOW

VIEW = "/pools/chat/?range=6h&hide=hit-rate%3Agpu-1&table=ttft"


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
        "hide": ["hit-rate:gpu-1"], "table": ["ttft"], "from": ["2031-03-04T06:00:00"], "to": ["2031-03-04T12:00:00"],
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
