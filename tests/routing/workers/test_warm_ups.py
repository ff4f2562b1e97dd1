"""Several workers warm a replica up together: each prefix once, and metrics of all."""

from __future__ import annotations

from routing.schema import WarmUp
from tests.routing.proxy.harness import samples
from tests.routing.proxy.warm_ups import PREFIXES, body, prefix_text, sent_to_warm, system_prompts, with_warm_up
from tests.routing.workers.harness import serving

TURNS = 24  # so that whichever worker an opening is of meets it twice


async def test_workers_divide_the_prefixes_of_a_warm_up(three, tmp_path):
    *known, new = three
    async with serving(tmp_path, with_warm_up(known), "--workers=2") as router:
        for _ in range(TURNS):
            for number in range(PREFIXES):
                assert (await router.chat(body(number))).status == 200
        assert (await router.push(with_warm_up(three, WarmUp(time_limit_s=600)), 2))[0] == 200

        async def both_are_done() -> bool:
            _, text = await router.admin("GET", "/metrics")
            seen = samples(text)
            endings = seen.get("warmpath_router_warm_ups_total", [])
            return sum(value for labels, value in endings if labels["ending"] == "complete") == 2

        await router.until(both_are_done, "the warm-ups of both workers")
        own = [number for number in range(PREFIXES) if (await router.chat(body(number))).replica == new.name]
        warmed = sent_to_warm(new)

    assert len(own) > 4
    assert len({call.header(b"x-request-id")[0].split(b"-")[2] for call in warmed}) == 2
    assert len(system_prompts(warmed)) == len(set(system_prompts(warmed)))
    assert set(system_prompts(warmed)) == {prefix_text(number) for number in own}
