"""Read and check a request for a generation, as vLLM 0.32.0 does: unknown fields are ignored."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from routing.simulation.standin.errors import (
    ApiError,
    bad_request,
    invalid,
    prompt_too_long,
    total_too_long,
    unknown_model,
)
from routing.simulation.standin.text import VOCABULARY, bytes_of, count_tokens, encode, natural_length, render_chat

MAX_N = 128


@dataclass(slots=True)
class Ask:
    """A checked request: what to answer, and in which form."""

    is_chat: bool
    model: str
    prompts: list[bytes]  # their tokens' ids; a completion may have several
    n: int  # choices for each prompt
    max_tokens: int | None  # as asked for
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stops: tuple[str, ...]
    salt: str
    ignore_eos: bool
    min_tokens: int
    logprobs: bool
    return_token_ids: bool

    def tokens_for(self, prompt: bytes, variant: int, max_model_len: int) -> tuple[int, str]:
        """How many tokens an answer has, and why it ends there."""
        limit = max_model_len - count_tokens(prompt)
        if self.max_tokens is not None:
            limit = min(limit, self.max_tokens)
        natural = limit + 1 if self.ignore_eos else max(self.min_tokens, natural_length(prompt, variant))
        return (natural, "stop") if natural <= limit else (limit, "length")


def decode_body(raw: bytes, content_type: str) -> dict[str, Any]:
    """A JSON object, or the framework's own 400."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, "Bad Request", message)
    if not raw:
        raise invalid("missing", "body", "Field required", None)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _bad_json(raw) from None
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", message, body)
    return body


def _bad_json(raw: bytes) -> ApiError:
    """The standard library's words for what is wrong, which are those that vLLM repeats."""
    position, reason = 0, "Invalid value"
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    except (ValueError, RecursionError):  # no UTF-8, or a number of thousands of digits
        pass
    context = f", 'ctx': {{'error': '{reason}'}}"
    return invalid("json_invalid", f"body.{position}", "JSON decode error", {}, context)


def read_chat(body: dict[str, Any], model: str, max_model_len: int, auto_tools: bool) -> Ask:
    """A chat request; ApiError says what is wrong with it."""
    messages = read_messages(body)
    ask = _read_common(body, model, is_chat=True)
    _check_tools(body, auto_tools)
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    for message in messages:
        _check_content(message, model)
    tools = body.get("tools")
    ask.prompts = [encode(render_chat(messages, tools if isinstance(tools, list) else None))]
    _check_length(ask, max_model_len)
    return ask


def read_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a conversation, each with a role."""
    messages = body.get("messages")
    if messages is None:
        raise invalid("missing", "body.messages", "Field required", body)
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
    return messages


def read_completion(body: dict[str, Any], model: str, max_model_len: int) -> Ask:
    """A completion request; ApiError says what is wrong with it."""
    ask = _read_common(body, model, is_chat=False)
    prompt = body.get("prompt")
    ask.prompts = [_read_prompt(one) for one in _prompts(prompt)]
    if ask.max_tokens is None:
        ask.max_tokens = 16
    _check_length(ask, max_model_len)
    return ask


def _prompts(prompt: Any) -> list[Any]:
    """One prompt, or a list of them; a list of numbers is one prompt."""
    if not prompt:
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt")
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


def _read_prompt(prompt: Any) -> bytes:
    if isinstance(prompt, str):
        return encode(prompt.encode(errors="replace"))
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        for token in prompt:
            if not 0 <= token < VOCABULARY:
                raise bad_request(f"Token id {token} is out of vocabulary")
        return bytes_of(prompt)
    raise invalid("string_type", "body.prompt", "Input should be a valid string", prompt)


def _read_common(body: dict[str, Any], model: str, *, is_chat: bool) -> Ask:
    name = "max_completion_tokens" if is_chat and body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = _integer(body, name)
    options = _options(body)
    stream = bool(body.get("stream"))
    if options and not stream:
        raise bad_request(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)", "stream_options"
        )
    n = _integer(body, "n")
    check_model(body, model)
    _check_ranges(body, max_tokens, n)
    return Ask(
        is_chat=is_chat,
        model=model,
        prompts=[],
        n=1 if n is None else n,
        max_tokens=max_tokens,
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        stops=_stops(body),
        salt=str(body.get("cache_salt") or ""),
        ignore_eos=bool(body.get("ignore_eos")),
        min_tokens=_integer(body, "min_tokens") or 0,
        logprobs=bool(body.get("logprobs")),
        return_token_ids=bool(body.get("return_token_ids")),
    )


def _options(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("stream_options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body.stream_options", message, options)
    return options


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    """One string or a list of them, where an answer ends."""
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise invalid("string_type", "body.stop", "Input should be a valid string", stop)
    return tuple(stops)


def check_model(body: dict[str, Any], model: str) -> None:
    """A missing model is the one that is served."""
    asked = body.get("model")
    if asked is not None and asked != model:
        raise unknown_model(str(asked), model)


def _integer(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None or type(value) is int:
        return value
    message = "Input should be a valid integer"
    if isinstance(value, str):
        raise invalid("int_parsing", f"body.{name}", f"{message}, unable to parse string as an integer", value)
    raise invalid("int_type", f"body.{name}", message, value)


def _check_ranges(body: dict[str, Any], max_tokens: int | None, n: int | None) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise _out_of_range("max_tokens", f"max_tokens must be at least 1, got {max_tokens}.", max_tokens)
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        given = float(temperature)
        raise _out_of_range("temperature", f"temperature must be non-negative, got {given}.", given)
    if n is not None and not 1 <= n <= MAX_N:
        raise _out_of_range("n", f"n must be at least 1 and at most {MAX_N}, got {n}.", n)


def _out_of_range(name: str, message: str, value: float) -> ApiError:
    return bad_request(f"{message} (parameter={name}, value={value})", name)


def _check_tools(body: dict[str, Any], auto_tools: bool) -> None:
    choice = body.get("tool_choice", "auto" if body.get("tools") else "none")
    if choice == "auto" and not auto_tools:
        raise bad_request(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set', None
        )


def _check_content(message: dict[str, Any], model: str) -> None:
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict | str):
                raise invalid("dict_type", "body.messages", "Input should be a valid dictionary", part)
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise bad_request(f"{model} is not a multimodal model")


def _check_length(ask: Ask, max_model_len: int) -> None:
    if ask.max_tokens is not None and ask.max_tokens > max_model_len:
        asked = ask.max_tokens
        message = f"max_tokens={asked} cannot be greater than max_model_len={max_model_len}. "
        raise _out_of_range("max_tokens", f"{message}Please request fewer output tokens.", asked)
    for prompt in ask.prompts:
        tokens = count_tokens(prompt)
        if tokens >= max_model_len:
            raise prompt_too_long(tokens, max_model_len)
        if ask.max_tokens is not None and tokens + ask.max_tokens > max_model_len:
            raise total_too_long(tokens, ask.max_tokens, max_model_len)
