"""Anthropic's client through the router: its results are those of a replica without the router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.clients.servers import GONE, KEY, MODEL, OTHER_KEY, SLOW_KEY, ClientPair, Servers

TOOLS: list[Any] = [
    {
        "name": "read",
        "description": "Reads a file.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
]
LONG = 60_000  # tokens: several minutes


@pytest.fixture
def both(servers: Servers) -> Iterator[ClientPair[Anthropic]]:
    options: Any = {"api_key": KEY, "max_retries": 0, "timeout": 30}
    with (
        Anthropic(base_url=servers.router, **options) as routed,
        Anthropic(base_url=servers.direct, **options) as direct,
    ):
        yield ClientPair(routed, direct)


@pytest.fixture
async def both_async(servers: Servers) -> AsyncIterator[ClientPair[AsyncAnthropic]]:
    options: Any = {"auth_token": KEY, "max_retries": 0, "timeout": 30}  # as Authorization, not as x-api-key
    async with (
        AsyncAnthropic(base_url=servers.router, **options) as routed,
        AsyncAnthropic(base_url=servers.direct, **options) as direct,
    ):
        yield ClientPair(routed, direct)


def arguments(text: str, **fields: Any) -> Any:
    system = [{"type": "text", "text": f"{text} Be brief.", "cache_control": {"type": "ephemeral"}}]
    return {"model": MODEL, "system": system, "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 12} | (
        fields
    )


# --- messages ---


def test_a_message(both: ClientPair[Anthropic]) -> None:
    message = both.equal_result(lambda client: client.messages.create(**arguments("A message.")))
    assert (len(message.content[0].text), message.stop_reason) == (48, "max_tokens")


def test_a_stream_of_events(both: ClientPair[Anthropic]) -> None:
    events = both.equal_result(lambda client: list(client.messages.create(**arguments("Events."), stream=True)))
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]


def test_a_stream_is_accumulated(both: ClientPair[Anthropic]) -> None:
    def read(client: Anthropic) -> list[Any]:
        with client.messages.stream(**arguments("A stream.")) as stream:
            return [list(stream.text_stream), stream.get_final_message()]

    texts, message = both.equal_result(read)
    assert "".join(texts) == message.content[0].text
    assert message.usage.output_tokens == 12


async def test_messages_of_an_asynchronous_client(both_async: ClientPair[AsyncAnthropic]) -> None:
    message = await both_async.equal_result_async(lambda client: client.messages.create(**arguments("Async.")))
    assert message.role == "assistant"

    async def read(client: AsyncAnthropic) -> list[Any]:
        async with client.messages.stream(**arguments("An async stream.")) as stream:
            return [[text async for text in stream.text_stream], await stream.get_final_message()]

    texts, message = await both_async.equal_result_async(read)
    assert "".join(texts) == message.content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "read"}])
def test_a_tool_call_and_its_result(both: ClientPair[Anthropic], choice: Any) -> None:
    request = arguments(f"Call {choice}.", tools=TOOLS, max_tokens=100)
    message = both.equal_result(lambda client: client.messages.create(**request, tool_choice=choice))
    (call,) = message.content
    assert (call.type, call.name, list(call.input), message.stop_reason) == ("tool_use", "read", ["path"], "tool_use")

    turns = [
        *request["messages"],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "read", "input": call.input}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "A line."}]},
    ]
    followed = both.equal_result(lambda client: client.messages.create(**request | {"messages": turns}))
    assert followed.content[0].type == "text"


def test_a_tool_call_in_a_stream(both: ClientPair[Anthropic]) -> None:
    def read(client: Anthropic) -> Any:
        request = arguments("Call it in a stream.", tools=TOOLS, max_tokens=100)
        with client.messages.stream(**request, tool_choice={"type": "any"}) as stream:
            return stream.get_final_message()

    (call,) = both.equal_result(read).content
    assert list(call.input) == ["path"]


async def test_tokens_are_counted(both: ClientPair[Anthropic], both_async: ClientPair[AsyncAnthropic]) -> None:
    request = {name: value for name, value in arguments("Count.", tools=TOOLS).items() if name != "max_tokens"}
    counted = both.equal_result(lambda client: client.messages.count_tokens(**request))
    again = await both_async.equal_result_async(lambda client: client.messages.count_tokens(**request))
    usage = both.routed.messages.create(**request, max_tokens=4).usage
    created, read = usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0
    assert counted.input_tokens == again.input_tokens == usage.input_tokens + created + read


def test_models(both: ClientPair[Anthropic]) -> None:
    assert MODEL in {model.id for model in both.routed.models.list()}
    assert both.routed.models.retrieve(MODEL).id == MODEL


# --- errors ---


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"max_tokens": -1}, anthropic.BadRequestError, "BadRequestError"),  # of the replica, as vLLM names it
        ({"messages": "none"}, anthropic.BadRequestError, None),
        ({"model": "unknown"}, anthropic.NotFoundError, "not_found_error"),
        ({"model": GONE}, anthropic.InternalServerError, "overloaded_error"),
        ({"system": "x" * (2 << 20)}, anthropic.APIStatusError, "request_too_large"),
    ],
)
def test_an_error_is_raised_as_its_class(
    both: ClientPair[Anthropic], fields: Any, error: type[anthropic.APIStatusError], kind: str | None, is_streamed: bool
) -> None:
    with pytest.raises(error) as raised:
        both.routed.messages.create(**arguments("An error.", stream=is_streamed) | fields)
    statuses = {anthropic.BadRequestError: 400, anthropic.NotFoundError: 404, anthropic.InternalServerError: 503}
    body: Any = raised.value.body
    assert raised.value.status_code == statuses.get(error, 413)
    assert kind is None or body["error"]["type"] == kind


def test_an_unknown_key_is_an_authentication_error(servers: Servers) -> None:
    for options in ({"api_key": OTHER_KEY}, {"auth_token": OTHER_KEY}):
        with Anthropic(base_url=servers.router, max_retries=0, **options) as client:
            with pytest.raises(anthropic.AuthenticationError):
                client.messages.create(**arguments("No key."))
            with pytest.raises(anthropic.AuthenticationError):
                client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "Hello?"}])


def test_a_rate_limit_is_an_error_that_the_client_may_wait_for(servers: Servers) -> None:
    with Anthropic(base_url=servers.router, api_key=SLOW_KEY, max_retries=0) as client:
        client.with_options(max_retries=5).messages.create(**arguments("A burst of one."))
        with pytest.raises(anthropic.RateLimitError) as raised:
            client.messages.create(**arguments("Too fast."))
        assert 0 < int(raised.value.response.headers["retry-after"]) <= 2
        assert client.with_options(max_retries=2).messages.create(**arguments("Not too fast.")).content


def test_an_engine_that_crashes_in_a_stream_is_an_api_error(both: ClientPair[Anthropic], servers: Servers) -> None:
    for how in ("engine", "connection"):
        for replica in servers.replicas:
            replica.fault(kind="crash_after_chunks", chunks=5, how=how)
        try:
            with (
                pytest.raises((anthropic.APIStatusError, anthropic.APIConnectionError)),
                both.routed.messages.stream(**arguments("A crash.", max_tokens=30)) as stream,
            ):
                stream.get_final_message()
        finally:
            for replica in servers.replicas:
                replica.fault(kind="none")


def test_a_stream_that_is_closed_ends_the_generation(both: ClientPair[Anthropic], servers: Servers) -> None:
    with both.routed.messages.stream(**arguments("Close it.", max_tokens=LONG)) as stream:
        assert next(iter(stream.text_stream))
        assert servers.running() == 1
    servers.wait_until_idle()
