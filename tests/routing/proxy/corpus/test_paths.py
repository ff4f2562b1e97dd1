"""Paths of vLLM outside the contract, in every spelling that some server understands, reach no replica."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from routing.schema import HealthCheck
from tests.routing.proxy.corpus.readers import PROBE_PATH, Recorder, recording
from tests.routing.proxy.harness import Harness, config, get, routed

on_one_loop = pytest.mark.asyncio(loop_scope="module")

# vLLM 0.33; its API key guards only what is below /v1, /v2, /inference and /cohere. ``docs/usage/security.md``.
PATHS = (
    *(b"/invocations", b"/ping", b"/pause", b"/resume", b"/is_paused", b"/abort_requests", b"/sleep", b"/wake_up"),
    *(b"/is_sleeping", b"/collective_rpc", b"/reset_prefix_cache", b"/reset_mm_cache", b"/reset_encoder_cache"),
    *(b"/server_info", b"/update_weights", b"/init_weight_transfer_engine", b"/get_world_size", b"/scale_elastic_ep"),
    *(b"/is_scaling_elastic_ep", b"/start_profile", b"/stop_profile", b"/tokenizer_info"),
    *(b"/metrics", b"/load", b"/version", b"/kv_event_sources", b"/docs", b"/redoc", b"/openapi.json"),
    *(b"/generative_scoring", b"/inference/v1/generate", b"/v2/embed", b"/cohere/v2/chat", b"/v1/messages/render"),
    *(b"/v1/messages/batches", b"/v1/audio/speech", b"/v1/realtime", b"/v1/responses/x/render", b"/v2/score"),
    *(b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter", b"/v1/chat/completions/render", b"/v1/systemone"),
    *(b"/v1/completions/render", b"/v1/chat/completions/batch", b"/admin/config", b"/", b"/v1", b"/v1/chat"),
)


def _each_letter(path: bytes) -> bytes:
    return b"/" + b"".join(b"%%%02x" % byte for byte in path[1:])


DISGUISES: dict[str, Callable[[bytes], bytes]] = {
    "none": lambda path: path,
    "a slash behind": lambda path: path + b"/",
    "two slashes": lambda path: b"/" + path,
    "slashes": lambda path: path.replace(b"/", b"//"),
    "a network path": lambda path: b"//router" + path,
    "a dot segment": lambda path: b"/." + path,
    "a dot segment behind": lambda path: path + b"/.",
    "a dotted detour": lambda path: b"/v1/completions/../.." + path,
    "an encoded detour": lambda path: b"/v1/completions/%2e%2e/%2e%2e" + path,
    "a doubly encoded detour": lambda path: b"/v1/completions/%252e%252e/%252e%252e" + path,
    "a detour with encoded slashes": lambda path: b"/v1/completions%2f..%2f.." + path.replace(b"/", b"%2f"),
    "a detour with backslashes": lambda path: b"/v1/completions\\..\\.." + path.replace(b"/", b"\\"),
    "a detour with parameters": lambda path: b"/v1/completions/..;/..;" + path,
    "a detour behind an allowed path": lambda path: b"/health/.." + path,
    "overlong dots": lambda path: b"/v1/completions/%c0%ae%c0%ae/%c0%ae%c0%ae" + path,
    "parameters": lambda path: path + b";a=b",
    "an encoded slash": lambda path: path.replace(b"/", b"%2f"),
    "every letter encoded": _each_letter,
    "capitals": lambda path: path.upper(),
    "an encoded NUL behind": lambda path: path + b"%00",
    "an encoded blank behind": lambda path: path + b"%20",
    "an encoded line end behind": lambda path: path + b"%0d%0aHost:%20other",
    "an encoded query": lambda path: path + b"%3fa=b",
    "an encoded fragment": lambda path: b"/v1/completions%23/../.." + path,
    "a fragment": lambda path: b"/v1/completions#/../.." + path,
    "a fragment behind": lambda path: path + b"#/v1/completions",
    "a query": lambda path: path + b"?/v1/completions",
    "an allowed path before": lambda path: b"/v1/completions" + (b"/." if path == b"/" else path),
    "an extension": lambda path: path + b".json",
    "absolute form": lambda path: b"http://router" + path,
    "absolute form in capitals": lambda path: b"HTTP://ROUTER" + path,
    "absolute form, two slashes": lambda path: b"http://router/" + path,
    "absolute form, another host": lambda path: b"http://other" + path,
    "absolute form without a path": lambda path: b"http://router?" + path,
    "the asterisk": lambda path: b"*" + path,
    "no slash": lambda path: path[1:] or b"*",
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def edge() -> AsyncIterator[tuple[Harness, Recorder]]:
    health = HealthCheck(path=PROBE_PATH, interval_s=3600)
    async with recording() as recorder, routed(config([recorder], health=health)) as harness:
        await harness.until(lambda: bool(recorder.take()), "the router's own request for the list of models")
        yield harness, recorder


@on_one_loop
@pytest.mark.parametrize("disguise", DISGUISES)
async def test_only_contract_paths_reach_a_replica(disguise, edge):
    harness, recorder = edge
    for path in PATHS:
        target = DISGUISES[disguise](path)
        for method in (b"GET", b"POST", b"HEAD", b"DELETE"):
            async with harness.connect() as client:
                await client.send(get(target, method=method))
                response = await client.read_response(bodyless=method == b"HEAD")
                assert response.status in {404, 400, 421}, target
    await harness.at_rest()
    assert recorder.received == recorder.violations == []


@on_one_loop
async def test_contract_paths_reach_a_replica(edge):
    harness, recorder = edge
    recorder.take()
    async with harness.connect() as client:
        for target in (b"/v1/models", b"/v1/models?a=/../pause", b"http://router/v1/models"):
            assert (await client.ask(get(target))).status == 200
    assert [received.target for received in recorder.take()] == [
        b"/v1/models",
        b"/v1/models?a=/../pause",
        b"/v1/models",
    ]
