"""Live parts are small whatever the size of the fleet, and are shared by those who may see the same, with no others."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import time_machine
from django.test import Client
from django.utils import timezone

from controlplane.models import Replica, Role, Router
from controlplane.services.access.users import set_role
from controlplane.services.fleet.pools import create_pool, create_project
from controlplane.services.fleet.replicas import add_replica
from telemetry.models import Reading, ScrapeState
from telemetry.services.figures import overview as figures
from telemetry.storage import sums
from telemetry.web.pages import SharedContent
from tests.fleet_history import warm_fleet
from tests.telemetry.web.conftest import NOW

DEADLINE_S = 30
KEY = "key"


def content(text):
    return text.encode(), "text/html", 200


class Computation:
    """Computes when it is released; counts how often it was started."""

    def __init__(self, *, fails=False):
        self.started, self.released, self.fails = [], threading.Event(), fails
        self.entered = threading.Event()

    def __call__(self):
        self.started.append(threading.current_thread().name)
        self.entered.set()
        assert self.released.wait(DEADLINE_S)
        if self.fails and len(self.started) == 1:
            raise ZeroDivisionError
        return content("computed")


def test_twenty_requests_at_once_cost_one_computation():
    shared, computation = SharedContent(), Computation()
    with ThreadPoolExecutor(20) as tabs:
        results = [tabs.submit(shared.get, KEY, computation, 60) for _ in range(20)]
        assert computation.entered.wait(DEADLINE_S)
        computation.released.set()
        assert {result.result(DEADLINE_S) for result in results} == {content("computed")}

    assert len(computation.started) == 1
    assert shared.get("another key", lambda: content("another"), 60) == content("another")


def test_after_a_failure_those_who_waited_compute_on_their_own_and_nothing_is_kept():
    shared, computation = SharedContent(), Computation(fails=True)
    with ThreadPoolExecutor(5) as tabs:
        first = tabs.submit(shared.get, KEY, computation, 60)
        assert computation.entered.wait(DEADLINE_S)
        others = [tabs.submit(shared.get, KEY, computation, 60) for _ in range(4)]
        computation.released.set()
        with pytest.raises(ZeroDivisionError):
            first.result(DEADLINE_S)
        assert {other.result(DEADLINE_S) for other in others} == {content("computed")}


def test_a_computation_that_hangs_delays_the_others_only_for_a_while():
    shared, hanging = SharedContent(max_wait_s=0.05), Computation()
    with ThreadPoolExecutor(1) as tabs:
        first = tabs.submit(shared.get, KEY, hanging, 60)
        assert hanging.entered.wait(DEADLINE_S)
        assert shared.get(KEY, lambda: content("own"), 60) == content("own")
        hanging.released.set()
        first.result(DEADLINE_S)


def test_content_is_kept_for_a_while_and_for_a_limited_number_of_keys():
    shared = SharedContent(max_items=2)
    assert shared.get("a", lambda: content("1"), 60) == content("1")
    assert shared.get("a", lambda: content("2"), 60) == content("1")
    shared.get("b", lambda: content("1"), 60)
    assert shared.get("c", lambda: content("1"), 60) == content("1")
    assert shared.get("c", lambda: content("2"), 60) == content("2")
    brief = SharedContent()
    assert [brief.get("a", lambda n=n: content(n), 0) for n in "12"] == [content("1"), content("2")]


@pytest.fixture
def signed_in(db, django_user_model):
    """A function that returns the browser of a new user with a role in a project."""

    def sign_in(name, role, project):
        user = django_user_model.objects.create_user(name)
        set_role(user, role, project)
        client = Client()
        client.force_login(user)
        return client

    return sign_in


@pytest.fixture
def computed(monkeypatch, settings):
    """The pools of each computation, with live parts that stay fresh."""
    settings.LIVE_PARTS_FRESH_S = 60
    monkeypatch.setattr("telemetry.web.pages._live_parts", SharedContent())
    pools, original = [], figures.fleet_tiles
    monkeypatch.setattr(
        "telemetry.web.views.overview.fleet_tiles",
        lambda fleet, window: pools.append(fleet.subject.pools) or original(fleet, window),
    )
    return pools


def test_readers_of_different_projects_and_roles_never_share_a_live_part(signed_in, computed):
    projects = [create_project(name) for name in ("red", "blue")]
    for project in projects:
        pool = create_pool(f"pool-{project.name}", project=project, models=[project.name])
        add_replica(pool, name=f"gpu-{project.name}", url=f"http://gpu-{project.name}:8000")
    Router.objects.create(name="router-1", admin_url="http://127.0.0.1:9000", last_seen_at=timezone.now())
    red, again, blue, editor = (
        signed_in("rosa", Role.VIEWER, projects[0]),
        signed_in("rudi", Role.VIEWER, projects[0]),
        signed_in("bert", Role.VIEWER, projects[1]),
        signed_in("edda", Role.EDITOR, None),
    )
    for _ in range(2):
        texts = [browser.get("/live/").text for browser in (red, again, blue, editor)]
        assert [["gpu-red" in text, "gpu-blue" in text] for text in texts] == [
            [True, False], [True, False], [False, True], [True, True],
        ]  # fmt: skip
        texts = [browser.get("/status/").text for browser in (red, again, blue, editor)]
        assert ["No notification channel" in text for text in texts] == [True] * 4
        assert ["/channels/new/" in text for text in texts] == [False, False, False, True]
    assert len(computed) == 3

    assert blue.get("/pools/pool-red/").status_code == 404
    texts = [browser.get("/live/?pool=pool-red").text for browser in (blue, red, blue)]
    assert ["gpu-red" in text for text in texts] == [False, True, False]
    red.get("/live/?page=2")
    assert len(computed) == 6  # another query is another part


def test_a_role_that_is_taken_away_is_effective_at_once(signed_in, computed, django_user_model):
    project = create_project("red")
    add_replica(create_pool("pool-red", project=project, models=["red"]), name="gpu-red", url="http://gpu-red:8000")
    browser = signed_in("rosa", Role.VIEWER, project)
    assert "gpu-red" in browser.get("/live/").text

    set_role(django_user_model.objects.get(username="rosa"), None, project)

    assert "gpu-red" not in browser.get("/live/").text


@pytest.fixture(scope="module")
def stored_fleet(once_for_module):
    with time_machine.travel(NOW, tick=False):
        return once_for_module(partial(warm_fleet, NOW, seconds=60, replicas=70))


@pytest.fixture
def many(visitor, stored_fleet):
    """A fleet of 70 replicas: one is down, one is disabled, and gpu-7 has the lowest hit rate."""
    ScrapeState.objects.filter(replica__name="gpu-60").update(health="down", failures=3, reason="connection refused")
    Replica.objects.filter(name="gpu-1").update(state="disabled")
    Reading.objects.filter(replica=Replica.objects.get(name="gpu-7")).update(hits=0)


def shown(text):
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def names_of(text):
    return re.findall(r'<tr id="replica-([^"]+)">', text)


def test_a_large_fleet_is_shown_in_pages_with_the_worst_replicas_first(visitor, many):
    pages = [visitor.get(f"/?page={number}").text for number in (1, 2)]

    names = [names_of(text) for text in pages]
    assert [len(found) for found in names] == [50, 20]
    assert names[0][:2] == ["gpu-60", "gpu-7"]
    assert names[1][-1] == "gpu-1"
    assert len({name for found in names for name in found}) == 70
    assert "1 to 50 of 70 replicas, the worst first" in shown(pages[0])
    assert 'href="?page=2#replicas"' in pages[0]
    assert [f'rel="{rel}"' in text for text in pages for rel in ("prev", "next")] == [False, True, True, False]
    assert names_of(visitor.get("/?page=99").text) == names[1]
    assert names_of(visitor.get("/?page=x").text) == names[0]
    # Whatever is on the page, the tiles are of the whole fleet.
    assert "<small>of 69 replicas</small>" in pages[1]
    assert re.search(r"gpu-60</a> down</strong>", pages[1])


def test_the_table_of_a_large_fleet_is_sorted_and_filtered_by_the_url(visitor, many):
    text = visitor.get("/?range=5m&sort=-name&page=2").text
    assert names_of(text) == sorted((f"gpu-{n}" for n in range(1, 71)), reverse=True)[50:]
    assert 'href="?range=5m&amp;sort=name"' in text  # begins at the first page again
    assert '<input type="hidden" name="sort" value="-name">' in text

    text = visitor.get("/?find=GPU-1").text
    assert names_of(text) == ["gpu-1", *(f"gpu-1{n}" for n in range(10))]
    assert "1 to 11 of 11 that match, 70 in all" in shown(text)
    assert 'value="GPU-1"' in text
    assert names_of(visitor.get("/?health=down").text) == ["gpu-60"]
    assert len(names_of(visitor.get("/?health=nonsense").text)) == 50
    text = visitor.get("/live/?find=none").text
    assert names_of(text) == []
    assert "No replica matches this filter" in text
    assert 'hx-get="/live/?find=gpu-1&amp;page=2"' in visitor.get("/?find=gpu-1&page=2").text


def test_ttft_sorts_the_whole_fleet_and_is_queried_for_the_rows_of_a_page(visitor, many, monkeypatch):
    queried, original = [], sums.engine_ttft
    monkeypatch.setattr(
        sums, "engine_ttft", lambda ids, *rest, **kw: queried.append(len(ids)) or original(ids, *rest, **kw)
    )

    def p95_s(text):
        cells = re.findall(r'data-label="TTFT p95">([\d.]+) (m?)s</td>', text)
        return [float(value) / (1000 if milli else 1) for value, milli in cells if value]

    slowest = p95_s(visitor.get("/?sort=-ttft_p95_s").text)
    assert len(slowest) >= 50
    assert slowest[:50] == sorted(slowest[:50], reverse=True)
    rest = p95_s(visitor.get("/?sort=-ttft_p95_s&page=2").text)
    assert max(rest[:19]) <= slowest[49]
    assert queried == [70, 70]
    assert len(p95_s(visitor.get("/").text)) >= 50
    assert queried == [70, 70, 50]


def test_the_live_part_of_a_large_fleet_is_small(visitor, many, django_assert_num_queries):
    visitor.get("/live/")
    with django_assert_num_queries(33):
        text = visitor.get("/live/").text

    rows = text[text.index('id="replicas"') : text.index('id="groups"')]
    assert len(rows) < 50 * 1_100
    assert len(text) < 75_000
    compressed = visitor.get("/live/", headers={"Accept-Encoding": "gzip"})
    assert len(compressed.content) < 9_000
    assert visitor.get("/live/", headers={"If-None-Match": compressed["ETag"]}).status_code == 304
