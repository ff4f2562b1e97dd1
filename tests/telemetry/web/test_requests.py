"""Requests: lists in the order that is asked for, and one decision explained."""

import re
from datetime import timedelta

import pytest

from controlplane.models import Pool, Replica, Role
from controlplane.services.access.users import set_role
from controlplane.services.fleet.pools import create_pool, create_project
from telemetry.models import Decision
from telemetry.services.lab import decisions as service
from telemetry.web.decisions import comparison_text, place_of
from tests.telemetry.stored_decisions import a_router, decided, decided_in_a_row

CANDIDATES = [
    {"replica": "gpu-2", "running": 1, "waiting_tokens": 10, "hit_tokens": 0, "cost": 1010.0},
    {"replica": "gpu-1", "running": 4, "waiting_tokens": 40, "hit_tokens": 800, "cost": 240.0},
]
STRUCTURE = {
    "bytes": 9000,
    "described": 9000,
    "messages": 2,
    "session": None,
    "tools": None,
    "segments": [
        {"kind": "system", "at": 0, "bytes": 8000, "hash": "aa", "letters": "bb"},
        {"kind": "user", "at": 8000, "bytes": 1000, "hash": "cc", "letters": "dd"},
    ],
    "pieces": [],
    "volatile": [{"kind": "date", "at": 41, "bytes": 10, "hash": "ee"}],
}


@pytest.fixture
def router(visitor):
    create_pool("chat")
    return a_router()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (404, "does not serve the model that the request names. No prompt was computed"),
        (400, "the request is invalid. No prompt was computed"),
        (503, "failed with status 503"),
    ],
)
def test_a_request_without_a_response_of_the_engine_says_why_its_prediction_does_not_count(status, text):
    assert text in comparison_text(Decision(status=status, hit_tokens=800, replica="gpu-1"))


def ids(text):
    return re.findall(r'href="/requests/[^"]+/">(?:<bdi dir="ltr">)?([^<]+)<', text)


def test_requests_are_listed_newest_first_page_by_page(visitor, router, noon, django_assert_max_num_queries):
    decided_in_a_row(router, noon, 60)

    with django_assert_max_num_queries(16):
        first = visitor.get("/requests/").text
    older = re.search(r'href="\?([^"]*cursor=[^"]*)"', first)[1].replace("&amp;", "&")

    assert ids(first) == [f"req-{seq}" for seq in range(59, 9, -1)]
    assert ids(visitor.get(f"/requests/?{older}").text) == [f"req-{seq}" for seq in range(9, -1, -1)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("order=slowest", ["slow", "wrong", "cold", "plain"]),
        ("order=recomputed", ["cold", "wrong", "slow", "plain"]),
        ("order=misjudged", ["wrong", "slow", "cold", "plain"]),
        ("reason=spill", ["cold"]),
        ("outcome=failed", ["broken"]),
        ("replica=gpu-2", ["cold"]),
        ("pool=chat&group=-", ["broken"]),
        ("id=slow", ["slow"]),
        ("id=nowhere", []),
    ],
)
def test_requests_are_sorted_and_filtered_as_requested(visitor, router, noon, query, expected):
    create = {
        "plain": {"ttft_s": 0.05, "cached_tokens": 800},
        "slow": {"ttft_s": 5.0},
        "cold": {"ttft_s": 0.3, "cached_tokens": 0, "hit_tokens": 0, "reason": "spill", "replica": "gpu-2"},
        "wrong": {"ttft_s": 0.4, "cached_tokens": 100},
        "broken": {"ttft_s": None, "status": None, "group": "", "prompt_tokens": None, "cached_tokens": None},
    }
    pool = Pool.objects.get(name="chat")
    Replica.objects.create(pool=pool, name="gpu-2", url="http://10.0.0.2:8000")
    for seq, (name, changes) in enumerate(create.items()):
        decided(router, noon - timedelta(seconds=9 - seq), seq, request_id=name, **changes)

    assert ids(visitor.get(f"/requests/?{query}").text) == expected


def test_a_list_by_a_figure_reads_no_more_than_its_bound_and_says_since_when(visitor, router, noon, monkeypatch):
    monkeypatch.setattr(service, "MAX_RANKED", 10)
    for one in decided_in_a_row(router, noon, 30):
        type(one).objects.filter(seq=one.seq).update(ttft_s=30 - one.seq)

    text = visitor.get("/requests/?order=slowest").text

    assert ids(text)[0] == "req-19"
    assert "Choose a shorter range" in text


def test_a_decision_is_explained_with_candidates_prediction_and_what_was_delivered(visitor, router, noon):
    before, one, after = decided_in_a_row(router, noon, 3)
    type(one).objects.filter(seq=1).update(candidates=CANDIDATES, prompt_structure=STRUCTURE, cached_tokens=300)

    text = visitor.get(f"/requests/{place_of(one)}/").text

    assert re.search(r'Sent to <a href="[^"]+">gpu-1</a>', text)
    assert "had cached part of the prompt" in text
    assert "300 of 1,000 prompt tokens came from the cache, 500 fewer than predicted" in text
    assert text.index("gpu-1</a> <span") < text.index("gpu-2")
    assert "1,010" in text
    assert "date at 41" in text
    assert place_of(before) in text
    assert place_of(after) in text


def test_a_missing_value_is_reported_as_such_and_never_shown_as_0(visitor, router, noon):
    one = decided(
        router, noon, 1, status=None, ttft_s=None, prompt_tokens=None, cached_tokens=None, hit_tokens=None, prefix=None
    )

    text = visitor.get(f"/requests/{place_of(one)}/").text

    assert "it is not known whether the cache was used" in text
    assert "not reported" in text
    assert "No candidates stored" in text
    assert "0 %" not in text


def test_requests_of_other_projects_do_not_exist(visitor, router, noon, client, django_user_model):
    mine = create_project("mine")
    create_pool("own", project=mine, models=["own"])
    theirs = decided(router, noon - timedelta(seconds=2), 1)
    own = decided(router, noon - timedelta(seconds=1), 2, pool="own")
    user = django_user_model.objects.create_user("vera")
    set_role(user, Role.VIEWER, mine)
    client.force_login(user)

    assert ids(client.get("/requests/").text) == ["req-2"]
    assert client.get(f"/requests/{place_of(own)}/").status_code == 200
    assert client.get(f"/requests/{place_of(theirs)}/").status_code == 404


def test_an_empty_list_says_why(visitor, router):
    assert "No placement decisions collected yet" in visitor.get("/requests/").text


def test_an_invalid_place_is_not_found(visitor, router):
    for text in ("x", "1-2-3-b", "9999999999999999-1-1-b"):
        assert visitor.get(f"/requests/{text}/").status_code == 404
        assert visitor.get(f"/requests/?cursor={text}").status_code == 200


# --- live --------------------------------------------------------------------------------------------


def test_new_requests_appear_without_a_reload_while_the_newest_are_shown(visitor, router, noon):
    decided_in_a_row(router, noon, 2)
    page = visitor.get("/requests/?range=1h&outcome=ok").text
    part = re.search(r'<div id="requests" ([^>]+)>', page)[1]
    assert 'hx-get="/requests/?range=1h&amp;outcome=ok"' in part
    assert 'data-refresh="5"' in part
    assert "aria-live" not in part
    assert "data-pause" in page
    decided(router, noon, 99, request_id="newest")
    refreshed = visitor.get("/requests/?range=1h", headers={"HX-Request": "true"}).text
    assert ids(refreshed)[0] == "newest"
    assert "<form" not in refreshed
    rows = re.findall(r'<tr id="(r[^"]+)"', refreshed)
    assert len(set(rows)) == 3


@pytest.mark.parametrize("query", ["order=slowest", "from=2026-01-01T00:00&to=2026-01-01T01:00"])
def test_other_orders_and_fixed_ranges_stand_still(visitor, router, query):
    assert 'data-refresh="0"' in visitor.get(f"/requests/?{query}").text


def test_every_part_of_a_row_is_a_link(visitor, router, noon):
    decided(router, noon, 1, request_id="88e73a53563b1b93-27-one-of-many", pool="chat", group="agents", replica="gpu-1")
    page = visitor.get("/requests/?range=1h&cursor=").text
    assert '<bdi dir="ltr">88e73a53563b1b93-27-one-of-many</bdi>' in page  # the whole id can be copied
    for query in ("range=1h&amp;pool=chat&amp;group=agents", "range=1h&amp;replica=gpu-1", "reason="):
        assert query in page


def test_the_parts_of_a_decision_lead_to_their_pages(visitor, router, noon):
    failed = [{"replica": "gpu-2", "tokens": 312}]
    row = decided(router, noon, 1, pool="chat", policy="chat", prefix=-5, replica="gpu-1", continued_after=failed)
    decided(router, noon, 2, prefix=7, request_id="another prefix")
    text = visitor.get(f"/requests/{place_of(row)}/").text
    policy = Pool.objects.get(name="chat").policies.get(group=None)
    links = re.findall(r'<a href="([^"]+)"', text)
    by_prefix = "/requests/?pool=chat&amp;prefix=fffffffffffffffb&amp;range=24h"
    pages = (f"/policies/{policy.pk}/", f"/routers/{router.pk}/", "/replicas/gpu-1/", "/replicas/gpu-2/", by_prefix)
    assert "The stream was continued on gpu-1: " in text
    assert "failed after 312 tokens" in text
    last = decided(router, noon, 3, pool="chat", replica="gpu-2", request_id="the last", continued_after=failed)
    assert "no other replica was used" in visitor.get(f"/requests/{place_of(last)}/").text
    assert set(pages) <= set(links), links
    listed = visitor.get(by_prefix.replace("&amp;", "&")).text
    assert ids(listed) == [row.request_id]
