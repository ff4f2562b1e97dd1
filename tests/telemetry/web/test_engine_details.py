"""Views of charts of what only some engines report."""

import pytest

from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from telemetry.models import ScrapeState
from tests.telemetry import engine_details as details


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("ttft.json?clock=split", details.QUEUE_AND_PREFILL),
        ("utilization.json?util=reason", details.WAITING_BY_REASON),
        ("tiers.json?tier=source", details.PROMPT_SOURCES),
        ("tiers.json?tier=media", details.MULTIMODAL),
        ("tiers.json?tier=blocks", details.BLOCK_TIMES),
        ("tiers.json?tier=evictions", details.EVICTIONS),
        ("tiers.json?tier=churn", details.CHURN),
    ],
)
@pytest.mark.parametrize("subject", ["pool=chat", "replica=r1"])
def test_a_view_draws_the_figure_that_it_is_named_after(visitor, noon, path, expected, subject):
    details.read_details(add_replica(create_pool("chat"), name="r1", url="http://10.0.0.1:8000"), noon)

    document = visitor.get(f"/charts/{path}&range=5m&{subject}").json()

    drawn = {line["label"]: [value for _, value in line["points"] if value is not None] for line in document["series"]}
    assert {label: values[-1] for label, values in drawn.items() if values} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("adapters", "shown"),
    [
        (None, ""),
        ([], "none"),
        (["alpha", "<script>alert(1)</script>"], "alpha, &lt;script&gt;alert(1)&lt;/script&gt;"),
    ],
)
def test_the_replica_s_page_names_the_adapters_in_use(visitor, noon, adapters, shown):
    replica = add_replica(create_pool("chat"), name="r1", url="http://10.0.0.1:8000")
    ScrapeState.objects.create(replica=replica, at=noon, ok_at=noon, health="up", lora_adapters=adapters)

    page = visitor.get("/replicas/r1/").text

    assert "<script>alert(1)" not in page
    assert page.partition("<dt>LoRA adapters in use</dt><dd>")[2].partition("</dd>")[0] == shown
