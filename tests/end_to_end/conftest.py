"""Browser fixtures: headless Chromium on Django's live server. Without Chromium the browser tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from django.test import Client
from django.utils import timezone
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.end_to_end.live_stack import BROWSER_MS, FIRST_START_S, PASSWORD, LiveStack

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")  # the first takes half the CPU time of the others
FLAGS = (
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
)
PATIENCE_MS = 45_000  # files run side by side, and a busy core draws slowly
expect.set_options(timeout=PATIENCE_MS)
NO_BROWSER = "no Chromium found: set CHROMIUM to one, or install it; every browser test is skipped"


def browser_builds() -> list[str]:
    """Paths of the Chromium builds on this machine, ``$CHROMIUM`` first, then those on PATH."""
    found = [os.environ.get("CHROMIUM"), *map(shutil.which, PROGRAMS)]
    return list(dict.fromkeys(filter(None, found)))


# For tests whose result depends on the build: the full browser requests favicons, for example, the headless shell none.
with_every_browser_build = pytest.mark.parametrize(
    "chromium", browser_builds() or [None], indirect=True, ids=lambda path: str(path).rpartition("/")[2]
)


@pytest.fixture(scope="module")
def chromium(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """A browser: the build that the test is parametrized with, else the first one.

    Module-scoped, because the plugin's session-scoped browser keeps an event loop running, which asyncio tests cannot
    share.
    """
    program = getattr(request, "param", None) or next(iter(browser_builds()), None)
    if program is None:
        (pytest.fail if os.environ.get("REQUIRE_BROWSER") == "1" else pytest.skip)(NO_BROWSER)
    libraries = os.environ.get("CHROMIUM_LIBRARY_PATH")
    env = {**os.environ, "LD_LIBRARY_PATH": libraries} if libraries else dict(os.environ)
    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # Playwright keeps a loop running in this thread
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS), env=env)
        yield browser
        browser.close()


@pytest.fixture
def new_context(chromium: Browser) -> Iterator[Callable[..., BrowserContext]]:
    """Create browser contexts that are closed after the test."""
    contexts: list[BrowserContext] = []

    def make(**options) -> BrowserContext:
        contexts.append(chromium.new_context(**options))
        contexts[-1].set_default_timeout(PATIENCE_MS)
        return contexts[-1]

    yield make
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """``make run`` with short intervals, for the files in ``side_by_side.LIVE``; the last test stops it."""
    running = LiveStack(tmp_path_factory.mktemp("stack"), WARMPATH_SCRAPE_INTERVAL_S="2")
    try:
        running.start(within_s=FIRST_START_S)
        yield running
    finally:
        running.kill()


@pytest.fixture(scope="module")
def tab(stack: LiveStack, chromium: Browser) -> Iterator[Page]:
    """A signed-in page of the stack."""
    context = chromium.new_context(base_url=stack.web, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(BROWSER_MS)
    page.goto("/")
    page.get_by_label("Username").fill("admin")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    with stack.telling():
        expect(page.get_by_role("heading", name="Overview")).to_be_visible(timeout=BROWSER_MS)
    yield page
    context.close()


@dataclass
class Complaints:
    """Console messages, CSP violations and script errors of the site's pages.

    Messages about other origins, such as an identity provider's favicon, are ignored; only the request's URL tells
    them apart.
    """

    origin: str
    heard: list[str] = field(default_factory=list)

    def listen(self, page) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.heard.append(str(error)))

    def _on_console(self, message) -> None:
        url = message.location.get("url", "")
        if message.type in {"error", "warning"} and self._is_of_this_site(url):
            self.heard.append(f"{message.text} ({url})")

    def _is_of_this_site(self, url: str) -> bool:
        address = urlsplit(url)
        return not address.netloc or f"{address.scheme}://{address.netloc}" == self.origin


@dataclass(frozen=True)
class Site:
    """The live server with a signed-in session."""

    url: str
    cookies: list[dict]
    new_context: Callable[..., BrowserContext]

    def open(self, **options):
        """Open a page in a new signed-in context; ``theme`` sets the theme cookie."""
        theme = options.pop("theme", None)
        context = self.new_context(base_url=self.url, **options)
        extra = [{"name": "theme", "value": theme, "url": self.url}] if theme else []
        context.add_cookies([*self.cookies, *extra])
        return context.new_page()


@pytest.fixture
def operator(chromium, transactional_db, django_user_model):
    """A superuser."""
    return django_user_model.objects.create_superuser("olga", password="a long enough password")


@pytest.fixture
def site(live_server, operator, new_context) -> Site:
    """The live server, signed in."""
    client = Client()
    client.force_login(operator)
    cookie = client.cookies["sessionid"]
    return Site(live_server.url, [{"name": "sessionid", "value": cookie.value, "url": live_server.url}], new_context)


@pytest.fixture
def complaints(live_server) -> Iterator[Complaints]:
    """Fail the test if a page logged a console message or error."""
    complaints = Complaints(live_server.url)
    yield complaints
    assert complaints.heard == []


@pytest.fixture
def full(site, operator):
    """A fleet with history, a draft, a firing alert, and a channel that was notified."""
    from controlplane.models import Router
    from controlplane.services.policies.lifecycle import save_draft
    from telemetry.services.notifications.channels import create_channel
    from tests.fleet_history import drop_alert, sources_at_work, warm_fleet
    from tests.telemetry.lint.prompts import DATED, store_prompts

    now = timezone.now()
    pool = warm_fleet(now, seconds=600, replicas=8, by=operator)
    create_channel("on-call", config={"url": "http://127.0.0.1:1/hook"})
    drop_alert(pool, now)
    save_draft(pool.policies.get(group=None), {"strategy": "prefix_hash", "slack_s": 1.5}, by=operator)
    sources_at_work(pool, now)
    store_prompts(Router.objects.get(), now, {("chat", "coding"): (DATED, 12), ("chat", "summaries"): ("", 12)})
    Router.objects.update(
        warming={"gpu-8": {"prefixes_done": 12, "prefixes": 40, "tokens_done": 45_000, "tokens": 120_000}}
    )
    return pool


def events_at_work(replica, router, now) -> None:
    """KV events of two ranks, which the router follows and has lost, and an engine whose replay port is not usable."""
    from controlplane.services.fleet.kv_event_sources import record_event_sources
    from controlplane.services.fleet.replicas import update_replica
    from telemetry.models import ScrapeState

    events = {"endpoint": "tcp://gpu-1:5557", "replay_endpoint": "tcp://gpu-1:5657", "topic": "kv@"}
    update_replica(replica, kv_events=events, data_parallel_size=2)
    problem = "The replay endpoint tcp://127.0.0.1:5657 is at another host than the replica, gpu-1. Left out."
    reported = events | {"endpoint": "tcp://gpu-1:5558", "replay_endpoint": None}
    record_event_sources(replica.pk, {"kv_events": reported, "problem": problem})
    figures = {"since_s": now.timestamp() - 600, "lag_s": 0.021, "received": 81_234.0, "gaps": 3.0, "lost": 0.0}
    followed = {"states": {"following": 2}, "malformed": 0.0, "restarts": 1.0, **figures}
    lost = {"states": {"estimated": 1, "partial": 1}, "since_s": now.timestamp() - 45, "gaps": 12.0, "lost": 4.0}
    state = {"at": now, "ok_at": now, "health": "up", "failures": 0}
    streams = {replica.name: {"0": followed, "1": lost}}
    ScrapeState.objects.update_or_create(router=router, defaults={**state, "kv_streams": streams})


def semantic_cache_at_work(pool, router, now) -> None:
    """A semantic cache of the group ``coding`` that one router reports, with checks at many similarities."""
    from controlplane.services.fleet.pools import create_pool
    from controlplane.services.fleet.task_groups import update_task_group
    from telemetry.models import ScrapeState

    create_pool("vectors", project=pool.project, models=["bge-m3"])
    settings = {"embedding_pool": "vectors", "embedding_model": "bge-m3", "mode": "serve", "threshold": 0.93}
    update_task_group(pool.groups.get(name="coding"), response_cache={}, semantic_cache=settings)
    checks = {
        f"{step / 100:.2f}": {"right": 12 + 9 * (step - 70), "wrong": max(0, 40 - 2 * (step - 70))}
        for step in range(72, 101)
    }
    figures = {"recent_precision": 0.985, "lower_bound": 0.981, "window_checks": 1000.0, "entries": 4_711.0}
    cache = {"states": {"serving": 1, "stopped": 1}, "checks": checks, **figures}
    state = {"at": now, "ok_at": now, "health": "up", "failures": 0}
    caches = {pool.name: {"coding": cache}}
    ScrapeState.objects.update_or_create(router=router, defaults={**state, "semantic_caches": caches})


@pytest.fixture
def everything(full, operator):
    """Rows for every page: their ids, by the placeholder names in ``every_page``."""
    from controlplane.models import Router
    from controlplane.services.fleet.client_keys import create_client_key
    from controlplane.services.fleet.pools import update_pool
    from controlplane.services.policies.lifecycle import save_draft
    from telemetry.models import Channel, Notification
    from telemetry.services.metrics_servers import create_server
    from telemetry.services.navigation import shorten
    from telemetry.services.notifications.channels import create_channel, disable_channel, test_send
    from telemetry.services.notifications.heartbeats import set_heartbeat
    from telemetry.services.notifications.outbox import deliver_due
    from telemetry.web.decisions import place_of
    from tests.alert_history import alerts_of_every_state
    from tests.decision_history import decisions_at_work
    from tests.fakes.fake_webhook_receiver import Reply, receiving
    from tests.fleet_history import rollouts_of_every_kind
    from tests.telemetry.stored_decisions import repeated_in_a_row
    from tests.telemetry.what_if_results import (
        finished_sweep,
        finished_what_if,
        predict_draft,
    )

    now, policy, router = timezone.now(), full.policies.get(group=None), Router.objects.get()
    finished_sweep(full, now)
    rows = {
        "pool": full.pk,
        "policy": policy.pk,
        "router": router.pk,
        "user": operator.pk,
        "project": full.project_id,
    }
    rows |= {"request": place_of(decisions_at_work(full, router, now))}
    events_at_work(full.replicas.first(), router, now)
    semantic_cache_at_work(full, router, now)
    for number, group in enumerate(("coding", "summaries", "")):
        repeated_in_a_row(router, now, 80, boot=f"repeats-{number}", pool=full.name, group=group)
    rows |= rollouts_of_every_kind(policy, operator)
    rows |= alerts_of_every_state(full, operator)
    with receiving() as receiver:
        receiver.replies = [Reply(500, body=b"<html>no such thing: " + b"x" * 300), Reply(200, body=b"ok")]
        hook = create_channel("on-call chat", config={"url": receiver.url}, matchers=["severity=critical,warning"])
        mail = {"recipients": "on-call@example.org, night@example.org", "sender": "w@example.org", "host": "smtp.x.org"}
        dead = create_channel("night shift", kind="email", config=mail)
        test_send(hook)
        test_send(hook)
        deliver_due()
        set_heartbeat(url=receiver.url, every_s=60)
    disable_channel(dead, reason="a message was tried 10 times and never arrived", now=now)
    Channel.objects.filter(name="on-call").update(failed_at=now, error="status 500: try later")
    draft = save_draft(policy, {"strategy": "prefix_hash", "slack_s": 1.25}, by=operator)
    predict_draft(draft, hit_rate=(-0.12, 0.02))
    update_pool(full, what_if={"mode": "require"})
    key, _text = create_client_key(full.project, "nightly-batch", by=operator)
    server = create_server(name="cluster", url="http://10.0.0.9:9090")
    link = shorten("/?pool=chat&range=6h&by=group", by=operator, now=now)
    sent = Notification.objects.filter(channel=hook)
    return rows | {
        "own_policy": full.policies.exclude(group=None).first().pk, "group": full.groups.first().pk,
        "replica": full.replicas.first().pk, "source": full.sources.first().pk, "key": key.pk, "server": server.pk,
        "rule": full.alert_rules.get(kind="hit_rate_drop").pk, "channel": hook.pk, "dead_channel": dead.pk,
        "link": link.code, "what_if": finished_what_if(full, now).pk,
        "delivered": sent.filter(state="delivered").first().pk, "waiting": sent.exclude(state="delivered").first().pk,
    }  # fmt: skip
