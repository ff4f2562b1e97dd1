"""Every form that failed says so in the title and in a summary that has the focus and links each field."""

import re

import pytest

from controlplane.services.policies.lifecycle import publish_revision, save_draft

SUMMARY = re.compile(
    r'<div class="message error" id="errors" role="alert" tabindex="-1" autofocus>(.*?)</div></div>', re.DOTALL
)


def problems(answer):
    """(link, text) of each error in the page's only summary."""
    (summary,) = SUMMARY.findall(answer.text)
    assert "<title>Error: " in answer.text
    items = re.findall(r'<li>(?:<a href="#([^"]*)">)?(.*?)(?:</a>)?</li>', summary)
    for link, _ in items:
        assert not link or f'id="{link}"' in answer.text
    return items


FORMS = {
    "/fleet/pools/new/": {"name": "Big Name"},
    "/fleet/pools/{pool}/replicas/new/": {"name": "r2", "url": "ftp://x"},
    "/alerts/silences/new/": {"comment": ""},
    "/channels/new/?kind=webhook": {"name": "x", "url": "nowhere"},
    "/client-keys/": {"name": ""},
    "/tokens/": {"name": ""},
    "/users/new/": {"username": ""},
}


@pytest.mark.parametrize(("path", "body"), FORMS.items())
def test_a_failed_form_has_a_summary_with_links(visitor, pool, path, body):
    path = path.format(pool=pool.pk)
    assert "<title>Error" not in visitor.get(path).text
    found = problems(visitor.post(path, body))
    assert found
    assert any(link for link, _ in found)


def test_the_errors_of_a_publication_are_linked_though_its_form_is_far_down(visitor, policy):
    draft = save_draft(policy, {"strategy": "random"})
    answer = visitor.post(f"/policies/{policy.pk}/publish/{draft.pk}/", {"plan": "by_share", "shares": "many"})
    assert ("id_reason", "Reason: This field is required.") in problems(answer)
    assert ("id_shares", "Canary shares: Expected numbers separated by commas, such as 5, 25.") in problems(answer)


def test_an_error_of_no_field_is_in_the_summary_too(visitor, policy):
    publish_revision(save_draft(policy, {"strategy": "random"}).pk)
    body = {"reason": "slow", "live": 1}
    ((link, text),) = problems(visitor.post(f"/policies/{policy.pk}/revert/1/", body))
    assert (link, "no longer active" in text) == ("", True)


def test_a_wrong_password_is_announced(client, operator):
    ((link, text),) = problems(client.post("/accounts/login/", {"login": "olga", "password": "wrong"}))
    assert (link, bool(text)) == ("", True)


def test_an_action_that_failed_is_announced_and_a_success_is_not_an_error(visitor, policy):
    draft = save_draft(policy, {"strategy": "random"})
    for title, has_alert in (("<title>Policy default", False), ("<title>Error: Policy default", True)):
        answer = visitor.post(f"/policies/{policy.pk}/discard/", follow=True)
        assert title in answer.text
        assert ('<span role="alert" tabindex="-1" autofocus><strong>Error:' in answer.text) is has_alert
    assert not policy.revisions.filter(pk=draft.pk).exists()
