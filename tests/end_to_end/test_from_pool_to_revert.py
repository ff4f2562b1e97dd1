"""A fleet in the browser: add a pool and replicas, draft, review, a canary that passes, one that fails, and roll
back.
"""

from __future__ import annotations

import math
import random
import re
from datetime import timedelta

from django.utils import timezone
from playwright.sync_api import expect

from controlplane.models import ConfigSnapshot, Rollout, Router
from controlplane.services.policies.rollouts import advance_rollouts
from controlplane.services.routers import announce, record_ack
from telemetry.guards.measurement import analyze_rollouts
from tests.end_to_end.looking import look
from tests.telemetry.stored_decisions import decision, store

WELL_S, SLOWLY_S = 0.1, 1.0  # median TTFT


def acknowledge() -> None:
    """Let the router acknowledge the newest configuration."""
    newest = ConfigSnapshot.objects.defer("encrypted").first()
    record_ack(Router.objects.get().pk, number=newest.number, sha256=newest.sha256)
    advance_rollouts()


def minutes_of_traffic(canary: int, *, active: int, hit_rate: float, ttft_s: float) -> None:
    """Store 15 minutes of decisions of both revisions since the stage began, then run the analysis."""
    now, router, rng = timezone.now(), Router.objects.get(), random.Random(canary)
    Rollout.objects.filter(finished_at=None).update(stage_converged_at=now - timedelta(minutes=16))
    rows = []
    for number in range(6000):
        revision, hits, median = ((active, 0.6, WELL_S), (canary, hit_rate, ttft_s))[number % 2]
        rows.append(
            decision(
                router,
                now - timedelta(seconds=15 * 60 - number * 0.15),
                6000 * canary + number,
                revision=revision,
                prefix=revision * 1000 + rng.randrange(40),
                cached_tokens=1000 * (rng.random() < hits),
                ttft_s=rng.lognormvariate(math.log(median), 0.5),
            )
        )
    store(rows)
    analyze_rollouts(timezone.now())


def test_from_the_first_pool_to_a_rollback(site, complaints):
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

    draft_and_try(page, "prefix_hash", "agents share a prompt", looked_at)
    acknowledge()
    page.reload()
    expect(page.get_by_role("heading", name="Canary: 25 % of prefixes")).to_be_visible()
    looked_at()
    minutes_of_traffic(2, active=1, hit_rate=0.8, ttft_s=WELL_S)
    acknowledge()
    page.reload()
    expect(page.get_by_role("heading", name="Active on every router")).to_be_visible()
    expect(page.get_by_text("The analysis passed.")).to_be_visible()
    looked_at()

    draft_and_try(page, "random", "whoever is free", looked_at)
    acknowledge()
    minutes_of_traffic(3, active=2, hit_rate=0.2, ttft_s=SLOWLY_S)
    page.reload()
    expect(page.get_by_text("Rolled back automatically:")).to_be_visible()
    expect(page.locator("table").first).to_contain_text("failed")
    looked_at()

    page.goto("/policies/")
    page.get_by_role("link", name="prefix_hash").first.click()
    page.get_by_role("row", name=re.compile("^r1")).get_by_role("link", name="Roll back").click()
    looked_at()
    page.get_by_label("Reason").fill("the old way was fine")
    page.get_by_role("button", name="Roll back to revision 1").click()
    acknowledge()
    page.reload()
    expect(page.get_by_role("heading", name="Active: lowest_cost")).to_be_visible()
    looked_at()
    page.goto("/events/")
    for told in ("Pool chat was created", "gpu-2 was added", "rolled back", "revision 4"):
        expect(page.get_by_role("main")).to_contain_text(re.compile(told, re.IGNORECASE))
    looked_at()


def draft_and_try(page, strategy: str, why: str, looked_at) -> None:
    """Edit policy, review the draft, and publish it as a canary for a quarter of the prefixes."""
    page.goto("/policies/")
    page.get_by_role("link", name="Edit policy chat").click()
    page.get_by_role("link", name=strategy).first.click()
    page.get_by_role("button", name="Save draft and review").click()
    expect(page.get_by_role("heading", name="Effects")).to_be_visible()
    looked_at()
    page.get_by_label("Reason").fill(why)
    page.get_by_label("By share of prefixes").check()
    page.get_by_text("Steps and analysis of a gradual rollout").click()
    for name, value in {"shares": "25", "observe_min": "10", "warm_up_s": "30"}.items():
        page.locator(f"[name$='{name}']").fill(value)
    page.get_by_role("button", name=re.compile("Publish revision")).click()
    expect(page.get_by_role("status").first).to_be_visible()
    page.goto(f"/rollouts/{Rollout.objects.latest('pk').pk}/")
