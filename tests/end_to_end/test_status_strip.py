"""In the browser: the status strip appears by itself, rolls a bad publication back, and says when contact is lost."""

from __future__ import annotations

import re

import pytest
from django.utils import timezone
from playwright.sync_api import expect

from controlplane.models import Pool
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from telemetry.models import Alert
from tests.fleet_history import drop_alert, warm_fleet

OUTSIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


def publish_badly(pool: Pool, by) -> None:
    """A firing alert that names the active revision."""
    policy = pool.policies.get(group=None)
    bad = publish_revision(save_draft(policy, {"strategy": "random"}).pk, by=by, reason="a try").revision
    alert = drop_alert(pool, timezone.now())
    evidence = {"policy": policy.name, "revision": bad.number, "strategy": "random", "author": "olga"}
    alert.causes = [{"kind": "revision", "confidence": 0.9, "summary": "S.", "advice": "A.", "evidence": evidence}]
    alert.save()


@pytest.mark.parametrize("width", [1440, 390])
def test_a_bad_publication_is_rolled_back_with_two_clicks_and_a_reason(site, operator, width, complaints):
    pool = warm_fleet(timezone.now(), seconds=60, replicas=2, by=operator)
    page = site.open(viewport={"width": width, "height": 844})
    complaints.listen(page)
    page.goto("/fleet/")
    remedy = page.get_by_role("link", name="Roll back to r2, prefix_hash")
    expect(remedy).to_have_count(0)

    publish_badly(pool, operator)

    expect(remedy).to_be_visible()  # without a reload
    box = remedy.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert box["y"] + box["height"] <= 844
    assert page.evaluate(OUTSIDE) <= 0
    remedy.click()
    assert page.get_by_label("Reason").input_value().startswith("Alert ")
    expect(remedy).to_be_hidden()  # it leads here
    page.get_by_role("button", name="Roll back to revision 2").click()
    expect(page.get_by_text("Revision 4 has the settings of revision 2")).to_be_visible()
    assert pool.policies.get(group=None).live().strategy == "prefix_hash"
    expect(remedy).to_have_count(0)


def test_a_page_without_a_live_part_says_that_contact_is_lost_and_back(site, operator):
    page = site.open(viewport={"width": 390, "height": 844})
    page.goto("/task-groups/")
    page.context.set_offline(True)
    expect(page.locator("#contact")).to_contain_text("Control plane unreachable")
    page.context.set_offline(False)
    expect(page.locator("#contact")).to_be_hidden()


def test_the_browser_notifies_of_each_alert_once_and_of_none_that_was_on_the_page(site, operator):
    pool = warm_fleet(timezone.now(), seconds=60, replicas=2, by=operator)
    page = site.open(permissions=["notifications"])
    page.add_init_script("""window.Notification = class {
        static permission = "granted";
        static requestPermission = async () => "granted";
        constructor(title, { body }) { document.documentElement.dataset.told = body; }
    };""")
    told = page.locator("html[data-told]")
    page.goto("/alerts/")
    page.get_by_role("button", name="Notify in this browser").click()
    expect(page.get_by_role("button", name="Stop notifying here")).to_be_visible()
    expect(told).to_have_count(0)

    publish_badly(pool, operator)

    expect(told).to_have_attribute("data-told", re.compile("Hit rate"))
    page.reload()
    expect(page.locator("#worst-alert")).to_be_visible()
    expect(told).to_have_count(0)  # it was told before the reload


def test_evidence_that_was_opened_stays_open_when_the_page_refreshes(site, operator):
    pool = warm_fleet(timezone.now(), seconds=60, replicas=2, by=operator)
    publish_badly(pool, operator)
    page = site.open()
    page.goto(f"/alerts/{Alert.objects.get().pk}/")
    page.get_by_text("What this kind of alert means").click()
    meaning = page.locator("details", has_text="What this kind of alert means")
    expect(meaning).to_have_attribute("open", "")
    Alert.objects.update(causes=[{**Alert.objects.get().causes[0], "summary": "Another cause."}])
    page.evaluate("document.getElementById('alert-live').dispatchEvent(new CustomEvent('refresh'))")
    expect(page.get_by_text("Another cause.").first).to_be_visible()
    expect(meaning).to_have_attribute("open", "")
