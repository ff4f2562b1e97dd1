"""The what-if pages: the form, the list, progress, figures, charts and files."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from controlplane.models import Pool, Role
from controlplane.services.access.users import set_role
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import create_policy, publish_revision, save_draft
from controlplane.services.policies.settings import canonical_settings
from routing.schema import RoundRobinSettings
from telemetry.models import Decision, WhatIf, WhatIfState
from telemetry.services.lab import what_if_runs
from telemetry.services.lab.what_ifs import create_what_if, what_ifs_of_settings
from tests.telemetry.services.lab.what_if_world import add_fleet, publish_and_store, traffic
from tests.telemetry.what_if_results import finished_what_if, predict_draft, stored_candidate

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


def test_the_charts_are_drawn_by_the_server_with_a_line_for_each_replayed_candidate(browser, done):
    page = browser.get(f"/what-if/{done.pk}/").content.decode()
    for title in ("Hit rate", "TTFT p50"):
        chart = page[page.index(f'aria-label="{title} over the captured traffic"') :].partition("</section>")[0]
        names = re.findall(r"</svg> ([^<]+)</li>", chart)
        assert names == ["Measured", "Active policy, replayed", "lowest_cost"]
        assert len(set(re.findall(r'<polyline stroke="(#\w+)"', chart))) == 3
    assert "plotly" not in page


def shown_names(page):
    """The first cells of the table of candidates."""
    table = page[page.index("Figures of the candidates, best first") :].partition("</table>")[0]
    return [
        re.sub(r"<[^>]+>", " ", cell).split() for cell in re.findall(r'<th scope="row">(.*?)</th>', table, re.DOTALL)
    ]


def ranked(pool, *candidates):
    """A finished what-if of candidates: (name, hit rate, TTFT in seconds, verdict)."""
    what_if = finished_what_if(pool, timezone.now())
    active = what_if.result["candidates"][0]
    what_if.candidates = [{"name": name, "settings": {"strategy": "tiered"}} for name, *_ in candidates]
    what_if.result["candidates"] = [active, *(candidate(*row) for row in candidates)]
    what_if.save()
    return what_if


def candidate(name, hit_rate, ttft_s, verdict):
    row = stored_candidate(name, timezone.now(), hit_rate, ttft_s, verdict)
    row["difference"]["ttft_p50"] = {"value": ttft_s / 0.6 - 1, "low": ttft_s / 0.6 - 1.1, "high": ttft_s / 0.6 - 0.9}
    return row


def test_candidates_are_listed_best_first_and_the_best_is_named(browser, replicas):
    rows = [
        ("bad", 0.3, 0.9, "worse"),
        ("good", 0.7, 0.3, "better"),
        ("mixed", 0.9, 0.9, "mixed"),
        ("top", 0.8, 0.2, "better"),
    ]
    page = browser.get(f"/what-if/{ranked(replicas, *rows).pk}/").content.decode()
    names = shown_names(page)
    assert [name[0] for name in names] == ["Measured", "Active", "top", "good", "mixed", "bad"]
    assert [name for name in names if "best" in name] == [["top", "best"]]
    assert "Best: top</h2>" in page


def test_without_a_better_candidate_none_is_the_best_and_a_small_difference_is_none(browser, replicas):
    same = ranked(replicas, ("tiered", 0.45, 0.6, "same"))
    page = browser.get(f"/what-if/{same.pk}/").content.decode()
    assert "No candidate is better than the active policy" in page
    assert not any("best" in name for name in shown_names(page))
    assert "no difference" in page
    assert not re.search(r"[-+]0 (points|%)", page)


def test_the_active_policy_is_the_yardstick_and_no_candidate(browser, replicas):
    what_if = ranked(replicas, ("round_robin again", 0.45, 0.6, "same"), ("random", 0.4, 0.7, "worse"))
    what_if.candidates[0]["settings"] = {"strategy": "round_robin"}
    what_if.result["candidates"][0] |= {
        "strategy": "round_robin",
        "settings": canonical_settings({"strategy": "round_robin"}),
    }
    what_if.save()
    assert [name[0] for name in shown_names(browser.get(f"/what-if/{what_if.pk}/").content.decode())] == [
        "Measured", "Active", "random",
    ]  # fmt: skip


def test_the_form_neither_offers_nor_replays_the_active_policy(browser, replicas):
    policy = replicas.policies.get(group=None)
    publish_revision(save_draft(policy, {"strategy": "lowest_cost"}).pk)
    page = browser.get("/what-if/").content.decode()
    assert not re.findall(r'value="(\w+)"[^>]*checked', page)
    assert re.findall(r">(\w+): [^<]*\(the active policy: always replayed\)</label>", page) == ["lowest_cost"]
    page = browser.get("/what-if/?strategies=prefix_hash").content.decode()
    assert re.findall(r'value="(\w+)"[^>]*checked', page) == ["prefix_hash"]
    response = browser.post("/what-if/", {**FORM, "strategies": ["lowest_cost"]})
    assert response.status_code == 422
    page = response.content.decode()
    assert 'role="alert"' in page.partition('<form method="post" class="panel')[0]
    assert "This is the active policy, which is always replayed." in page
    assert re.findall(r'value="(\w+)"[^>]*checked', page) == ["lowest_cost"]  # it stays usable
    browser.post("/what-if/", {**FORM, "strategies": ["lowest_cost", "random"]})
    assert [row["name"] for row in WhatIf.objects.get().candidates] == ["random"]


def test_a_candidate_becomes_the_draft_of_its_policy(browser, replicas):
    what_if = ranked(replicas, ("tiered", 0.8, 0.2, "better"))
    policy = replicas.policies.get(group=None)
    earlier = save_draft(policy, {"strategy": "random"})
    page = browser.get(f"/what-if/{what_if.pk}/").content.decode()
    assert f"replaces draft {earlier.number}" in page
    (action,) = re.findall(r'action="([^"]+/drafts/0/)"', page)
    seen = re.search(r'name="draft" value="(\w+)"', page)[1]
    save_draft(policy, {"strategy": "round_robin"})
    assert "was changed after" in browser.post(action, {"draft": seen}, follow=True).content.decode()
    response = browser.post(action, {"draft": policy.draft().digest})
    assert response["Location"] == f"/policies/{policy.pk}/"
    draft = policy.draft()
    assert draft.settings["strategy"] == "tiered"
    assert draft.reason == f"What-if {what_if.pk}: tiered: hit rate +35 to +39 points"
    assert "Is the draft" in browser.get(f"/what-if/{what_if.pk}/").content.decode()


def test_a_number_of_replicas_cannot_become_a_draft(browser, replicas):
    what_if = ranked(replicas, ("5 replicas", 0.8, 0.2, "better"))
    what_if.candidates = [{"name": "5 replicas", "replicas": 5}]
    what_if.save()
    assert "Make this the draft" not in browser.get(f"/what-if/{what_if.pk}/").content.decode()
    for number in (0, 7):
        page = browser.post(f"/what-if/{what_if.pk}/drafts/{number}/", follow=True).content.decode()
        assert "expected a candidate with the settings of one policy" in page
    assert replicas.policies.get(group=None).draft() is None


def test_only_editors_make_drafts(client, replicas, django_user_model):
    what_if = ranked(replicas, ("tiered", 0.8, 0.2, "better"))
    operator = django_user_model.objects.create_user("otto", password="a long enough one")
    set_role(operator, Role.OPERATOR, project=replicas.project)
    client.force_login(operator)
    assert "Make this the draft" not in client.get(f"/what-if/{what_if.pk}/").content.decode()
    assert client.post(f"/what-if/{what_if.pk}/drafts/0/").status_code == 403


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


def test_the_figures_of_a_draft_are_shown_although_ttft_is_not_calibrated(browser, replicas):
    policy = replicas.policies.get(group=None)
    what_if = predict_draft(save_draft(policy, {"strategy": "lowest_cost"}), hit_rate=(-0.06, 0.01))
    what_if.result["calibration"] |= {"is_calibrated": False, "problems": ["TTFT p50: a difference of 50 %."]}
    what_if.save()
    panel = browser.get(f"/what-if/drafts/{policy.pk}/").content.decode()
    assert "no verdict.</strong> TTFT p50: a difference of 50 %.</p>" in panel
    assert '<span class="figure">39.0 %</span>' in panel
    assert "computed <time" in panel


def test_a_draft_of_a_task_group_is_predicted_for_that_group(browser, replicas):
    group = create_task_group(replicas, "g0")
    policy = create_policy(replicas, group)
    draft = save_draft(policy, {"strategy": "random"})
    browser.post(f"/what-if/drafts/{policy.pk}/")
    (candidate,) = WhatIf.objects.get().candidates
    assert candidate["groups"] == {"g0": draft.settings}
