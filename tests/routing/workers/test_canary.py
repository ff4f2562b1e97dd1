"""A canary with several workers."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.replica import FakeReplica, sse, streaming
from tests.routing.proxy.harness import HISTOGRAM, body, samples, with_canary
from tests.routing.workers.harness import serving

PROMPTS, TURNS = 6, 8


async def test_all_workers_send_the_same_prefixes_to_the_canary_and_their_metrics_add_up(
    replica: FakeReplica, tmp_path: Path
) -> None:
    replica.script = streaming(sse("[DONE]"))  # TTFT is of streamed responses
    async with serving(tmp_path, with_canary([replica], 0.5, routers=("tested",)), "--workers=2") as router:
        answers = {n: [await router.chat(body(n)) for _ in range(TURNS)] for n in range(PROMPTS)}

        async def all_counted() -> bool:
            _, text = await router.admin("GET", "/metrics")
            counted = samples(text).get(f"{HISTOGRAM}_count", [])
            return sum(value for _, value in counted) == PROMPTS * TURNS

        await router.until(all_counted, "the sums of both workers")
        _, text = await router.admin("GET", "/metrics")

    revisions_of = {n: {answer.headers["x-warmpath-revision"] for answer in sent} for n, sent in answers.items()}
    workers = {answer.headers["x-request-id"][:16] for sent in answers.values() for answer in sent}
    assert len(workers) == 2
    assert all(len(revisions) == 1 for revisions in revisions_of.values())
    assert {revision for revisions in revisions_of.values() for revision in revisions} == {"1", "2"}
    of_canary = sum(TURNS for revisions in revisions_of.values() if revisions == {"2"})
    counted = {labels["revision"]: value for labels, value in samples(text)[f"{HISTOGRAM}_count"]}
    assert counted == {"1": PROMPTS * TURNS - of_canary, "2": of_canary}
