"""The pages of a pool, a task group and a replica: each answers for its own object, and says what it does not know."""

import re
from datetime import timedelta

import pytest
import time_machine
from django.db.models import F
from django.utils.html import escape

from controlplane.models import Project, Replica, RoleAssignment
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica, remove_replica
from controlplane.services.fleet.task_groups import create_task_group, update_task_group
from telemetry.models import Alert, AlertRule, Reading, RouterReading, ScrapeState
from telemetry.services.alerts.rules import create_rule
from telemetry.web import figures
from telemetry.web.charts import CHARTS
from tests.fleet_history import drop_alert, warm_fleet

PAGES = ("/?pool=chat", "/pools/chat/groups/coding/", "/pools/chat/groups/-/", "/replicas/gpu-4/")


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_tiles_charts_and_what_happened_and_its_live_part_is_a_fragment(visitor, fleet, path):
    text = visitor.get(path).text

    assert 'id="tiles"' in text
    assert "Policy chat revision 2" in text
    live = re.findall(r'hx-get="([^"]+)"', text)[1].replace("&amp;", "&")
    part = visitor.get(live)
    assert "<html" not in part.text
    assert 'id="tiles"' in part.text
    assert visitor.get(live, headers={"If-None-Match": part["ETag"]}).status_code == 304


@pytest.mark.parametrize("path", PAGES)
def test_every_chart_of_a_page_draws_its_own_subject(visitor, fleet, path):
    sources = re.findall(r'data-src="([^"]+)"', visitor.get(f"{path}{'&' if '?' in path else '?'}range=15m").text)

    assert len(sources) >= (2 if path == PAGES[0] else 4)
    for source in sources:
        figure = visitor.get(source.replace("&amp;", "&")).json()
        assert "line" in [trace["meta"] for trace in figure["data"]], source


@pytest.mark.parametrize(
    ("path", "leads_to"),
    [
        ("/pools/chat/", "/?pool=chat"),
        ("/pools/chat/?range=1h&table=ttft", "/?pool=chat&range=1h&table=ttft"),
        ("/?pool=chat&group=coding&range=1h", "/pools/chat/groups/coding/?range=1h"),
        ("/?pool=chat&group=-", "/pools/chat/groups/-/?"),
        ("/?replica=gpu-1&range=1h", "/replicas/gpu-1/?range=1h"),
    ],
)
def test_every_address_of_an_object_leads_to_its_page_with_the_rest_of_its_query(visitor, fleet, path, leads_to):
    answer = visitor.get(path)

    assert (answer.status_code, answer["Location"]) == (302, leads_to)


def test_a_link_between_pages_carries_the_pool_and_the_range(visitor, fleet):
    assert 'href="/replicas/gpu-1/?pool=chat&amp;range=1h"' in visitor.get("/?pool=chat&range=1h").text
    assert 'href="/pools/chat/groups/coding/?range=1h"' in visitor.get("/?range=1h").text
    assert 'href="/?pool=chat"' in visitor.get("/search/?q=chat").text
    assert 'href="/?pool=chat&amp;range=1h"' in visitor.get("/replicas/gpu-1/?range=1h").text
    for page in (
        "/breakdown/?pool=chat&range=1h&group=coding",
        "/pools/chat/groups/coding/?range=1h",
        "/policies/?range=1h&pool=chat",
    ):
        text = visitor.get(page).text
        for other in ("/", "/alerts/", "/breakdown/", "/policies/", "/fleet/"):  # in the rail, the tabs and the help
            assert f'href="{other}?pool=chat&amp;range=1h"' in text, (page, other)


def test_a_task_group_that_no_one_defined_has_a_page_whatever_it_is_called(visitor, fleet):
    names = ("a/b", "../live", "100%", "%2F", "<b>x</b>")
    for number, name in enumerate(names):
        RouterReading.objects.filter(group="coding", at__second=5 * number).update(group=name)
    found = set(re.findall(r'href="(/pools/chat/groups/(?!-/)[^"]+)"', visitor.get("/").text))
    pages = [visitor.get(link.replace("&amp;", "&")).text for link in found]
    for name in names:
        (page,) = [page for page in pages if f"<h1>Task group {escape(name)}<" in page]
        live = re.search(r'hx-get="([^"]+)"', page)[1].replace("&amp;", "&")
        assert visitor.get(live).status_code == 200, live


def test_a_pool_says_which_policy_is_active(visitor, fleet):
    text = visitor.get("/?pool=chat").text

    assert f'href="/policies/{fleet.policies.get(group=None).pk}/"' in text
    assert ">prefix_hash</a> <small>r2</small>" in text


def test_a_group_shows_its_objective_its_prefix_and_where_its_requests_go(visitor, fleet):
    update_task_group(fleet.groups.get(name="coding"), hit_rate_objective=0.7, expected_tier1="00ff00ff00ff00ff")

    text = visitor.get("/pools/chat/groups/coding/").text

    assert "objective 70.0 %" in text
    assert "00ff00ff00ff00ff" in text
    assert re.search(r'href="/replicas/gpu-1/\?pool=chat">gpu-1</a>.*?100\.0 %', text, re.DOTALL)


def test_a_group_lists_its_alert_rules_and_one_is_added_for_it(visitor, fleet):
    page = visitor.get("/pools/chat/groups/coding/").text
    assert "only if it lowers the hit rate of the whole pool" in page
    url = re.search(r'href="(/alerts/rules/new/\?[^"]+)"', page)[1].replace("&amp;", "&")
    form = visitor.get(url).text
    assert re.search(r'name="group" value="coding"', form)
    assert re.search(r"<option [^>]*selected[^>]*>chat</option>", form)
    create_rule(fleet, kind="hit_rate_drop", name="Hit rate drop of coding", group="coding")
    page = visitor.get("/pools/chat/groups/coding/").text
    assert "Hit rate drop of coding</dt>" in page
    assert "only if it lowers" not in page


def test_a_group_says_how_many_requests_were_rejected_as_invalid(visitor, fleet):
    assert "rejected as invalid" not in visitor.get("/pools/chat/groups/coding/").text
    RouterReading.objects.filter(group="coding").update(client_error_requests=F("requests") / 2)

    text = visitor.get("/pools/chat/groups/coding/").text
    assert re.search(r"<strong>(50|49)\.\d..?</strong> rejected as invalid", text)


def test_a_group_without_traffic_says_so_and_no_figure_is_zero(visitor, fleet):
    create_task_group(fleet, "quiet")

    text = visitor.get("/pools/chat/groups/quiet/").text

    assert "no traffic" in text
    assert "No requests of this group" in text
    tiles = text[text.index('id="tiles"') : text.index('id="charts"')]
    assert "0.0 %" not in tiles


def test_a_removed_group_has_a_page_as_long_as_it_was_measured(visitor, fleet):
    fleet.groups.get(name="coding").delete()

    assert "was removed from the configuration" in visitor.get("/pools/chat/groups/coding/").text
    assert visitor.get("/pools/chat/groups/never/").status_code == 404


def test_a_replica_shows_its_engine_its_ranks_and_how_reading_goes(visitor, fleet):
    ScrapeState.objects.filter(replica__name="gpu-4").update(duration_s=0.0123, restarted_at=None)

    text = visitor.get("/replicas/gpu-4/").text

    assert "16 tokens" in text
    assert "27,648 blocks" in text
    assert "12 ms" in text
    assert re.search(r'<th scope="row">0</th><td data-label="Model">llama-3.3-70b</td>', text)


def test_a_replica_and_a_group_list_the_alerts_that_fire_about_them(visitor, fleet, noon):
    alert = drop_alert(fleet, noon)
    for path, group, subject in (("/pools/chat/groups/coding/", "coding", ""), ("/replicas/gpu-1/", None, "gpu-1")):
        assert "Firing here" not in visitor.get(path).text
        AlertRule.objects.filter(pk=alert.rule_id).update(group=fleet.groups.filter(name=group).first())
        Alert.objects.update(subject=subject)
        listed = visitor.get(path).text.split("Firing here")[1].split("</div>")[0]
        assert f'<a href="/alerts/{alert.pk}/">Hit rate' in listed


def test_a_removed_replica_keeps_its_page_with_its_figures_and_alerts(visitor, fleet, operator, noon):
    replica = fleet.replicas.get(name="gpu-1")
    alert = drop_alert(fleet, noon)
    Alert.objects.filter(pk=alert.pk).update(subject="gpu-1")
    remove_replica(replica, by=operator)

    found = visitor.get("/replicas/gpu-1/")
    text = visitor.get(found["Location"]).text

    assert (found.status_code, "from=2031-03-04T11" in found["Location"]) == (302, True)
    assert "Replica gpu-1 was removed from pool chat." in text
    assert '<details class="popover range" name="menu">' in text, (
        "the form of its fixed range is closed: it would cover the figures"
    )
    assert "by olga" in text
    assert f'href="/alerts/{alert.pk}/"' in text
    assert "http://10.0.0.1:8000" in text
    assert "27,648 blocks" in text
    assert ">Edit<" not in text
    assert "No successful scrape in this range" not in text
    source = re.search(r'data-src="([^"]+)"', text)[1].replace("&amp;", "&")
    assert "line" in [trace["meta"] for trace in visitor.get(source).json()["data"]]
    assert "was removed from pool chat" in visitor.get("/replicas/gpu-1/live/").text


def test_the_page_of_a_removed_replica_is_for_those_who_see_its_pool(client, fleet, django_user_model):
    remove_replica(fleet.replicas.get(name="gpu-1"))

    for project, status in ((Project.objects.create(name="other"), 404), (fleet.project, 302)):
        user = django_user_model.objects.create_user(project.name)
        RoleAssignment.objects.create(user=user, project=project, role="viewer")
        client.force_login(user)
        assert client.get("/replicas/gpu-1/").status_code == status


def test_a_restarted_replica_is_shaded_cold_on_its_own_charts_alone(visitor, fleet):
    def shaded(query):
        layout = visitor.get(f"/charts/hit-rate/figure/?{query}").json()["layout"]
        blue = figures.translucent(figures.COLD, 0.16)
        return [shape for shape in layout["shapes"] if shape.get("fillcolor") == blue]

    (cold,) = shaded("replica=gpu-4")
    assert (cold["x0"], cold["x1"]) == ("2031-03-04T11:57:55", "2031-03-04T12:00:00")
    assert shaded("pool=chat") == shaded("replica=gpu-1") == []


def test_a_replica_that_is_down_says_why_and_not_that_the_worker_stopped(visitor, noon):
    replica = add_replica(create_pool("chat"), name="gpu-1", url="http://gpu-1:8000")
    down = {"health": "down", "failures": 4, "reason": "connection refused"}
    ScrapeState.objects.update_or_create(
        replica=replica, defaults={"at": noon, "ok_at": noon - timedelta(minutes=1), **down}
    )

    text = visitor.get("/replicas/gpu-1/").text

    assert "The replica cannot be scraped: connection refused." in text
    assert "Requests are not affected" not in text


def test_tiles_say_until_when_they_were_scraped_and_do_not_count_replicas_that_nobody_asked(visitor, fleet, noon):
    with time_machine.travel(noon + timedelta(seconds=30), tick=False):
        text = visitor.get("/?pool=chat").text

    assert "Hit rate, last 15 min, scraped until <time" in text
    assert '<span class="value none">replicas up: unknown</span>' in text


@pytest.mark.parametrize(
    "path", ["/pools/none/", "/pools/none/groups/coding/", "/replicas/none/", "/replicas/none/live/"]
)
def test_an_unknown_object_is_not_found(visitor, path):
    assert visitor.get(path).status_code == 404


@pytest.mark.parametrize(
    ("path", "queries"), [("/?pool=chat", 37), ("/pools/chat/groups/coding/", 21), ("/replicas/gpu-1/", 21)]
)
def test_a_page_costs_the_same_whatever_the_fleets_size(visitor, noon, django_assert_num_queries, path, queries):
    warm_fleet(noon, seconds=60, replicas=9)

    with django_assert_num_queries(queries):
        visitor.get(path)


@pytest.mark.parametrize("query", ["pool=chat", "pool=chat&group=-", "replica=gpu-1", ""])
def test_every_view_of_every_chart_can_be_drawn(visitor, fleet, query):
    drawn = 0
    for slug, chart in CHARTS.items():
        for view in chart.views:
            answer = visitor.get(f"/charts/{slug}/figure/?range=5m&{query}&{chart.param}={view.key}")
            assert answer.status_code in {200, 404}
            drawn += answer.status_code == 200
    assert drawn >= 8


@pytest.mark.parametrize("path", ["/?pool=chat", "/replicas/gpu-4/"])
def test_a_page_says_whether_the_figures_of_engines_answers_and_routers_agree(visitor, fleet, path):
    """H17"""
    text = visitor.get(path).text

    assert "Consistency of hit rates" in text
    assert "requests were counted by both engine and routers" in text or "points." in text


@pytest.mark.parametrize(
    ("query", "said", "key"),
    [
        ("range=90m", "", "90m"),
        ("range=3d", "", "3d"),
        ("range=2w", "", "2w"),
        ("range=90x", "is not a range", "15m"),
        ("range=5s", "between one minute and 90 days", "15m"),
        ("range=91d", "between one minute and 90 days", "15m"),
        ("range=", "", "15m"),
    ],
)
def test_any_length_of_time_may_be_asked_for(visitor, fleet, query, said, key):
    text = visitor.get(f"/?pool=chat&{query}").text

    assert said in text
    assert re.search(rf'aria-current="true"><span class="visually-hidden">last </span>{key}</a>', text)


def test_a_replica_s_page_names_what_its_engine_does_not_report(visitor, fleet, noon):
    newest = Reading.objects.filter(replica__name="gpu-1").order_by("-at").first()
    Reading.objects.filter(replica=newest.replica, at=newest.at).update(not_reported=["external_hits", "preemptions"])

    text = visitor.get("/replicas/gpu-1/").text

    assert "Metrics that this engine does not report" in text
    assert "external hits" in text
    assert "Metrics that this engine does not report" not in visitor.get("/replicas/gpu-2/").text


def test_a_replica_without_prompt_tokens_details_is_told_which_flag_is_missing(visitor, fleet):
    assert "--enable-prompt-tokens-details" not in visitor.get("/replicas/gpu-1/").text

    RouterReading.objects.filter(replica="gpu-1").update(usage_without_details=3, usage_reported=None)
    text = visitor.get("/replicas/gpu-1/").text

    assert 'id="no-details"' in text
    assert "--enable-prompt-tokens-details" in text
    assert 'id="no-details"' not in visitor.get("/replicas/gpu-2/").text


NOT_REPORTED = '<span class="value none">not reported by this engine</span>'


def test_a_replica_without_prefix_caching_is_told_how_to_switch_it_on(visitor, fleet):
    Reading.objects.filter(replica=Replica.objects.get(name="gpu-1")).update(
        queries=0, hits=0
    )  # as vLLM counts without it
    assert visitor.get("/replicas/gpu-1/").text.count(NOT_REPORTED) == 0
    ScrapeState.objects.filter(replica__name="gpu-1").update(lacks_prefix_cache=True)
    text = visitor.get("/replicas/gpu-1/").text

    assert 'id="caching-off"' in text
    assert NOT_REPORTED in text, "its hit rate, instead of a claim that there is no traffic"
    assert "prefix caching is off" in text, "the reason of its health"
    assert 'id="caching-off"' not in visitor.get("/replicas/gpu-2/").text


def test_pages_say_which_share_of_the_responses_a_group_s_hit_rate_rests_on(visitor, fleet):
    RouterReading.objects.filter(group="coding", usage_reported__gt=0).update(ok_requests=F("usage_reported") * 4)

    assert "of 25.0 % of responses" in visitor.get("/?pool=chat").text
    page = visitor.get("/pools/chat/groups/coding/").text
    assert "from 25.0 % of responses, which reported cached tokens: an upper bound" in page
    rows = visitor.get("/charts/hit-rate.csv?pool=chat&group=coding").text.splitlines()
    assert rows[0].endswith(",notes")
    assert "Hit rate covers 25.0 % of the responses." in rows[-1]
    assert "Hit rate covers 25.0 % of the responses." in visitor.get("/charts/hit-rate/?pool=chat&group=coding").text
