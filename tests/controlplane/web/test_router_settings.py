"""Forms in sections: what routers can be told of pools, replicas and task groups, without JavaScript."""

import html
import json
import re

import pytest

from controlplane.models import ConfigSnapshot, Event
from controlplane.services.fleet.kv_event_sources import record_event_sources
from controlplane.services.fleet.pools import update_pool
from controlplane.services.fleet.replicas import add_replica, update_replica
from controlplane.services.fleet.task_groups import create_task_group, update_task_group
from controlplane.services.snapshots import newest_snapshot, snapshot_document
from routing import schema
from tests.controlplane.api.test_router_settings import COSTS, GROUP_SETTINGS, KV_EVENTS, POOL_SETTINGS
from tests.controlplane.test_kv_cache import LLAMA_70B

CANARY = "sk-canary-77aa"
FULL_POOL = {field: value for field, value, _ in POOL_SETTINGS if value} | {
    "aliases": [{"name": "gpt", "model": "llama"}],
    "adapters": [{"name": "law", "model": "llama"}],
    "description": "H200s",
    "tier1": {"boundary": "marker", "boundary_marker": " --- "},
    "warm_up": {"time_limit_s": 60.5, "priority": None},
}
FULL_GROUP = {field: value for field, value, _ in GROUP_SETTINGS} | {
    "owner": "agents",
    "match": {"session_prefixes": ["agent-", "tool-"], "models": ["llama"]},
    "caps": {"max_tokens": 100, "media_hosts": ["img.example"]},
    "expected_tier1": "0123456789abcdef",
    "hit_rate_objective": 0.6,
}


def filled(page: str) -> dict[str, str | list[str]]:
    """What a browser would send of the page's form if nobody touched it."""
    form = page[page.index('class="panel stack"') :]
    form = form[: form.index("</form>")]
    sent: dict[str, str | list[str]] = {}
    for name, text in re.findall(r'<textarea name="([^"]+)"[^>]*>\n?(.*?)</textarea>', form, re.DOTALL):
        sent[name] = html.unescape(text)
    for tag in re.findall(r"<input [^>]*>", form):
        facts = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        if facts["type"] != "checkbox" or "checked" in tag:
            sent[facts["name"]] = html.unescape(facts.get("value", ""))
    for name, options in re.findall(r'<select name="([^"]+)".*?>(.*?)</select>', form, re.DOTALL):
        chosen = re.search(r'value="([^"]*)" selected', options)
        sent[name] = chosen[1] if chosen else ""
    sent.pop("csrfmiddlewaretoken", None)
    return sent


@pytest.fixture
def group(pool, replica):
    return create_task_group(pool, "chat")


@pytest.fixture
def paths(pool, replica, group):
    return {
        "pool": f"/fleet/pools/{pool.pk}/",
        "replica": f"/fleet/replicas/{replica.pk}/",
        "group": f"/task-groups/{group.pk}/",
    }


@pytest.fixture
def furnished(pool, replica, group):
    """Everything that can be said is said."""
    update_pool(pool, **FULL_POOL)
    update_replica(
        replica,
        labels={"zone": "a", "spare": ""},
        adapters=[],
        data_parallel_size=2,
        weight=1.5,
        api_key=CANARY,
        kv_events=KV_EVENTS,
        role="decode",
    )
    update_task_group(group, **FULL_GROUP)


@pytest.mark.parametrize("noun", ["pool", "replica", "group"])
@pytest.mark.parametrize("full", [False, True], ids=["empty", "full"])
def test_a_form_that_is_sent_as_it_came_changes_nothing(visitor, paths, noun, full, request):
    if full:
        request.getfixturevalue("furnished")
    before = (newest_snapshot().number, Event.objects.count())
    answer = visitor.post(paths[noun], filled(visitor.get(paths[noun]).text))
    assert answer.status_code == 302
    assert (newest_snapshot().number, Event.objects.count()) == before


def test_sections_are_filled_in_and_taken_back(visitor, pool, paths):
    sent = filled(visitor.get(paths["pool"]).text) | {
        "aliases": "gpt = llama\nclaude=llama",
        "models": "llama",
        "breaker-failures": "9",
        "breaker-stall_s": "none",
        "caps-n": "none",
        "caps-media_hosts": "none",
        "tier1-boundary": "system",
    }
    assert visitor.post(paths["pool"], sent).status_code == 302
    pool.refresh_from_db()
    assert pool.aliases == [{"name": "claude", "model": "llama"}, {"name": "gpt", "model": "llama"}]
    assert (pool.breaker["failures"], pool.breaker["stall_s"], pool.breaker["open_s"]) == (9, None, 30.0)
    assert (pool.caps["n"], pool.caps["media_hosts"], pool.concurrency) == (None, [], None)
    running = schema.load_snapshot(snapshot_document(ConfigSnapshot.objects.first())).config.pools[0]
    assert (running.breaker.failures, running.tier1.boundary) == (9, "system")

    page = visitor.get(paths["pool"]).text
    assert "Reset to" in page
    visitor.post(paths["pool"], filled(page) | {"breaker-unset": "on", "caps-unset": "on"})
    pool.refresh_from_db()
    assert (pool.breaker, pool.caps) == (None, None)
    assert pool.tier1["boundary"] == "system"


def test_the_cache_size_and_prices_are_set_kept_and_removed(visitor, pool, paths):
    url = paths["pool"]
    sent = filled(visitor.get(url).text) | {
        "kv_cache-model_config": json.dumps(LLAMA_70B | {"vocab_size": 5}),
        "kv_cache-dtype": "fp8",
        "costs-gpu_hour_price": "2.5",
        "costs-gpus_per_replica": "4",
        "costs-currency": "USD",
    }
    assert visitor.post(url, sent).status_code == 302
    pool.refresh_from_db()
    assert (pool.costs, pool.kv_bytes_per_token) == (COSTS, 160 * 1024)
    assert pool.kv_cache["model_config"] == LLAMA_70B

    again = filled(visitor.get(url).text)
    visitor.post(url, again)
    pool.refresh_from_db()
    assert pool.kv_cache["model_config"] == LLAMA_70B
    visitor.post(url, again | {"costs-unset": "on", "kv_cache-unset": "on"})
    pool.refresh_from_db()
    assert (pool.costs, pool.kv_cache) == (None, None)


def test_every_error_stands_at_its_field_and_its_section_open(visitor, pool, paths):
    sent = filled(visitor.get(paths["pool"]).text) | {
        "health-interval_s": "0",
        "breaker-failures": "many",
        "concurrency-max_waiting": "5",
        "aliases": "gpt",
        "adapter_replicas": "0",
    }
    answer = visitor.post(paths["pool"], sent)
    assert answer.status_code == 422
    for name in ("health-interval_s", "breaker-failures", "concurrency-max_running", "aliases", "adapter_replicas"):
        assert f'id="id_{name}_error"' in answer.text, name
    assert "Expected a number of more than 0" in answer.text
    assert answer.text.count('<details class="section" open>') == 3
    pool.refresh_from_db()
    assert (pool.health, pool.aliases) == (None, [])


@pytest.mark.parametrize(
    ("noun", "change", "field"),
    [
        ("pool", {"tier1-boundary": "marker"}, "tier1-boundary"),
        ("pool", {"models": "llama", "aliases": "gpt = mistral"}, "aliases"),
        ("pool", {"kv_cache-model_config": "{"}, "kv_cache-model_config"),
        ("pool", {"kv_cache-model_config": "[1]"}, "kv_cache-model_config"),
        ("pool", {"kv_cache-dtype": "fp8"}, "kv_cache-bytes_per_token"),
        ("pool", {"costs-currency": "USD"}, "costs-gpu_hour_price"),
        ("replica", {"labels": "a b=c"}, "labels"),
        ("replica", {"kv_events-endpoint": "tcp://*:5557"}, "kv_events-endpoint"),
        ("replica", {"kv_events-replay_endpoint": "tcp://gpu-1:5657"}, "kv_events-endpoint"),
        ("group", {"match-tier1_hashes": "0123456789abcdef\nxyz"}, "match-tier1_hashes"),
        ("group", {"hit_rate_objective": "60"}, "hit_rate_objective"),
    ],
)
def test_what_routers_would_refuse_stands_beside_its_field(visitor, paths, noun, change, field):
    answer = visitor.post(paths[noun], filled(visitor.get(paths[noun]).text) | change)
    assert answer.status_code == 422
    assert f'id="id_{field}_error"' in answer.text


def test_an_engines_key_is_set_kept_and_taken_away_and_never_shown(visitor, replica, paths):
    sent = filled(visitor.get(paths["replica"]).text)
    refused = visitor.post(paths["replica"], sent | {"api_key": CANARY, "weight": "0"})
    assert (refused.status_code, CANARY in refused.text) == (422, False)

    visitor.post(paths["replica"], sent | {"api_key": CANARY, "labels": "zone=a"})
    replica.refresh_from_db()
    assert (replica.api_key_set_at is not None, replica.labels) == (True, {"zone": "a"})
    page = visitor.get(paths["replica"]).text
    assert "Leave empty to keep it" in page
    assert "not reported yet" in page
    assert CANARY not in page + visitor.get("/fleet/").text + visitor.get("/audit/").text

    visitor.post(paths["replica"], filled(page) | {"without_api_key": "on"})
    replica.refresh_from_db()
    assert replica.api_key_encrypted is None


def test_kv_events_are_entered_filled_in_from_the_engine_and_removed(visitor, replica, paths):
    page = visitor.get(paths["replica"]).text
    assert "off: routers estimate what it has cached" in page
    assert "proposed-events" not in page
    record_event_sources(replica.pk, {"kv_events": KV_EVENTS, "problem": "Left out."})
    page = visitor.get(paths["replica"]).text
    assert "publishes KV events at <code>tcp://gpu-1:5557</code>" in page
    assert "report about its KV events is not used. Left out." in page
    assert 'value="tcp://gpu-1:5557"' not in page

    filled_in = visitor.get(paths["replica"] + "?kv_events=reported").text
    assert "filled in from the engine's report" in filled_in
    assert visitor.post(paths["replica"], filled(filled_in)).status_code == 302
    replica.refresh_from_db()
    assert replica.kv_events == KV_EVENTS

    page = visitor.get(paths["replica"]).text
    assert "proposed-events" not in page
    visitor.post(paths["replica"], filled(page) | {"kv_events-unset": "on"})
    replica.refresh_from_db()
    assert replica.kv_events is None


def test_a_wrong_endpoint_says_what_was_expected(visitor, paths):
    sent = filled(visitor.get(paths["replica"]).text) | {"kv_events-endpoint": "ipc:///tmp/events"}
    assert "such as tcp://gpu-1:5557." in visitor.post(paths["replica"], sent).text


def test_lists_show_the_stored_settings(visitor, furnished):
    fleet, groups = visitor.get("/fleet/").text, visitor.get("/task-groups/").text
    assert "zone=a" in fleet
    assert "1.5 \u00d7 2" in fleet
    for words in ("model llama, 2 session prefixes", "60.0 %"):
        assert words in groups


def test_editors_cost_the_same_whatever_the_fleets_size(visitor, pool, paths, django_assert_num_queries):
    for number in range(9):
        add_replica(pool, name=f"more-{number}", url=f"http://10.0.1.{number}:8000")
    for noun, queries in (("pool", 5), ("replica", 5), ("group", 7)):
        with django_assert_num_queries(queries):
            visitor.get(paths[noun])
