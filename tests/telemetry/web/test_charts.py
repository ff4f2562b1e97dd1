import csv
import io
import re
import statistics
from datetime import timedelta

import pytest

from controlplane.models import Pool, Replica
from controlplane.services.fleet.pools import create_pool
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from telemetry.web.charts import CHARTS


@pytest.mark.parametrize("slug", CHARTS)
def test_a_figure_has_lines_marks_and_a_sentence(visitor, fleet, slug):
    figure = visitor.get(f"/charts/{slug}/figure/?range=15m").json()

    kinds = [trace["meta"] for trace in figure["data"]]
    assert "line" in kinds
    assert kinds[-1] == "events"
    assert "UTC. Latest values: " in figure["meta"]["summary"]
    assert "2 events marked" in figure["meta"]["summary"]
    assert figure["meta"]["empty"] == ""
    notes = figure["layout"]["annotations"]
    assert [note["text"] for note in notes if note.get("name") != "policy"] == ["gpu-4 restart"]
    assert notes[1] | {"text": "prefix_hash r2", "name": "policy", "x": "2031-03-04T11:55:00"} == notes[1]
    assert figure["meta"]["events"] == [
        ["2031-03-04T11:55:00", "Policy chat revision 2 (prefix_hash) is active."],
        ["2031-03-04T11:58:00", "Replica gpu-4 restarted; its cache is cold."],
    ]


def test_each_policy_is_a_named_band_and_of_several_pools_the_mark_has_its_name(visitor, fleet, noon, monkeypatch):
    Pool.objects.filter(pk=fleet.pk).update(created_at=noon - timedelta(minutes=9))

    def bands(query):
        layout = visitor.get(f"/charts/hit-rate/figure/?range=15m&{query}").json()["layout"]
        shades = [shape["x0"][11:] for shape in layout["shapes"] if shape["type"] == "rect"]
        bands = [note for note in layout["annotations"] if note.get("name") == "policy"]
        return [(note["text"], note["x"][11:]) for note in bands], shades

    changes = [("prefix_hash r2", "11:55:00"), ("lowest_cost", "11:51:00")]
    assert bands("") == bands("pool=chat") == (changes, ["11:55:00"])
    assert bands("pool=chat&group=coding")[0] == changes
    assert [note[0] for note in bands("from=2031-03-04T11:56&to=2031-03-04T11:58")[0]] == ["prefix_hash r2"]
    assert [note[0] for note in bands("from=2031-03-04T11:52&to=2031-03-04T11:54")[0]] == ["lowest_cost"]
    save_and_publish(fleet, "random")
    assert bands("")[0][0] == ("prefix_hash r2", "11:55:00"), "one that is active from now on has no band yet"
    assert [note[0] for note in bands("from=2031-03-04T11:52&to=2031-03-04T11:54")[0]] == ["lowest_cost"]
    monkeypatch.setattr("telemetry.services.figures.groups.MAX_PERIODS", 1)
    assert [note[0] for note in bands("from=2031-03-04T11:56&to=2031-03-04T11:58")[0]] == ["prefix_hash r2"]
    create_pool("other", models=["other"])
    figure = visitor.get("/charts/hit-rate/figure/?range=15m").json()
    assert next(note["text"] for note in figure["layout"]["annotations"]) == "chat: prefix_hash r2"


def save_and_publish(pool, strategy):
    return publish_revision(save_draft(pool.policies.get(group=None), {"strategy": strategy}).pk, reason="a test")


def test_of_more_than_two_replicas_kv_usage_is_a_median_in_a_band(visitor, fleet):
    def traces(query):
        return visitor.get(f"/charts/utilization/figure/?range=15m&{query}").json()["data"]

    edge, *lines, _ = traces("")
    assert (edge["meta"], [line["name"] for line in lines]) == ("edge", ["median of 4", "highest", "lowest"])
    assert [line["name"] for line in traces("util=kv_replica")[:-1]] == [f"gpu-{n}" for n in range(1, 5)]
    rows = list(csv.reader(io.StringIO(visitor.get("/charts/utilization.csv?range=15m").text)))
    assert rows[0][1] == "gpu-1 (ratio)"
    newest = [float(value) for value in rows[-1][1:]]
    assert [line["y"][-1] for line in lines] == [
        pytest.approx(value, rel=1e-3) for value in (statistics.median(newest), max(newest), min(newest))
    ]
    Replica.objects.filter(name__in=["gpu-3", "gpu-4"]).delete()
    assert [line["name"] for line in traces("")[:-1]] == ["gpu-1", "gpu-2"]


def test_a_gap_stays_a_gap(visitor, fleet):
    lines = {trace["name"]: trace for trace in visitor.get("/charts/hit-rate/figure/?by=replica").json()["data"]}

    assert None in lines["gpu-4"]["y"]
    assert lines["gpu-4"]["connectgaps"] is False


def test_a_chart_costs_few_queries(visitor, fleet, django_assert_max_num_queries):
    with django_assert_max_num_queries(11):
        visitor.get("/charts/hit-rate/figure/")


def test_csv_has_a_column_per_line_and_leaves_the_unknown_empty(visitor, fleet):
    answer = visitor.get("/charts/hit-rate.csv?range=15m&by=replica")

    rows = list(csv.reader(io.StringIO(answer.text)))
    assert rows[0] == ["time", *(f"gpu-{number} (ratio)" for number in range(1, 5))]
    assert rows[1][1:] == ["", "", "", ""]
    assert 0 < float(rows[-2][1]) < 1
    assert "attachment" in answer["Content-Disposition"]
    rates = visitor.get("/charts/requests.csv?range=15m").text.splitlines()[0]
    assert rates.startswith("time,OK (count per second)")


def test_json_says_why_a_value_is_missing(visitor, fleet):
    document = visitor.get("/charts/hit-rate.json?range=15m&by=replica").json()

    line = document["series"][-1]
    states = {state for (_, value), state in zip(line["points"], line["states"], strict=True) if value is None}
    assert states == {"unknown", "stale"}


def test_the_table_behind_a_chart_needs_no_scripts(visitor, fleet):
    text = visitor.get("/charts/hit-rate/?range=5m&by=replica").text

    assert '<th scope="col" class="num">gpu-1</th>' in text
    assert "stale: scrapes fail" in text
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</tr>", visitor.get("/charts/hit-rate/?range=24h").text)
    assert 0 < len(rows) < 10  # without the hours before the first value
    assert re.search(r"\d %", rows[-1])


@pytest.mark.parametrize("path", ["/charts/none/", "/charts/none/figure/", "/charts/none.csv", "/charts/none.json"])
def test_a_chart_that_does_not_exist_is_not_found(visitor, path):
    assert visitor.get(path).status_code == 404


def test_an_empty_chart_says_why(visitor):
    figure = visitor.get("/charts/ttft/figure/").json()

    assert figure["meta"]["empty"] == "no streamed response"
    assert "no data" in figure["meta"]["summary"]


@pytest.mark.parametrize(
    ("chart", "reason"),
    [
        ("ttft/figure/?clock=plain", "all responses were streamed"),
        ("ttft/figure/?clock=split", "no engine reported time in queue or in prefill"),
        ("tiers/figure/?tier=media", "no engine reported multimodal items"),
        ("tiers/figure/?tier=blocks", "--kv-cache-metrics"),
        ("utilization/figure/?util=reason", "no engine reported waiting requests by reason"),
    ],
)
def test_an_empty_chart_of_an_optional_metric_names_the_missing_metric(visitor, fleet, chart, reason):
    assert reason in visitor.get(f"/charts/{chart}&replica=gpu-1").json()["meta"]["empty"]


def test_the_title_names_the_reachable_hit_rate_only_where_it_is_known(visitor, fleet):
    def meta(query):
        return visitor.get(f"/charts/hit-rate/figure/?by=whole&{query}").json()["meta"]

    assert (meta("replica=gpu-1")["title"], meta("replica=gpu-1")["notes"]) == ("Hit rate", [])
    pool = meta("pool=chat")
    assert pool["title"] == "Hit rate and reachable hit rate"
    assert "Reachable hit rate: too few requests replayed yet." in " ".join(pool["notes"])
