import re

import pytest

from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollout_plans import make_plan
from controlplane.services.policies.rollouts import abort_rollout


@pytest.fixture
def history(policy, operator):
    """Three published revisions, and a draft."""
    for factor in (1.5, 2.5):
        settings = {"strategy": "prefix_hash", "slack_s": factor}
        publish_revision(save_draft(policy, settings, by=operator).pk, by=operator, reason=f"factor {factor}")
    save_draft(policy, {"strategy": "least_load"}, by=operator)
    return policy


def path(policy, rest):
    return f"/policies/{policy.pk}/{rest}"


def test_the_history_costs_the_same_whatever_its_length(visitor, history, django_assert_num_queries):
    with django_assert_num_queries(8):
        text = visitor.get(path(history, "revisions/")).text

    assert text.count('name="from"') == 4
    assert "factor 2.5" in text


def test_filters_stand_in_the_address_and_mean_what_they_mean_over_rest(visitor, history, api_client):
    for query, numbers in (("state=retired", [2, 1]), ("strategy=prefix_hash", [3, 2]), ("author=olga", [4, 3, 2])):
        text = visitor.get(path(history, f"revisions/?{query}")).text
        assert [number for number in (4, 3, 2, 1) if f">r{number} " in text] == numbers, query
        rest = api_client.get(f"/api/v1/revisions?policy=default&{query}").json()["results"]
        assert [row["number"] for row in rest] == numbers, query
    assert "No matching revision" in visitor.get(path(history, "revisions/?author=nobody")).text
    assert visitor.get(path(history, "revisions/?author=a%00b")).status_code == 400


@pytest.fixture
def api_client(visitor):
    return visitor


def test_older_ones_are_a_plain_link_away(visitor, policy):
    for number in range(30):
        publish_revision(save_draft(policy, {"strategy": "prefix_hash", "boundary_bytes": number + 64}).pk)

    first = visitor.get(path(policy, "revisions/")).text
    older = visitor.get(path(policy, "revisions/") + first[first.index("?before=") :].split('"')[0]).text

    assert ">r31 " in first
    assert ">r7 " in first
    assert ">r6 " not in first
    assert ">r6 " in older
    assert ">r7 " not in older


def test_any_two_are_compared_by_their_numbers(visitor, history):
    text = visitor.get(path(history, "compare/?from=2&to=3")).text

    assert "Revision 2 compared with 3" in text
    assert "<del>1.5</del>" in text
    assert "<ins>2.5</ins>" in text
    assert "slack_s is 2.5 instead of 1.5 seconds." in text
    assert "?from=3&amp;to=2" in text  # the other way round


def test_the_active_revision_and_the_one_before_are_offered(visitor, history):
    text = visitor.get(path(history, "compare/")).text
    assert re.findall(r'<option value="(\d+)" selected>', text) == ["2", "3"]


@pytest.mark.parametrize(("query", "status"), [("", 200), ("?from=2&to=99", 404), ("?from=x&to=2", 200)])
def test_a_comparison_of_what_is_not_there(visitor, history, query, status):
    assert visitor.get(path(history, f"compare/{query}")).status_code == status


def test_a_rollback_first_shows_its_effects(visitor, history):
    text = visitor.get(path(history, "revert/1/")).text

    assert "placed by round_robin instead of prefix_hash" in text
    assert "The draft of olga is kept" in text
    assert history.live().number == 3


def test_a_rollback_needs_a_reason_which_a_link_may_fill_in(visitor, history):
    assert 'value="Alert 7: slow"' in visitor.get(path(history, "revert/1/?reason=Alert%207:%20slow")).text
    assert visitor.post(path(history, "revert/1/"), {"reason": "", "live": 3}).status_code == 422
    assert history.live().number == 3

    answer = visitor.post(path(history, "revert/1/"), {"reason": "slow", "live": 3}, follow=True)

    assert "Revision 4 has the settings of revision 1" in answer.text
    assert (history.live().strategy, history.live().reason) == ("round_robin", "Back to revision 1: slow")


def test_a_revision_that_an_alert_named_is_marked_not_offered_and_asked_about_once_more(visitor, history):
    history.revisions.filter(number=2).update(fault="alert", fault_alert=7)
    page = visitor.get(path(history, "")).text
    assert "Roll back to revision 1, round_robin</a>" in page
    for text in (page, visitor.get(path(history, "revisions/")).text):
        assert '<a class="badge bad" href="/alerts/7/"' in text
        assert "caused alert 7</a>" in text

    assert '/revert/2/">Publish again<' in page
    assert '/revert/1/">Roll back<' in page

    answers = {"reason": "again", "live": 3}
    refused = visitor.post(path(history, "revert/2/"), answers)
    assert refused.status_code == 422
    assert "Confirm that these settings are to be published again." in refused.text
    assert "was named by alert 7 as the most likely cause" in refused.text
    assert history.live().number == 3

    answer = visitor.post(path(history, "revert/2/"), answers | {"confirm_faulted": "on"}, follow=True)
    assert "Revision 4 has the settings of revision 2. It is being sent to the routers." in answer.text


def test_a_canary_is_aborted_and_afterwards_no_way_back(visitor, history):
    rollout = publish_revision(history.draft().pk, plan=make_plan(history, "by_share"))
    for rest in ("", "revisions/"):
        text = visitor.get(path(history, rest)).text
        assert f'href="/rollouts/{rollout.pk}/abort/">Abort canary<' in text
        assert "/revert/4/" not in text
    abort_rollout(rollout.pk, by=None)
    assert '/revert/4/">Publish again<' in visitor.get(path(history, "")).text


def test_a_draft_with_the_settings_of_a_named_revision_needs_the_confirmation_too(visitor, history):
    draft = save_draft(history, {"strategy": "round_robin"})
    history.revisions.filter(number=1).update(fault="alert", fault_alert=7)
    publish = path(history, f"publish/{draft.pk}/")
    assert visitor.post(publish, {"reason": "again"}).status_code == 422
    assert history.live().number == 3
    assert visitor.post(publish, {"reason": "again", "confirm_faulted": "on"}).status_code == 302
    assert history.live().number == draft.number


def test_a_rollback_to_a_draft_or_an_unknown_revision_is_not_found(visitor, history):
    assert visitor.get(path(history, "revert/4/")).status_code == 404
    assert visitor.get(path(history, "revert/9/")).status_code == 404
