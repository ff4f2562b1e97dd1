"""Openings are described for a few requests, beside the decision, and cost the others nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from routing.observability.decision_log import GROUP_S, MAX_PER_S, StructureSampler, structure_json
from routing.proxy import exchange
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import config as routed_config
from tests.routing.proxy.harness import routed


def body(**fields: Any) -> bytes:
    messages = [{"role": "system", "content": "Today is 2026-11-21. Canary."}, {"role": "user", "content": "Hello"}]
    return json.dumps({"model": "tiny", "messages": messages, **fields}).encode()


async def test_the_first_decision_of_a_second_tells_its_opening_without_text(replica: FakeReplica) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"b": 1, "a": 2}}}]
    async with routed(routed_config([replica])) as harness:
        await harness.chat(body(tools=tools, user="someone"))
        await harness.chat(body())
        _, listed = await harness.admin("GET", "/admin/decisions")
    first, second = listed["decisions"]

    opening = first["opening"]
    assert [segment["kind"] for segment in opening["segments"]] == ["tools", "system", "user"]
    assert [(token["kind"], token["bytes"]) for token in opening["volatile"]][-1] == ("date", 10)
    assert opening["tools"]["count"] == 1
    assert opening["session"]
    assert "Canary" not in json.dumps(listed)
    assert second["opening"] is None
    assert all("cost" in candidate for candidate in first["candidates"])
    assert not any("cost" in candidate for candidate in second["candidates"])


class Decided:
    """A decision of a task group, as far as it is described."""

    def __init__(self, group: str) -> None:
        self.pool, self.group = "chat", group
        self.described = 0

    @property
    def keys(self) -> Any:
        return self

    def structure(self, _tools: Any) -> Any:
        raise ValueError("no such thing")


class Asked:
    """A request that arrived at a moment."""

    body = b"{}"

    def __init__(self, at: float) -> None:
        self.arrived_at = at


@pytest.mark.plain_python(reason="Its decisions are of a class of their own.")
@pytest.mark.parametrize(("groups", "per_s", "expected"), [(1, 100, 1.0), (4, 400, 4.0), (100, 1000, MAX_PER_S)])
def test_so_many_are_described_and_no_more(groups: int, per_s: int, expected: float) -> None:
    sampler, looked, seconds, chance = StructureSampler(), 0, 20, random.Random(5)
    decided = [Decided(f"group-{number}") for number in range(groups)]
    for number in range(per_s * seconds):
        at, chosen = number / per_s, chance.choice(decided)
        looked += at >= sampler.due_at
        chosen.described += sampler.should_sample(chosen, at)  # type: ignore[arg-type]
    described = [one.described for one in decided]

    assert sum(described) <= expected * seconds + groups
    assert sum(described) >= 0.8 * expected * seconds
    assert max(described) <= seconds / GROUP_S + 1
    assert looked <= 60 * seconds


@pytest.mark.plain_python(reason="Its decisions are of a class of their own.")
def test_a_description_that_fails_fails_nobody(caplog: pytest.LogCaptureFixture) -> None:
    assert structure_json(Decided("broken"), Asked(5.0)) is None  # type: ignore[arg-type]
    assert "prompt structure" in caplog.text


@pytest.mark.plain_python(reason="It replaces what the router calls.")
async def test_a_request_is_on_its_way_before_its_opening_is_described(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def noting(name: str, owner: Any, attribute: str) -> None:
        genuine = getattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, lambda *args: (told.append(name), genuine(*args))[1])

    noting("sent", exchange.Exchange, "_send")
    noting("described", exchange, "structure_json")
    async with routed(routed_config([replica])) as harness:
        await harness.chat()  # on a new connection, which is waited for
        told.clear()
        harness.router.services.structure_sampler = StructureSampler()
        await harness.chat()

    assert told == ["sent", "described"]
