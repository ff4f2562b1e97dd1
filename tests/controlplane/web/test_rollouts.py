"""Pages of rollouts: publishing by a plan, watching it, and moving it."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.models import Role, Rollout
from controlplane.services.access.users import set_role
from controlplane.services.fleet.pools import update_project
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import create_policy, publish_revision, save_draft
from controlplane.services.policies.rollout_transitions import TRANSITIONS
from controlplane.services.policies.rollouts import MAX_PAST_READINGS
from controlplane.services.routers import LOST_AFTER_S, mark_lost_routers, record_unreachable
from controlplane.web.tags import transition_words
from tests.controlplane.rollouts import (
    FAILED,
    FORMER,
    INCONCLUSIVE,
    NEXT,
    READING,
    ack,
    nack,
    publish_stages,
    start_routers,
    state,
    verdict,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stored_pool")]


def publish(visitor, policy, **body):
    draft = save_draft(policy, NEXT)
    return visitor.post(f"/policies/{policy.pk}/publish/{draft.pk}/", {"reason": "warm", **body}, follow=True)


def page(visitor, rollout):
    return visitor.get(f"/rollouts/{rollout.pk}/").text


def test_the_history_of_a_rollout_is_in_the_past_tense(visitor, policy):
    words = [transition_words(name) for name in ("publish", *(transition.name for transition in TRANSITIONS))]
    assert all(re.match(r"\w+ed\b|Put on|Active on", text) for text in words), words

    publish(visitor, policy)

    assert "<strong>Published</strong>: warm" in page(visitor, Rollout.objects.get())


# --- publishing --------------------------------------------------------------------------------------


def test_the_draft_offers_its_plans_with_limits_ranges_and_defaults(visitor, policy):
    save_draft(policy, NEXT)
    text = visitor.get(f"/policies/{policy.pk}/").text
    for words in ("All at once", "By share of prefixes", "Router by router", "Task group by task group"):
        assert words in text
    assert 'value="by_share" checked' in text
    assert 'value="5, 25"' in text
    assert "hit rate" in text
    assert "default 0.05" in text
    assert 'placeholder="0.05"' in text
    assert "Maximum TTFT p95 growth" in text


def test_a_first_revision_is_offered_at_once_alone_and_a_group_no_groups(visitor, pool):
    own = create_policy(pool, create_task_group(pool, "chat"))
    save_draft(own, NEXT)
    assert "By share of prefixes" not in visitor.get(f"/policies/{own.pk}/").text
    publish_revision(own.draft().pk)
    save_draft(own, FORMER)
    text = visitor.get(f"/policies/{own.pk}/").text
    assert "By share of prefixes" in text
    assert "Task group by task group" not in text


def test_publishing_by_share_leads_to_its_rollout(visitor, policy):
    fields = {
        "plan": "by_share",
        "shares": "1, 10 %",
        "observe_min": "2.5",
        "guarded": "on",
        "guard-min_requests": "50",
    }
    answer = publish(visitor, policy, **fields, **{"guard-max_error_ratio": "none"})
    rollout = Rollout.objects.get()
    assert answer.redirect_chain[-1][0] == f"/rollouts/{rollout.pk}/"
    assert [(stage["share"], stage["observe_s"]) for stage in rollout.stages] == [(0.01, 150), (0.1, 150), (1.0, 0)]
    assert (rollout.guard["min_requests"], rollout.guard["max_error_ratio"]) == (50, None)
    assert rollout.guard["max_hit_rate_drop"] == 0.05
    assert "runs as a canary" in answer.text


def test_a_rollout_without_the_check_box_is_not_analyzed(visitor, policy):
    answer = publish(visitor, policy, plan="by_share")
    assert Rollout.objects.get().guard is None
    assert "This rollout is not analyzed" in answer.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"plan": "by_share", "shares": "5; 25"}, "Expected numbers separated by commas"),
        ({"plan": "by_share", "shares": "25, 5"}, "of the stage before it, and more"),
        ({"plan": "by_share", "shares": "0"}, "&gt; 0"),
        ({"plan": "by_share", "observe_min": "-1"}, "greater than or equal to 0"),
        ({"plan": "by_share", "guarded": "on", "guard-max_error_ratio": "2"}, "of at most 1"),
        ({"plan": "by_router"}, "no router is connected"),
        ({"plan": "slowly"}, "Select a valid choice"),
    ],
)
def test_an_impossible_plan_is_rejected_on_the_page_and_nothing_is_published(visitor, policy, fields, words):
    answer = publish(visitor, policy, **fields)
    assert answer.status_code == 422
    assert words in answer.text
    assert policy.draft() is not None


def test_what_needs_approval_says_so_before_and_after(visitor, policy, operator, django_user_model):
    update_project(policy.pool.project, needs_approval=True)
    save_draft(policy, NEXT)
    assert "A second user in project" in visitor.get(f"/policies/{policy.pk}/").text
    answer = publish(visitor, policy)
    rollout = Rollout.objects.get()
    assert "waits for the approval of a second user" in answer.text
    assert "You published this revision, so another user must approve it." in answer.text
    assert "Canary not started" in answer.text

    refused = visitor.post(f"/rollouts/{rollout.pk}/approve/", {"reason": ""}, follow=True)
    assert "You published this revision" in refused.text
    ada = django_user_model.objects.create_user("ada")
    set_role(ada, Role.APPROVER, None)
    visitor.force_login(ada)
    assert f"/rollouts/{rollout.pk}/approve/" in page(visitor, rollout)
    visitor.post(f"/rollouts/{rollout.pk}/approve/", {"reason": "read it"})
    assert policy.live().number == 2


# --- watching ----------------------------------------------------------------------------------------


def test_the_page_shows_stages_routers_and_steps(visitor, policy):
    routers = start_routers("router-1", "router-2")
    ack()
    rollout = publish_stages(policy, [{"routers": ["router-1"]}], reason="warmer")
    ack(routers[0])
    text = page(visitor, rollout)
    assert "Canary: every request on router router-1" in text
    assert "1 of 2 acknowledged" in text
    assert "not in this step" in text
    assert "Waiting for 1 of 2 routers to acknowledge." in text
    assert 'aria-current="step"' in text
    assert "warmer" in text
    assert "round_robin, places all other requests" in text
    assert 'data-refresh="2"' in text


def test_a_refresh_is_the_live_part_alone(visitor, policy):
    rollout = publish_stages(policy)
    part = visitor.get(f"/rollouts/{rollout.pk}/", headers={"HX-Request": "true"}).text
    assert "<html" not in part
    assert "Steps" in part


def test_readings_stand_beside_their_limits_with_their_verdicts(visitor, policy, time_machine_at):
    start_routers("router-1")
    ack()
    rollout = publish_stages(policy, guard={})
    assert "when every router runs it" in page(visitor, rollout)
    ack()
    assert "Caches warm up first: the analysis starts after 2 min." in page(visitor, rollout)
    time_machine_at(600)
    ttft = {"name": "ttft_p95_s", "unit": "seconds", "baseline": 0.31, "canary": 1.24, "limit": 0.39}
    verdict(rollout, "inconclusive", [*INCONCLUSIVE, {**ttft, "verdict": "passed", "detail": "as before"}])
    text = page(visitor, rollout)
    for words in ("60.0 %", "5.0 %", "310 ms", "1.24 s", "inconclusive", "passed", "12 of 200 requests so far."):
        assert words in text
    assert "<strong>On hold:</strong> 12 of 200 requests so far." in text


def test_a_rollback_says_why_and_keeps_its_evidence(visitor, policy):
    start_routers("router-1")
    ack()
    rollout = publish_stages(policy, guard={})
    verdict(rollout, "failed", FAILED)
    text = page(visitor, rollout)
    assert "<strong>Rolled back automatically:</strong> A hit rate of 41.0 % compared with 60.0 %." in text
    assert '<span class="badge bad">failed</span>' in text
    assert "Rolled back" in text
    assert 'data-refresh="0"' in text


def test_a_refusal_is_shown_with_its_router_and_reason(visitor, policy):
    (router,) = start_routers("router-1")
    ack()
    rollout = publish_stages(policy)
    nack(router)
    text = page(visitor, rollout)
    assert "Router router-1 rejects it: $.pools[0]: no room" in text
    assert "no room (at $.pools[0])" in text


def test_without_a_router_it_says_what_it_waits_for(visitor, policy, time_machine_at):
    rollout = publish_stages(policy)
    assert "No router is connected" in page(visitor, rollout)
    (router,) = start_routers("router-1")
    record_unreachable(router.pk, number=rollout.snapshot.number, reason="ReadTimeout: timed out")
    assert "Not acknowledged yet, retrying. Last attempt: ReadTimeout" in page(visitor, rollout)
    time_machine_at(LOST_AFTER_S + 1)
    mark_lost_routers()
    assert "No router is connected" in page(visitor, rollout)


def test_the_list_shows_what_is_under_way_and_what_ended_in_a_fixed_number_of_queries(
    visitor, pool, policy, django_assert_num_queries
):
    assert "No rollout in progress" in visitor.get("/rollouts/").text
    for _ in range(3):
        publish_stages(policy)
    with django_assert_num_queries(6):
        text = visitor.get("/rollouts/").text
    assert text.count("default r") == 3
    assert text.count("superseded") == 2


def test_a_rollouts_page_costs_the_same_whatever_happened_to_it(visitor, policy, operator, django_assert_num_queries):
    from controlplane.services.policies.rollouts import pause_rollout, resume_rollout

    start_routers(*[f"router-{number}" for number in range(6)])
    ack()
    rollout = publish_stages(policy)
    ack()
    for _ in range(4):
        pause_rollout(rollout.pk, by=operator)
        resume_rollout(rollout.pk, by=operator)
    with django_assert_num_queries(10):
        page(visitor, rollout)


# --- transitions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transition", "text", "after"),
    [
        ("pause", "keeps its current share until somebody resumes", "paused"),
        ("promote", "Next step: 25 % of prefixes.", "progressing"),
        ("abort", "The active revision places all requests again", "aborted"),
    ],
)
def test_a_transition_is_explained_before_it_is_confirmed(visitor, policy, transition, text, after):
    start_routers("router-1")
    ack()
    rollout = publish_stages(policy)
    ack()
    assert f"/rollouts/{rollout.pk}/{transition}/" in page(visitor, rollout)
    assert text in visitor.get(f"/rollouts/{rollout.pk}/{transition}/").text
    assert state(rollout)[0] == "progressing"
    visitor.post(f"/rollouts/{rollout.pk}/{transition}/", {"reason": "because"}, follow=True)
    assert state(rollout)[0] == after
    step = rollout.history.last()
    assert (step.transition, step.by.username, step.reason) == (transition, "olga", "because")


def test_a_late_transition_changes_nothing(visitor, policy):
    rollout = publish_stages(policy)
    visitor.post(f"/rollouts/{rollout.pk}/abort/", {"reason": ""})
    answer = visitor.post(f"/rollouts/{rollout.pk}/promote/", {"reason": ""}, follow=True)
    assert "Nothing was changed" in answer.text
    assert f"/rollouts/{rollout.pk}/abort/" not in answer.text


def test_operators_can_pause_and_abort_but_not_promote(client, policy, django_user_model):
    start_routers("router-1")
    ack()
    rollout = publish_stages(policy)
    ack()
    pat = django_user_model.objects.create_user("pat")
    set_role(pat, Role.OPERATOR, None)
    client.force_login(pat)
    text = client.get(f"/rollouts/{rollout.pk}/").text
    assert f"/rollouts/{rollout.pk}/abort/" in text
    assert f"/rollouts/{rollout.pk}/promote/" not in text


def test_an_admin_has_publications_of_a_project_wait_for_a_second_user(visitor, pool):
    assert "Require approval" in visitor.get("/users/").text
    answer = visitor.post(f"/projects/{pool.project_id}/approval/", follow=True)
    pool.project.refresh_from_db()
    assert (pool.project.needs_approval, "second user" in answer.text) == (True, True)
    visitor.post(f"/projects/{pool.project_id}/approval/")
    pool.project.refresh_from_db()
    assert not pool.project.needs_approval


# --- analysis ----------------------------------------------------------------------------------------

COUNTED = {"canary_requests": 59, "baseline_requests": 240, "bins": 2}
EARLY = [{**READING, "verdict": "inconclusive", "detail": "The canary has 59 of at least 100 requests.", **COUNTED}]


def outlook(visitor, rollout):
    found = re.search(r'<p id="outlook">(.*?)</p>', page(visitor, rollout))
    return re.sub(r"<[^>]+>", "", found[1]) if found else ""


@pytest.fixture
def clock(time_machine):
    """Moves the clock, which stands still, to some seconds after the start of the test."""
    start = timezone.now()

    def move(after_s):
        time_machine.move_to(start + timedelta(seconds=after_s), tick=False)

    move(0)
    return move


@pytest.fixture
def analyzed(policy, clock):
    """A canary for ten minutes that every router runs; its warm-up is over after two."""
    start_routers("router-1")
    ack()
    rollout = publish_stages(policy, [{"share": 0.5, "observe_s": 600}], guard={})
    ack()
    return rollout


def test_the_page_says_what_a_verdict_needs_and_when_it_can_come(visitor, analyzed, clock):
    clock(60)
    assert "A verdict needs 3 time bins of 1 min" in outlook(visitor, analyzed)
    assert "possible in 5 min at the earliest" in outlook(visitor, analyzed)
    clock(250)  # two bins since the warm-up
    verdict(analyzed, "inconclusive", EARLY)
    clock(260)
    text = outlook(visitor, analyzed)
    assert "Missing for a verdict: 41 more requests of the canary." in text
    assert "A verdict is possible in about 2 min, at the present rate." in text
    assert "Next result in 50 s." in text


def test_no_time_is_given_where_none_is_known(visitor, analyzed, clock):
    clock(250)
    verdict(analyzed, "inconclusive", [{**EARLY[0], "canary_requests": 0}])
    assert "100 more requests of the canary. None has come since the warm-up, so no time" in outlook(visitor, analyzed)
    clock(500)
    enough = {"canary_requests": 200, "baseline_requests": 240, "bins": 6}
    verdict(analyzed, "inconclusive", [{**EARLY[0], **enough, "detail": "close"}])
    text = outlook(visitor, analyzed)
    assert "Hit rate: the difference is not certain yet." in text
    assert "no time can be given" in text
    verdict(analyzed, "failed", FAILED)
    assert outlook(visitor, analyzed) == ""


@pytest.mark.parametrize("fault", ["", "alert"])
def test_a_canary_past_a_limit_or_named_by_an_alert_is_first_of_all_aborted(visitor, analyzed, clock, fault):
    assert f'<a class="button primary" href="/rollouts/{analyzed.pk}/promote/">' in page(visitor, analyzed)
    clock(250)
    limit = 0.3 if fault else 0.55
    analyzed.revision.policy.revisions.filter(state="canary").update(fault=fault, fault_alert=4 if fault else None)
    verdict(analyzed, "inconclusive", [{**EARLY[0], "limit": limit}])
    text = page(visitor, analyzed)
    assert f'<a class="button primary" href="/rollouts/{analyzed.pk}/abort/">' in text
    assert f'<a class="button" href="/rollouts/{analyzed.pk}/promote/">' in text
    assert "Charts are drawn from the second result on." in text  # a single point has no chart


def test_a_line_beyond_the_limit_is_not_said_to_be_rolled_back_while_the_result_is_inconclusive(visitor, analyzed):
    for _ in range(2):
        verdict(analyzed, "inconclusive", [{**EARLY[0], "limit": 0.55}])
    text = page(visitor, analyzed)
    assert "would be rolled back" not in text
    assert "beyond the limit" in text
    assert "rolled back when it is beyond a limit and certainly worse than before" in text


def test_the_axis_of_a_short_chart_has_seconds_and_no_label_beyond_its_end(visitor, analyzed, clock):
    for after_s in (250, 310, 370):
        clock(after_s)
        verdict(analyzed, "inconclusive", EARLY)
    ticks = re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="middle">([^<]+)<', page(visitor, analyzed))
    assert len({label for _, label in ticks}) == len(ticks) > 1
    assert max(float(x) for x, _ in ticks) < 775  # of 800


def test_each_figure_has_a_chart_of_both_sides_its_limit_and_its_table(visitor, analyzed, clock):
    for minute, (canary, limit) in enumerate(((0.5, 0.55), (0.45, 0.55), (0.41, 0.56)), start=4):
        clock(60 * minute)
        verdict(analyzed, "inconclusive", [{**EARLY[0], "canary": canary, "limit": limit}])
    text = page(visitor, analyzed)
    chart = text[text.index('<section class="stack" aria-label="Hit rate">') :].partition("</table>")[0]
    assert 'aria-label="Hit rate: canary 41.0 %, active 60.0 %, limit 56.0 %, inconclusive"' in chart
    lines = re.findall(r'<polyline [^>]*points="([^"]+)"', chart)
    assert [len(points.split()) for points in lines] == [3, 3, 3]  # the limit, the canary, the active revision
    assert re.search(r'<polygon class="fired" points="([^"]+)"', chart)[1].count(",") == 5
    rows = re.findall(r"<tr><th scope=\"row\">.*?</tr>", chart)
    assert ["41.0 %" in row for row in rows] == [True, False, False]


def test_a_rollout_keeps_a_bounded_number_of_results(analyzed):
    for number in range(MAX_PAST_READINGS + 1):
        verdict(analyzed, "inconclusive", [{**EARLY[0], "canary": number / 1000}])
    figures = [point["figures"][0]["canary"] for point in analyzed.past_readings]
    assert len(figures) == MAX_PAST_READINGS // 2 + 1
    assert figures[0] == 0.0
    assert figures[-1] == MAX_PAST_READINGS / 1000


def test_the_step_of_an_ended_rollout_says_how_long_it_ran(visitor, analyzed, clock):
    clock(196)
    verdict(analyzed, "failed", FAILED)
    text = " ".join(page(visitor, analyzed).split())
    assert '<span class="small">ended here after 3 min 16 s of 10 min</span>' in text
    assert '<span class="small">not reached</span>' in text
