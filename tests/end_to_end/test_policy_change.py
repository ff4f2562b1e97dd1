"""In the browser: change a policy, give a reason, publish, see each router acknowledge."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from controlplane.models import ConfigSnapshot, Router
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.policies.rollouts import advance_rollouts
from controlplane.services.routers import announce, record_ack
from tests.end_to_end.keyboard import tab_to


@pytest.fixture
def policy(site, operator):
    pool = create_pool("chat", by=operator)
    add_replica(pool, name="gpu-1", url="http://10.0.0.1:8000", by=operator)
    announce(name="router-1", boot="b1", admin_url="http://10.0.1.1:8081")
    return pool.policies.get(group=None)


def acknowledge() -> None:
    newest = ConfigSnapshot.objects.defer("encrypted").first()
    record_ack(Router.objects.get().pk, number=newest.number, sha256=newest.sha256)
    advance_rollouts()


def test_with_the_keyboard_alone(site, policy, complaints):
    page = site.open()
    complaints.listen(page)
    page.goto("/")
    page.keyboard.type("gp")
    page.wait_for_url("**/policies/")
    tab_to(page, "Edit")
    page.keyboard.press("Enter")
    page.wait_for_url("**/edit/")
    tab_to(page, "prefix_hash")
    page.keyboard.press("Enter")
    page.wait_for_url("**strategy=prefix_hash")
    tab_to(page, "Slack")
    page.keyboard.press("Control+a")
    page.keyboard.type("1.5")
    expect(page.locator("#check")).to_contain_text("slack s1.5")
    tab_to(page, "Save draft")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/policies/\d+/$"))
    tab_to(page, "Reason")
    page.keyboard.type("Agents share a prompt")
    tab_to(page, "By share of prefixes")  # it is preselected, because nothing was predicted
    page.keyboard.press("ArrowUp")
    tab_to(page, "Publish revision 2")
    page.keyboard.press("Enter")

    expect(page.get_by_role("status").first).to_contain_text("Revision 2 is active")
    assert policy.live().settings["slack_s"] == 1.5
    rollout = page.locator("#rollout")
    expect(rollout).to_contain_text("0 of 1")
    acknowledge()
    for shown in ("1 of 1", "acknowledged", "complete"):  # without a reload
        expect(rollout).to_contain_text(shown)
    page.reload()

    tab_to(page, "Roll back to revision 1")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/revert/1/$"))
    tab_to(page, "Reason")
    page.keyboard.type("TTFT doubled")
    tab_to(page, "Roll back to revision 1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Active: lowest_cost")).to_be_visible()


def test_without_scripts(site, policy):
    page = site.open(java_script_enabled=False)
    page.goto("/policies/")
    page.get_by_role("link", name="Edit policy chat").click()
    page.get_by_role("link", name="prefix_hash").click()
    page.get_by_label("Slack").fill("-1")
    page.get_by_role("button", name="Save draft").click()
    expect(page.locator("#id_slack_s_error", has_text="at least 0.0")).to_be_visible()
    page.get_by_label("Slack").fill("1.5")
    page.get_by_role("button", name="Save draft").click()
    page.get_by_label("Reason").fill("Warm prompts")
    page.get_by_label("All at once").check()
    page.get_by_role("button", name="Publish revision 2").click()
    expect(page.get_by_text("Revision 2 is active")).to_be_visible()
    page.get_by_role("link", name="Roll back to revision 1, lowest_cost").click()
    page.get_by_label("Reason").fill("TTFT doubled")
    page.get_by_role("button", name="Roll back to revision 1").click()

    expect(page.get_by_role("heading", name="Active: lowest_cost")).to_be_visible()
    expect(page.get_by_text("Back to revision 1: TTFT doubled").first).to_be_visible()
