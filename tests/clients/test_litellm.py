"""LiteLLM through the router, as a client of OpenAI's and of Anthropic's API."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from tests.clients.servers import EMBEDDER, GONE, KEY, MODEL, OTHER_KEY, SLOW_KEY, ClientPair, Servers

litellm.telemetry = False
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


@pytest.fixture
def both(servers: Servers) -> ClientPair[str]:
    return ClientPair(f"{servers.router}/v1", f"{servers.direct}/v1")


def arguments(base: str, text: str, **fields: Any) -> Any:
    messages = [{"role": "system", "content": f"{text} Be brief."}, {"role": "user", "content": "Hello?"}]
    request = {"model": f"openai/{MODEL}", "messages": messages, "max_tokens": 12, "api_key": KEY, "api_base": base}
    return request | {"num_retries": 0, "max_retries": 0, "timeout": 30} | fields


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_chat(both: ClientPair[str], provider: str) -> None:
    model = f"{provider}/{MODEL}"
    response = both.equal_result(lambda base: litellm.completion(**arguments(base, f"{provider}.", model=model)))
    chunks = both.equal_result(
        lambda base: list(litellm.completion(**arguments(base, f"{provider}!", model=model, stream=True)))
    )
    assert len(response.choices[0].message.content) == 48
    assert len("".join(chunk.choices[0].delta.content or "" for chunk in chunks)) == 48


async def test_asynchronous_chat(both: ClientPair[str]) -> None:
    async def read(base: str) -> list[Any]:
        return [chunk async for chunk in await litellm.acompletion(**arguments(base, "Async stream.", stream=True))]

    assert await both.equal_result_async(lambda base: litellm.acompletion(**arguments(base, "Async.")))
    assert await both.equal_result_async(read)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_call(both: ClientPair[str], is_streamed: bool) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100, "stream": is_streamed}

    def call(base: str) -> Any:
        response = litellm.completion(**arguments(base, f"Call {is_streamed}.", **fields))
        # For a stream, LiteLLM estimates the usage from a text that contains the random id of the tool call.
        return litellm.stream_chunk_builder(list(response)).choices if is_streamed else response.choices

    (choice,) = both.equal_result(call)
    assert (choice.finish_reason, choice.message.tool_calls[0].function.name) == ("tool_calls", "read")


def test_completions_and_embeddings(both: ClientPair[str], servers: Servers) -> None:
    options: Any = {"api_key": KEY, "max_retries": 0, "timeout": 30}
    text = both.equal_result(
        lambda base: litellm.text_completion(
            model=f"text-completion-openai/{MODEL}", prompt="Once.", max_tokens=8, api_base=base, **options
        )
    )
    assert text.choices[0].text
    embedders = ClientPair(both.routed, f"{servers.direct_embedder}/v1")
    response = embedders.equal_result(
        lambda base: litellm.embedding(model=f"openai/{EMBEDDER}", input=["A text."], api_base=base, **options)
    )
    assert response.data


async def test_messages_and_responses(servers: Servers) -> None:
    both = ClientPair(servers.router, servers.direct)
    options: Any = {"api_key": KEY, "num_retries": 0, "timeout": 30}
    message = await both.equal_result_async(
        lambda base: litellm.anthropic.messages.acreate(
            model=f"anthropic/{MODEL}",
            messages=[{"role": "user", "content": "A message of LiteLLM."}],
            max_tokens=12,
            api_base=base,
            **options,
        )
    )
    assert message["content"]
    response = await both.equal_result_async(
        lambda base: litellm.aresponses(
            model=f"openai/{MODEL}", input="A response.", max_output_tokens=12, api_base=f"{base}/v1", **options
        )
    )
    assert response.output


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_tokens": -1}, litellm.BadRequestError),
        ({"api_key": OTHER_KEY}, litellm.AuthenticationError),
        ({"model": "openai/unknown"}, litellm.NotFoundError),
        ({"model": f"openai/{GONE}"}, litellm.ServiceUnavailableError),
    ],
)
def test_an_error_is_raised_as_its_class(both: ClientPair[str], fields: Any, error: type[Exception]) -> None:
    for is_streamed in (False, True):
        with pytest.raises(error):
            litellm.completion(**arguments(both.routed, "An error.", stream=is_streamed, **fields))


def test_a_rate_limit_is_raised_as_its_class(both: ClientPair[str]) -> None:
    litellm.completion(**arguments(both.routed, "A burst.", api_key=SLOW_KEY) | {"max_retries": 5})
    with pytest.raises(litellm.RateLimitError):
        litellm.completion(**arguments(both.routed, "Too fast.", api_key=SLOW_KEY))
