"""Every page, light and dark, narrow and wide, empty and full: no axe violation, nothing sideways, no complaint."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.utils import timezone
from playwright.sync_api import expect

from controlplane.models import Router
from telemetry.services.notifications.channels import create_channel, disable_channel
from telemetry.services.notifications.channels import test_send as send_a_test
from telemetry.services.notifications.heartbeats import set_heartbeat
from telemetry.services.notifications.outbox import deliver_due
from tests.alert_history import alerts_of_every_state
from tests.fakes.fake_webhook_receiver import Reply, receiving
from tests.fleet_history import rollouts_of_every_kind

AXE = Axe().axe_script
RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "resultTypes": ["violations"],  # of what passes nobody asks for every element
}
EVERYWHERE = (
    "/",
    "/?range=1h&by=group",
    "/charts/hit-rate/?range=5m",
    "/prompts/",
    "/ladder/",
    "/ladder/?range=1h&group=coding",
    "/prefixes/",
    "/prefixes/?range=1h",
    "/requests/",
    "/requests/?range=1h&order=slowest",
    "/search/?q=gpu",
    "/pools/none/",
    "/alerts/",
    "/alerts/?kind=load_skew&after=yesterday",
    "/alerts/rules/new/?kind=ttft_objective",
    "/alerts/silences/",
    "/alerts/silences/new/",
    "/events/",
    "/events/?kind=replica_up&kind=replica_down&after=yesterday",
    "/channels/",
    "/channels/new/",
    "/channels/new/?kind=email",
    "/channels/new/?kind=alertmanager",
    "/channels/heartbeat/",
    "/deliveries/",
    "/deliveries/?state=failed",
    "/metrics-servers/",
    "/metrics-servers/new/",
    "/policies/",
    "/rollouts/",
    "/fleet/",
    "/fleet/pools/new/",
    "/routers/",
    "/configurations/",
    "/configurations/compare/",
    "/task-groups/",
    "/people/",
    "/people/new/",
    "/projects/new/",
    "/client-keys/",
    "/client-keys/admission/",
    "/fleet/limits/",
    "/tokens/",
    "/sessions/",
    "/audit/",
    "/accounts/password/change/",
    "/accounts/confirm/",
    "/accounts/second-factor/",
    "/accounts/second-factor/set-up/",
    "/accounts/logout/",
    "/no-such-page/",
)
VIEWS = [(width, theme) for width in (360, 1280) for theme in ("light", "dark")]
SIZES = {360: {"width": 360, "height": 740}, 1280: {"width": 1280, "height": 800}}


# Scripts that return what is wrong with a page's layout, or nothing.
LAYOUT = {
    "scrolls sideways": "document.documentElement.scrollWidth > document.documentElement.clientWidth",
    "table rows higher than five lines": "[...document.querySelectorAll('tbody tr')]"
    ".filter((row) => row.offsetHeight > 110).map((row) => row.innerText)",
    "the current page is out of sight in the strip": "[...document.querySelectorAll('nav [aria-current]')]"
    ".filter((link) => link.getBoundingClientRect().right > innerWidth).map((link) => link.innerText)",
}


def violations(page):
    """What axe finds: each rule, and up to three elements that break it."""
    page.evaluate(AXE)
    found = page.evaluate("rules => axe.run(document, rules).then(results => results.violations)", RULES)
    return [(violation["id"], [node["target"] for node in violation["nodes"]][:3]) for violation in found]


def look_at(page, paths, complaints):
    """Visit each page; what is wrong with it, by page."""
    found = {}
    complaints.listen(page)
    for path in paths:
        page.goto(path, wait_until="load")
        if page.locator("[data-chart]").count():
            expect(page.locator(".js-plotly-plot")).to_have_count(page.locator("[data-chart]").count())
        wrong = violations(page)
        wrong += [(name, seen) for name, script in LAYOUT.items() if (seen := page.evaluate(script))]
        if wrong:
            found[path] = wrong
    complaints.heard[:] = [text for text in complaints.heard if "404 (Not Found)" not in text]  # asked for above
    return found


@pytest.mark.parametrize(("width", "theme"), VIEWS)
def test_pages_of_an_empty_installation(site, complaints, width, theme):
    page = site.open(viewport=SIZES[width], theme=theme)

    assert look_at(page, EVERYWHERE, complaints) == {}


@pytest.mark.parametrize(("width", "theme"), VIEWS)
def test_pages_of_a_fleet_at_work(site, full, complaints, width, theme):
    policy, group, replica = full.policies.get(group=None), full.groups.first(), full.replicas.first()
    rule, router = full.alert_rules.first(), Router.objects.get()
    page = site.open(viewport=SIZES[width], theme=theme)
    of_rows = (
        "/pools/chat/",
        "/pools/chat/groups/coding/",
        "/pools/chat/groups/-/",
        f"/replicas/{replica.name}/",
        f"/policies/{policy.pk}/",
        f"/policies/{policy.pk}/edit/",
        f"/routers/{router.pk}/",
        f"/routers/{router.pk}/remove/",
        "/configurations/2/",
        "/configurations/compare/?from=1&to=2",
        f"/policies/{policy.pk}/revisions/",
        f"/policies/{policy.pk}/revisions/?state=retired",
        f"/policies/{policy.pk}/compare/?from=1&to=2",
        f"/policies/{policy.pk}/revert/1/",
        f"/task-groups/{group.pk}/",
        f"/task-groups/new/{full.pk}/",
        f"/fleet/replicas/{replica.pk}/state/draining/",
        f"/fleet/replicas/{replica.pk}/remove/",
        f"/fleet/pools/{full.pk}/replicas/new/",
        f"/fleet/pools/{full.pk}/",
        f"/fleet/replicas/{replica.pk}/",
        f"/fleet/pools/{full.pk}/sources/new/?kind=kubernetes",
        f"/fleet/sources/{full.sources.first().pk}/",
        f"/fleet/sources/{full.sources.first().pk}/remove/",
        f"/alerts/rules/{rule.pk}/",
        f"/people/{policy.draft().author_id}/",
    )

    assert look_at(page, EVERYWHERE + of_rows, complaints) == {}


@pytest.fixture
def receiver():
    with receiving() as server:
        yield server


@pytest.mark.parametrize(("width", "theme"), VIEWS)
def test_pages_of_channels_at_work(site, receiver, complaints, width, theme):
    hook = create_channel("on-call chat", config={"url": receiver.url}, matchers=["severity=critical,warning"])
    mail = {
        "recipients": "on-call@example.org, night-shift@example.org",
        "sender": "w@example.org",
        "host": "smtp.x.org",
    }
    other = create_channel("night shift", kind="email", config=mail)
    receiver.replies = [Reply(500, body=b"<html>no such thing: " + b"x" * 300), Reply(200, body=b"ok")]
    messages = [send_a_test(hook), send_a_test(hook), send_a_test(hook)]
    deliver_due()
    disable_channel(other, reason="a message was tried 10 times and never arrived", now=timezone.now())
    set_heartbeat(url=receiver.url, every_s=60)
    page = site.open(viewport=SIZES[width], theme=theme)
    paths = ("/channels/", f"/channels/{hook.pk}/", f"/channels/{other.pk}/", "/channels/heartbeat/", "/deliveries/")
    ends = (f"/channels/{hook.pk}/remove/", *(f"/deliveries/{one.pk}/" for one in messages))

    assert look_at(page, paths + ends, complaints) == {}


@pytest.mark.parametrize(("width", "theme"), VIEWS)
def test_pages_of_rollouts(site, full, complaints, width, theme):
    policy = full.policies.get(group=None)
    rollouts = rollouts_of_every_kind(policy, policy.draft().author)
    moves = [f"/rollouts/{rollouts['paused']}/{move}/" for move in ("resume", "promote", "abort")]
    paths = ["/rollouts/", f"/policies/{policy.pk}/", *(f"/rollouts/{pk}/" for pk in rollouts.values()), *moves]
    page = site.open(viewport=SIZES[width], theme=theme)

    assert look_at(page, paths, complaints) == {}


@pytest.mark.parametrize(("width", "theme"), VIEWS)
def test_pages_of_alerts(site, full, complaints, width, theme):
    alerts = alerts_of_every_state(full, full.policies.get(group=None).draft().author)
    paths = ["/alerts/", "/alerts/silences/", *(f"/alerts/{pk}/" for pk in alerts.values())]
    paths.append(f"/alerts/silences/new/?alert={alerts['firing']}")
    page = site.open(viewport=SIZES[width], theme=theme)
    assert look_at(page, paths, complaints) == {}

    page.goto(f"/alerts/rules/{full.alert_rules.get(kind='hit_rate_drop').pk}/")
    page.get_by_role("button", name="What would it have done?").click()
    page.get_by_text("Would have fired").wait_for()
    assert violations(page) == []


@pytest.mark.parametrize(("width", "theme"), VIEWS)
def test_pages_that_refuse(site, full, complaints, width, theme):
    page = site.open(viewport=SIZES[width], theme=theme)
    complaints.listen(page)
    page.goto(f"/policies/{full.policies.get(group=None).pk}/edit/?strategy=prefix_hash")
    page.get_by_label("Load factor").fill("0.5")
    page.get_by_role("button", name="Save the draft").click()
    page.get_by_text("Expected a number of at least 1.0.").first.wait_for()

    assert violations(page) == []
    complaints.heard[:] = [text for text in complaints.heard if "422" not in text]  # the refusal's own status


@pytest.mark.parametrize(("width", "theme"), VIEWS)
def test_the_sign_in_page(site, complaints, width, theme):
    page = site.new_context(viewport=SIZES[width], color_scheme=theme, base_url=site.url).new_page()

    assert look_at(page, ["/accounts/login/"], complaints) == {}
