"""OpenAI's client through the router: its results are those of a replica without the router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI

from tests.clients.servers import EMBEDDER, KEY, MODEL, ClientPair, Servers

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]


@pytest.fixture
def both(servers: Servers) -> Iterator[ClientPair[OpenAI]]:
    options: Any = {"api_key": KEY, "max_retries": 0, "timeout": 30}
    with (
        OpenAI(base_url=f"{servers.router}/v1", **options) as routed,
        OpenAI(base_url=f"{servers.direct}/v1", **options) as direct,
    ):
        yield ClientPair(routed, direct)


@pytest.fixture
async def both_async(servers: Servers) -> AsyncIterator[ClientPair[AsyncOpenAI]]:
    options: Any = {"api_key": KEY, "max_retries": 0, "timeout": 30}
    async with (
        AsyncOpenAI(base_url=f"{servers.router}/v1", **options) as routed,
        AsyncOpenAI(base_url=f"{servers.direct}/v1", **options) as direct,
    ):
        yield ClientPair(routed, direct)


@pytest.fixture
def embedders(servers: Servers) -> Iterator[ClientPair[OpenAI]]:
    options: Any = {"api_key": KEY, "max_retries": 0, "timeout": 30}
    with (
        OpenAI(base_url=f"{servers.router}/v1", **options) as routed,
        OpenAI(base_url=f"{servers.direct_embedder}/v1", **options) as direct,
    ):
        yield ClientPair(routed, direct)


def arguments(text: str, **fields: Any) -> Any:
    messages = [{"role": "system", "content": f"{text} Be brief."}, {"role": "user", "content": "Hello?"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 12} | fields


# --- chat ---


def test_chat(both: ClientPair[OpenAI]) -> None:
    response = both.equal_result(lambda client: client.chat.completions.create(**arguments("Chat.", n=2)))
    assert [len(choice.message.content or "") for choice in response.choices] == [48, 48]


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False}])
def test_a_stream(both: ClientPair[OpenAI], options: dict[str, bool] | None) -> None:
    fields = {} if options is None else {"stream_options": options}
    chunks = both.equal_result(
        lambda client: list(client.chat.completions.create(**arguments(f"Stream {options}.", stream=True, **fields)))
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert len(text) == 48
    assert [chunk.usage is not None for chunk in chunks[-2:]] == [False, bool(options and options["include_usage"])]


async def test_chat_of_an_asynchronous_client(both_async: ClientPair[AsyncOpenAI]) -> None:
    response = await both_async.equal_result_async(lambda client: client.chat.completions.create(**arguments("Async.")))
    assert response.choices[0].finish_reason == "length"

    async def stream(client: AsyncOpenAI) -> list[Any]:
        return [
            chunk async for chunk in await client.chat.completions.create(**arguments("Async stream.", stream=True))
        ]

    assert len(await both_async.equal_result_async(stream)) > 12


def test_a_conversation_finds_its_earlier_turns_cached(both: ClientPair[OpenAI]) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is a prefix cache? " * 40}]
    for _ in range(3):
        request = arguments("", messages=messages, max_tokens=20)
        response = both.equal_result(lambda client, request=request: client.chat.completions.create(**request))
        text = response.choices[0].message.content
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    assert response.usage
    assert response.usage.prompt_tokens_details
    assert (response.usage.prompt_tokens_details.cached_tokens or 0) > 0.9 * response.usage.prompt_tokens


# --- tools ---


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "read"}}])
def test_a_tool_call_and_its_result(both: ClientPair[OpenAI], choice: Any) -> None:
    request = arguments(f"Call {choice}.", tools=TOOLS, max_tokens=100)
    response = both.equal_result(lambda client: client.chat.completions.create(**request, tool_choice=choice))
    message = response.choices[0].message
    (call,) = message.tool_calls or ()
    assert (call.function.name, response.choices[0].finish_reason) == ("read", "tool_calls")
    assert list(json.loads(call.function.arguments)) == ["path"]

    result = {"role": "tool", "tool_call_id": "c", "content": "A line."}
    calls = [{"id": "c", "type": "function", "function": call.function.model_dump()}]
    turns = [*request["messages"], {"role": "assistant", "content": None, "tool_calls": calls}, result]
    followed = both.equal_result(lambda client: client.chat.completions.create(**request | {"messages": turns}))
    assert followed.choices[0].message.content


def test_a_tool_call_in_a_stream(both: ClientPair[OpenAI]) -> None:
    request = arguments("Call.", tools=TOOLS, tool_choice="required", max_tokens=100)

    def final(client: OpenAI) -> Any:
        with client.chat.completions.stream(**request) as stream:
            return stream.get_final_completion()

    (call,) = both.equal_result(final).choices[0].message.tool_calls
    assert list(json.loads(call.function.arguments)) == ["path"]


async def test_a_tool_call_in_an_asynchronous_stream(both_async: ClientPair[AsyncOpenAI]) -> None:
    request = arguments("Call later.", tools=TOOLS, tool_choice="required", max_tokens=100)

    async def final(client: AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(**request) as stream:
            return await stream.get_final_completion()

    assert (await both_async.equal_result_async(final)).choices[0].message.tool_calls


# --- completions, embeddings ---


@pytest.mark.parametrize("prompt", ["Once upon a time", ["One. ", "Two. "], [1, 2, 3]])
def test_completions(both: ClientPair[OpenAI], prompt: Any) -> None:
    request: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
    response = both.equal_result(lambda client: client.completions.create(**request))
    chunks = both.equal_result(lambda client: list(client.completions.create(**request, stream=True)))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == 0) == (
        response.choices[0].text
    )


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"dimensions": 32}])
def test_embeddings(embedders: ClientPair[OpenAI], options: Any) -> None:
    request: Any = {"model": EMBEDDER, "input": ["A text.", "Another."], **options}
    response = embedders.equal_result(lambda client: client.embeddings.create(**request))
    assert [type(item.embedding[0]) for item in response.data] == [float, float]


# --- responses ---


def test_a_response_is_stored_continued_and_retrieved(both: ClientPair[OpenAI]) -> None:
    def turns(client: OpenAI) -> list[Any]:
        first = client.responses.create(model=MODEL, input="A stored question.", max_output_tokens=12)
        again = client.responses.retrieve(first.id)
        assert again.model_dump() == first.model_dump()
        following = {"input": "And then?", "previous_response_id": first.id}
        return [first, client.responses.create(model=MODEL, max_output_tokens=12, **following)]

    first, second = both.equal_result(turns)
    assert first.output_text
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_response_in_a_stream(both: ClientPair[OpenAI]) -> None:
    request: Any = {"model": MODEL, "input": "A streamed question.", "max_output_tokens": 12}
    events = both.equal_result(lambda client: list(client.responses.create(**request, stream=True)))
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )

    def final(client: OpenAI) -> Any:
        with client.responses.stream(**request | {"input": "Another one."}) as stream:
            return stream.get_final_response()

    assert both.equal_result(final).output_text


async def test_a_response_that_calls_a_tool(both_async: ClientPair[AsyncOpenAI]) -> None:
    tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
    request: Any = {"model": MODEL, "tools": tools, "tool_choice": "required"}

    async def call(client: AsyncOpenAI) -> list[Any]:
        whole = await client.responses.create(**request, input="Read a file.")
        stream = await client.responses.create(**request, input="Read another.", stream=True)
        events = [event async for event in stream]
        return [whole, events]

    whole, events = await both_async.equal_result_async(call)
    assert list(json.loads(whole.output[0].arguments)) == ["path"]
    assert "response.function_call_arguments.done" in {event.type for event in events}
    result: Any = {"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "A line."}
    fields: Any = {"input": [result], "previous_response_id": whole.id, "max_output_tokens": 12}
    assert (await both_async.routed.responses.create(model=MODEL, **fields)).output_text


@pytest.mark.parametrize("method", ["delete", "cancel", "retrieve"])
def test_errors_of_stored_responses_are_those_of_the_replica(both: ClientPair[OpenAI], method: str) -> None:
    def act(client: OpenAI, response_id: str) -> Any:
        with pytest.raises(APIStatusError) as raised:
            getattr(client.responses, method)(response_id)
        body: Any = raised.value.body
        return [type(raised.value).__name__, raised.value.status_code, "message" in body]

    def stored(client: OpenAI) -> Any:
        if method == "retrieve":
            return act(client, "resp_unknown")
        return act(client, client.responses.create(model=MODEL, input=method, max_output_tokens=4).id)

    assert both.equal_result(stored)


# --- models ---


async def test_models(both: ClientPair[OpenAI], both_async: ClientPair[AsyncOpenAI]) -> None:
    names = {model.id for model in both.routed.models.list()}
    assert names == {MODEL, EMBEDDER, "gone"}
    assert both.routed.models.retrieve(MODEL).id == MODEL
    assert (await both_async.routed.models.retrieve(EMBEDDER)).object == "model"


# --- lower levels ---


def test_raw_responses_name_the_request(both: ClientPair[OpenAI]) -> None:
    create = both.routed.chat.completions.with_raw_response.create
    raw = create(**arguments("Raw."), extra_headers={"X-Request-Id": "my-request"})
    assert (raw.headers["x-request-id"], raw.request_id) == ("my-request", "my-request")
    assert raw.headers["x-warmpath-replica"] in {"tiny-0", "tiny-1"}
    assert raw.parse().choices
