"""A fleet in the browser: add a pool and replicas, draft, review, and a canary that passes.

``test_make_run.py`` has one that is rolled back, ``test_policy_change.py`` the way back by hand.
"""

from __future__ import annotations

import math
import random
import re
from datetime import timedelta

from django.utils import timezone
from playwright.sync_api import expect

from controlplane.models import Rollout, Router
from controlplane.services.routers import announce
from telemetry.guards.measurement import analyze_rollouts
from tests.end_to_end.looking import look
from tests.end_to_end.test_policy_change import acknowledge
from tests.telemetry.stored_decisions import decision, store


def minutes_of_traffic(canary: int, *, active: int) -> None:
    """Store 15 minutes of decisions of both revisions since the stage began, then run the analysis."""
    now, router, rng = timezone.now(), Router.objects.get(), random.Random(canary)
    Rollout.objects.filter(finished_at=None).update(stage_converged_at=now - timedelta(minutes=16))
    rows = []
    for number in range(6000):
        revision, hits = ((active, 0.6), (canary, 0.8))[number % 2]
        rows.append(
            decision(
                router,
                now - timedelta(seconds=15 * 60 - number * 0.15),
                number,
                revision=revision,
                prefix=revision * 1000 + rng.randrange(40),
                cached_tokens=1000 * (rng.random() < hits),
                ttft_s=rng.lognormvariate(math.log(0.1), 0.5),
            )
        )
    store(rows)
    analyze_rollouts(timezone.now())


def test_from_the_first_pool_to_a_canary_that_passes(site, complaints):
    page = site.open(viewport={"width": 1280, "height": 800})
    complaints.listen(page)

    def looked_at() -> None:
        assert look(page, [1280]) == []

    page.goto("/fleet/")
    page.get_by_role("link", name="Add pool").first.click()
    page.get_by_label("Name", exact=True).fill("chat")
    page.get_by_role("button", name="Add pool").click()
    for number in (1, 2):
        page.goto("/fleet/")
        page.get_by_role("link", name="Add replica").first.click()
        page.get_by_label("Name", exact=True).fill(f"gpu-{number}")
        page.get_by_label("URL").fill(f"http://10.0.0.{number}:8000")
        page.get_by_role("button", name=re.compile("Add")).click()
    page.goto("/fleet/")
    expect(page.locator("tbody tr")).to_have_count(2)
    looked_at()
    announce(name="router-1", boot="b1", version="1", admin_url="http://10.0.1.1:8081")
    acknowledge()

    page.goto("/policies/")
    page.get_by_role("link", name="Edit policy chat").click()
    page.get_by_role("link", name="prefix_hash").first.click()
    page.get_by_role("button", name="Save draft and review").click()
    expect(page.get_by_role("heading", name="Effects")).to_be_visible()
    looked_at()
    page.get_by_label("Reason").fill("agents share a prompt")
    page.get_by_label("By share of prefixes").check()
    page.get_by_text("Steps and analysis of a gradual rollout").click()
    for name, value in {"shares": "25", "observe_min": "10", "warm_up_s": "30"}.items():
        page.locator(f"[name$='{name}']").fill(value)
    page.get_by_role("button", name=re.compile("Publish revision")).click()
    expect(page.get_by_role("status").first).to_be_visible()
    page.goto(f"/rollouts/{Rollout.objects.latest('pk').pk}/")
    acknowledge()
    page.reload()
    expect(page.get_by_role("heading", name="Canary: 25 % of prefixes")).to_be_visible()
    looked_at()
    minutes_of_traffic(2, active=1)
    acknowledge()
    page.reload()
    expect(page.get_by_role("heading", name="Active on every router")).to_be_visible()
    expect(page.get_by_text("The analysis passed.")).to_be_visible()
    looked_at()

    page.goto("/events/")
    for text in ("Pool chat was created", "gpu-2 was added", "revision 2"):
        expect(page.get_by_role("main")).to_contain_text(re.compile(text, re.IGNORECASE))
    looked_at()
