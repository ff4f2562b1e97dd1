"""The what-if pages: the form, the list, progress, figures, charts and files."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from controlplane.models import Pool
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import create_policy, save_draft
from routing.schema import RoundRobinSettings
from telemetry.models import Decision, WhatIf, WhatIfState
from telemetry.services.lab import what_if_runs
from telemetry.services.lab.what_ifs import create_what_if, what_ifs_of_settings
from tests.telemetry.services.lab.what_if_world import add_fleet, publish_and_store, traffic

pytestmark = pytest.mark.django_db
FORM = {"pool": "chat", "window": "1800"}


@pytest.fixture
def browser(client, django_user_model):
    """A client that is signed in."""
    client.force_login(django_user_model.objects.create_user("ada", password="a long enough one", is_superuser=True))
    return client


@pytest.fixture(scope="module")
def predicted(once_for_module) -> int:
    """The id of a what-if that has run on four minutes of traffic."""
    return once_for_module(store_what_if)


def store_what_if() -> int:
    pool, start = add_fleet(create_pool("chat")), datetime.now(UTC) - timedelta(minutes=10)
    publish_and_store(pool, traffic(2, seconds=240), RoundRobinSettings(), start)
    candidates = [
        {"name": "lowest_cost", "settings": {"strategy": "lowest_cost"}},
        {"name": "tiny", "cache_tokens": 100},
    ]
    created = create_what_if(pool, candidates, start=start, end=start + timedelta(minutes=4))
    what_if_runs.run_queued()
    created.refresh_from_db()
    assert created.state == WhatIfState.DONE, created.reason
    return created.pk


@pytest.fixture
def done(browser, predicted) -> WhatIf:
    return WhatIf.objects.get(pk=predicted)


@pytest.fixture
def replicas(done) -> Pool:
    """The fleet with its traffic, without a what-if."""
    WhatIf.objects.all().delete()
    return done.pool


def test_the_form_queues_a_candidate_for_each_choice(browser, replicas):
    save_draft(replicas.policies.get(group=None), {"strategy": "tiered", "replicas": 3})
    response = browser.post(
        "/what-if/",
        {**FORM, "strategies": ["lowest_cost", "random"], "replicas": "3, 6", "caches": "64000", "draft": "on"},
    )
    created = WhatIf.objects.get()
    assert response["Location"] == f"/what-if/{created.pk}/"
    assert [candidate["name"] for candidate in created.candidates] == [
        "draft, revision 3",
        "lowest_cost",
        "random",
        "3 replicas",
        "6 replicas",
        "cache of 64000 tokens",
    ]
    assert created.candidates[0]["settings"]["replicas"] == 3


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "Choose 1 to 8 candidates"),
        ({"replicas": "three"}, "Enter whole numbers"),
        ({"replicas": "0"}, "from 1 to 200"),
        ({"draft": "on"}, "has no draft"),
        ({"strategies": ["magic"]}, "magic"),
    ],
)
def test_an_invalid_form_says_what_is_expected(browser, replicas, values, text):
    response = browser.post("/what-if/", {**FORM, **values})
    assert response.status_code == 422
    assert text in response.content.decode()
    assert not WhatIf.objects.exists()


def test_a_running_what_if_shows_its_progress_and_can_be_cancelled(browser, replicas):
    created = create_what_if(replicas, [{"name": "a", "replicas": 2}])
    WhatIf.objects.update(state=WhatIfState.RUNNING, progress_ratio=0.25)
    page = browser.get(f"/what-if/{created.pk}/").content.decode()
    assert "<h2" in page
    assert "Running" in page
    assert 'data-refresh="2"' in page
    assert browser.post(f"/what-if/{created.pk}/cancel/").status_code == 302
    assert WhatIf.objects.get().is_cancelled


def test_a_failed_what_if_shows_the_reason(browser, replicas):
    Decision.objects.all().delete()
    created = create_what_if(replicas, [{"name": "a", "replicas": 2}])
    what_if_runs.run_queued()
    assert "No requests were captured" in browser.get(f"/what-if/{created.pk}/").content.decode()


def test_the_page_shows_figures_verdicts_and_reasons(browser, done):
    page = browser.get(f"/what-if/{done.pk}/").content.decode()
    for text in ("Measured", "Active policy, replayed", "lowest_cost", "too small", "g0", "Prefill rate"):
        assert text in page, text
    assert "data-refresh" not in page.split('id="what-if"')[1].split(">")[0]
    listed = browser.get("/what-if/").content.decode()
    assert "lowest_cost, tiny" in listed


def test_the_charts_have_a_line_for_each_replayed_candidate(browser, done):
    for slug in ("hit-rate", "ttft"):
        figure = browser.get(f"/what-if/{done.pk}/figures/{slug}/").json()
        assert [line["name"] for line in figure["data"]] == ["Measured", "Active policy, replayed", "lowest_cost"]
    assert browser.get(f"/what-if/{done.pk}/figures/other/").status_code == 404


def test_the_page_links_the_result_and_the_trace_which_a_browser_session_may_read(browser, done):
    page = browser.get(f"/what-if/{done.pk}/").content.decode()
    result, trace = re.findall(r'href="(/api/v1/[^"]+)" download', page)
    assert browser.get(result).json()["result"]["candidates"][1]["name"] == "lowest_cost"
    response = browser.get(trace)
    assert "attachment" in response["Content-Disposition"]
    assert len(response.content.splitlines()) == done.result["replayed_requests"]


def test_a_draft_is_predicted_on_its_page(browser, replicas):
    policy = replicas.policies.get(group=None)
    url = f"/what-if/drafts/{policy.pk}/"
    assert browser.get(url).status_code == 204  # no draft

    draft = save_draft(policy, {"strategy": "lowest_cost"})
    assert "Not predicted yet" in browser.get(url).content.decode()
    assert "Queued" in browser.post(url).content.decode()
    what_if_runs.run_queued()
    panel = browser.get(url).content.decode()
    assert "points" in panel or "Not calibrated" in panel
    assert "Predict again" in panel
    what_if, _ = next(what_ifs_of_settings(draft))
    assert what_if.result["policies"] == {"chat": policy.live().digest}  # what publishing compares

    save_draft(policy, {"strategy": "lowest_cost", "alpha": 1.0})
    assert "Not predicted yet" in browser.get(url).content.decode()  # of other settings


def test_a_draft_of_a_task_group_is_predicted_for_that_group(browser, replicas):
    group = create_task_group(replicas, "g0")
    policy = create_policy(replicas, group)
    draft = save_draft(policy, {"strategy": "random"})
    browser.post(f"/what-if/drafts/{policy.pk}/")
    (candidate,) = WhatIf.objects.get().candidates
    assert candidate["groups"] == {"g0": draft.settings}
