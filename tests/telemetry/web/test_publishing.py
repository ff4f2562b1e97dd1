"""The policy's page in a pool that requires, advises or omits predictions, and the rollout's page."""

from __future__ import annotations

import pytest
from django.test import Client

from controlplane.models import RoleAssignment, Rollout
from controlplane.services.fleet.pools import update_pool
from controlplane.services.policies.lifecycle import save_draft
from tests.telemetry.what_if_results import predict_draft

pytestmark = pytest.mark.django_db


@pytest.fixture
def draft(pool):
    update_pool(pool, what_if={"mode": "require"})
    pool.refresh_from_db()
    return save_draft(pool.policies.select_related("pool").get(), {"strategy": "tiered"})


@pytest.fixture
def browser_of(django_user_model):
    """Browsers of users with a role in all projects."""

    def make(role: str) -> Client:
        user = django_user_model.objects.create_user(role)
        RoleAssignment.objects.create(user=user, role=role)
        client = Client()
        client.force_login(user)
        return client

    return make


def page_of(draft) -> str:
    return f"/policies/{draft.policy_id}/"


def publish(browser, draft, **fields):
    url = f"{page_of(draft)}publish/{draft.pk}/"
    return browser.post(url, {"reason": "a try", "digest": draft.digest, **fields})


def test_a_refusal_shows_the_figures_beside_the_button_and_keeps_the_form(browser_of, draft):
    predict_draft(draft, hit_rate=(-0.12, 0.02))
    browser = browser_of("approver")
    response = publish(browser, draft)
    assert response.status_code == 409
    text = response.content.decode()
    for part in ("Not published. Nothing was changed.", "33.0 %", "-12 points", "override_reason", 'value="a try"'):
        assert part in text, part
    assert text.index('id="finding"') < text.index("Publish revision 2")
    assert not Rollout.objects.exists()


def test_a_reason_publishes_and_the_rollout_shows_it(browser_of, draft):
    browser = browser_of("approver")
    assert "No what-if of exactly these settings" in browser.get(page_of(draft)).content.decode()
    assert publish(browser, draft, override_reason="no traffic yet").status_code == 302
    rollout = Rollout.objects.get()
    page = browser.get(f"/rollouts/{rollout.pk}/").content.decode()
    assert "Published against the required prediction" in page
    assert "no traffic yet" in page


def test_the_field_for_a_reason_is_shown_only_to_those_who_may_publish(browser_of, draft):
    for role, is_shown in (("editor", False), ("approver", True)):
        browser = browser_of(role)
        assert ("override_reason" in browser.get(page_of(draft)).content.decode()) is is_shown
        assert ("override_reason" in browser.get(f"/what-if/drafts/{draft.policy_id}/").content.decode()) is is_shown
    assert publish(browser_of("operator"), draft, override_reason="please").status_code == 403


def test_the_panel_replaces_what_stands_beside_the_button_when_a_prediction_ends(browser_of, draft):
    browser, panel = browser_of("approver"), f"/what-if/drafts/{draft.policy_id}/"
    assert 'hx-swap-oob="true"' in browser.get(panel).content.decode()
    predict_draft(draft)
    text = browser.get(panel).content.decode()
    assert 'id="finding"' in text
    assert "override_reason" not in text


def test_advice_is_a_warning_and_publishing_works(browser_of, draft):
    update_pool(draft.policy.pool, what_if={"mode": "advise"})
    predict_draft(draft, hit_rate=(-0.12, 0.02))
    browser = browser_of("approver")
    text = browser.get(page_of(draft)).content.decode()
    assert "Predicted to be worse." in text
    assert "override_reason" not in text
    assert publish(browser, draft).status_code == 302
    assert Rollout.objects.exists()


def test_without_predictions_there_is_neither_panel_nor_check(browser_of, draft):
    update_pool(draft.policy.pool, what_if={"mode": "off"})
    predict_draft(draft, hit_rate=(-0.12, 0.02))
    browser = browser_of("approver")
    text = browser.get(page_of(draft)).content.decode()
    assert "/what-if/drafts/" not in text
    assert "Predicted to be worse" not in text
    assert publish(browser, draft).status_code == 302


def test_the_requirement_is_edited_on_the_pools_page_by_approvers(browser_of, draft):
    url, change = f"/fleet/pools/{draft.policy.pool_id}/", {"what_if-mode": "advise", "what_if-max_age_s": "3600"}
    refused = browser_of("editor").post(url, change)
    assert refused.status_code == 422
    assert "approver" in refused.content.decode()
    assert browser_of("approver").post(url, change).status_code == 302
    draft.policy.pool.refresh_from_db()
    assert (draft.policy.pool.what_if["mode"], draft.policy.pool.what_if["max_age_s"]) == ("advise", 3600)
