import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.models import ConfigSnapshot, RoutingPolicy
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.impact import Effect
from controlplane.services.policies.lifecycle import create_policy, publish_revision, save_draft
from controlplane.services.policies.rollouts import advance_rollouts
from controlplane.services.policies.settings import policy_catalogue, strategy_document
from controlplane.services.routers import announce, record_ack, record_nack
from controlplane.web.views import policies as views


@pytest.fixture
def routers(policy):
    return [
        announce(name=f"router-{number}", boot="b", admin_url=f"http://10.0.1.{number}:8081") for number in range(3)
    ]


def path(policy: RoutingPolicy, rest: str = "") -> str:
    return f"/policies/{policy.pk}/{rest}"


def test_the_list_shows_every_pool_and_group_in_a_fixed_number_of_queries(visitor, pool, django_assert_num_queries):
    for name in ("coding", "batch", "search"):
        group = create_task_group(pool, name)
    save_draft(create_policy(pool, group), {"strategy": "least_load"})

    with django_assert_num_queries(9):
        answer = visitor.get("/policies/")

    assert "Whole pool" in answer.text
    assert "Task group coding" in answer.text
    assert answer.text.count("uses the pool's policy") == 3


def test_an_empty_list_says_the_next_step(visitor):
    assert "Add pool" in visitor.get("/policies/").text


def test_the_page_shows_what_runs_with_its_settings(visitor, policy):
    publish_revision(save_draft(policy, {"strategy": "prefix_hash", "slack_s": 1.5}).pk, reason="warm prompts")

    text = visitor.get(path(policy)).text

    assert "Active: prefix_hash" in text
    assert "Sends requests that share a system prompt to the same replica." in text
    assert f'href="{path(policy, "revert/1/")}">Roll back to revision 1, round_robin</a>' in text
    assert "<strong>1.5</strong>" in text
    assert "warm prompts" in text


def test_saving_writes_a_draft_and_shows_what_it_would_change(visitor, policy, operator):
    answer = visitor.post(path(policy, "edit/?strategy=prefix_hash"), {"slack_s": "1.5", "based_on": 1}, follow=True)

    draft = policy.draft()
    assert (draft.settings["slack_s"], draft.author) == (1.5, operator)
    assert "<del>round_robin</del>" in answer.text
    assert "<ins>prefix_hash</ins>" in answer.text
    assert policy.live().strategy == "round_robin"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("slack_s", "-1", "Expected a number of at least 0.0."),
        ("slack_s", "much", "Expected a number."),
        ("boundary_bytes", "0", "Expected a whole number of at least 64."),
        ("boundary", "nowhere", "Invalid enum value"),
    ],
)
def test_a_setting_that_a_router_would_refuse_is_refused_beside_its_field(visitor, policy, field, value, words):
    answer = visitor.post(path(policy, "edit/?strategy=prefix_hash"), {field: value})

    assert answer.status_code == 422
    assert f'id="id_{field}_error">{words}' in answer.text
    assert 'aria-invalid="true"' in answer.text
    assert policy.draft() is None


def test_the_check_previews_the_diff_and_writes_nothing(visitor, policy):
    answer = visitor.post(path(policy, "check/?strategy=prefix_hash"), {"slack_s": "3"})

    assert "<ins>3</ins>" in answer.text
    assert policy.draft() is None


def test_publishing_makes_the_draft_live_with_the_reason(visitor, policy, operator):
    draft = save_draft(policy, {"strategy": "prefix_hash"})

    answer = visitor.post(path(policy, f"publish/{draft.pk}/"), {"reason": "warm", "digest": draft.digest}, follow=True)

    assert "Revision 2 is active and is being sent" in answer.text
    live = policy.live()
    assert (live.number, live.reason) == (2, "warm")


def test_publishing_a_draft_that_was_edited_meanwhile_is_refused(visitor, policy):
    draft = save_draft(policy, {"strategy": "prefix_hash"})
    seen = draft.digest
    save_draft(policy, {"strategy": "least_load"})

    answer = visitor.post(path(policy, f"publish/{draft.pk}/"), {"reason": "warm", "digest": seen}, follow=True)

    assert "was edited since you opened it" in answer.text
    assert policy.live().number == 1


def test_each_router_shows_its_answer_and_its_reason(visitor, policy, routers):
    newest = ConfigSnapshot.objects.first()
    record_ack(routers[0].pk, number=newest.number, sha256=newest.sha256)
    record_nack(routers[1].pk, number=newest.number, path="$.pools[0]", reason="no such thing", running_number=None)
    advance_rollouts()

    text = visitor.get(path(policy, "rollout/")).text

    assert "1 of 3" in text
    assert "acknowledged" in text
    assert "no such thing (at $.pools[0])" in text
    assert "pending" in text


def test_a_group_gets_a_policy_of_its_own_and_loses_it_again(visitor, pool):
    group = create_task_group(pool, "coding")

    answer = visitor.post(f"/task-groups/{group.pk}/policy/")

    policy = RoutingPolicy.objects.get(group=group)
    assert answer["Location"] == path(policy, "edit/")
    assert "The pool&#x27;s policy then applies" in visitor.get(path(policy, "remove/")).text
    visitor.post(path(policy, "remove/"))
    assert not RoutingPolicy.objects.filter(group=group).exists()


def test_a_policys_page_costs_the_same_whatever_its_history(visitor, policy, routers):
    def queries():
        with CaptureQueriesContext(connection) as asked:
            visitor.get(path(policy))
        return len(asked)

    publish_revision(save_draft(policy, {"strategy": "random"}).pk)
    save_draft(policy, {"strategy": "least_load"})
    few = queries()
    for factor in (1.1, 1.2, 1.3, 1.4):
        publish_revision(save_draft(policy, {"strategy": "prefix_hash", "slack_s": factor}).pk)
    save_draft(policy, {"strategy": "least_load"})

    assert queries() == few
    assert few < 22


def test_a_draft_shows_its_effects_before_its_settings(visitor, policy):
    save_draft(policy, {"strategy": "prefix_hash"})

    text = visitor.get(path(policy)).text

    assert "Requests of pool default are placed by prefix_hash instead of round_robin" in text
    assert "cold caches" in text


def test_likely_mistakes_are_shown_before_publishing(visitor, policy):
    check = visitor.post(path(policy, "check/?strategy=prefix_hash"), {"slack_s": "1"}).text
    save_draft(policy, {"strategy": "prefix_hash"})

    for text in (check, visitor.get(path(policy)).text):
        assert "Pool default has no active replica." in text
        assert "Not affected:" in text


def test_a_conflict_shows_the_other_users_changes_and_keeps_the_form(visitor, policy, operator):
    publish_revision(save_draft(policy, {"strategy": "least_load"}, by=operator).pk, by=operator, reason="uneven load")
    edit = path(policy, "edit/?strategy=prefix_hash")

    answer = visitor.post(edit, {"based_on": 1, "slack_s": "1.75"})

    assert answer.status_code == 422
    assert "olga published revision 2" in answer.text
    assert "uneven load" in answer.text
    assert "<ins>least_load</ins>" in answer.text
    assert 'name="slack_s" value="1.75"' in answer.text
    assert 'name="based_on" value="2"' in answer.text
    assert policy.draft() is None
    assert visitor.post(edit, {"based_on": 2, "slack_s": "1.75"}).status_code == 302
    assert policy.draft().settings["slack_s"] == 1.75


@pytest.mark.parametrize("strategy", [info.name for info in policy_catalogue()])
def test_every_strategy_says_when_to_use_it_in_its_documents_words(visitor, policy, strategy):
    text = visitor.get(path(policy, f"edit/?strategy={strategy}")).text

    assert "and when to use it" in text
    assert strategy_document(strategy).when_to_use[0][:20].replace("`", "") in text.replace("<code>", "").replace(
        "</code>", ""
    )


def test_a_change_that_moves_most_prefixes_is_preselected_to_be_gradual(visitor, policy, monkeypatch):
    draft = save_draft(policy, {"strategy": "random"})
    chosen = 'value="{}" checked'
    with monkeypatch.context() as patched:
        patched.setattr(views, "doubt_about", lambda _: None)  # predicted to be clearly better
        text = visitor.get(path(policy, "")).text
        assert chosen.format("all_at_once") in text
        assert "The prediction is clearly better." in text
    text = visitor.get(path(policy, "")).text
    assert chosen.format("by_share") in text
    assert "not clearly better: No what-if of exactly these settings has been run." in text
    effect = Effect("strategy", "cold_caches", ("pool default",), "All of them.", moved_ratio=0.75)
    monkeypatch.setattr(views, "effects_of_settings", lambda *_, **__: [effect])
    assert "because the change moves 75 % of the prefixes" in visitor.get(path(policy, "")).text
    visitor.post(path(policy, f"publish/{draft.pk}/"), {"reason": "no plan", "digest": draft.digest})
    assert policy.live().number == draft.number  # a script that names no plan publishes as before


def test_choosing_a_strategy_shows_what_follows_before_any_edit(visitor, policy):
    text = visitor.get(path(policy, "edit/?strategy=prefix_hash")).text
    assert "placed by prefix_hash instead of round_robin" in text
    assert "Pool default has no active replica." in text
    assert "Reset to default" not in text


def test_a_setting_is_marked_where_it_differs_from_its_default_and_from_the_active_revision(visitor, policy):
    publish_revision(save_draft(policy, {"strategy": "prefix_hash", "slack_s": 1.5}).pk)
    edit = path(policy, "edit/?strategy=prefix_hash")
    reset = 'name="reset" value="slack_s" formnovalidate>Reset to default, 0.06<'
    text = visitor.get(edit).text
    assert reset in text
    assert "active: 1.5" not in text
    checked = visitor.post(path(policy, "check/?strategy=prefix_hash"), {"slack_s": "2"}).text
    assert '<div class="help" id="marks-slack_s" hx-swap-oob="outerMorph">' in checked
    assert "active: 1.5" in checked
    form = {"slack_s": "2", "boundary_bytes": "128", "based_on": 2, "reset": "slack_s"}
    text = visitor.post(edit, form).text
    assert "active: 1.5" in text
    assert reset not in text
    assert re.search(r'name="slack_s"[^>]* autofocus', text)
    assert 'name="boundary_bytes" value="128"' in text
    assert policy.draft() is None
