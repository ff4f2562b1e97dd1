"""Reads and checks generation requests as vLLM 0.32.0 does, and converts text to tokens and back.

Theory of operation. A token is up to 4 bytes of the rendered prompt: a space and three letters, four letters within a
word, one character of any other script, one digit, space or sign. A marker of the chat template is one token. So
English has about 3 bytes per token, words of 3 or 7 letters exactly 4, digits and code fewer, other scripts 2 to 4. A
token's id is its bytes read little-endian, and a prompt is the ids of its tokens, 4 bytes each: a text and its ids are
the same prompt and share blocks, and ids that no text has are a prompt as well.

Generated tokens begin with a space, so no token spans from the prompt into the output: a next turn that contains the
output continues the very same tokens, and finds the generated blocks in the cache as it would in vLLM.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_intdigest

from routing.standin.errors import ApiError, bad_request, invalid, prompt_too_long, total_too_long, unknown_model
from routing.standin.tools import ToolCall, call_tokens, read_call

TOKEN_BYTES = 4  # of an id, and of a token's text at most
VOCABULARY = 1 << 32
MAX_N = 128
_MARKERS: Final = {b"<|im_start|>": b"\xff\xff\xff\x01", b"<|im_end|>": b"\xff\xff\xff\x02"}  # 0xFF is in no UTF-8 text
_tokens: Final = re.compile(
    rb"<\|im_start\|>|<\|im_end\|>| [A-Za-z]{1,3}|[A-Za-z]{1,4}|[\xc0-\xf7][\x80-\xbf]{1,3}|[\x00-\xff]"
).findall

# --- text and tokens ---


@lru_cache(maxsize=64)
def encode(text: bytes) -> bytes:
    """The prompt of a rendered text: the ids of its tokens, 4 bytes each."""
    return b"".join([_MARKERS.get(token) or token.ljust(TOKEN_BYTES, b"\0") for token in _tokens(text)])


def count_tokens(prompt: bytes) -> int:
    """Tokens of a prompt."""
    return len(prompt) // TOKEN_BYTES


def token_ids(prompt: bytes) -> list[int]:
    """The ids of a prompt's tokens."""
    return list(struct.unpack(f"<{count_tokens(prompt)}I", prompt))


def prompt_of_ids(ids: Sequence[int]) -> bytes:
    """The prompt with these token ids, each in 0..2**32-1."""
    return struct.pack(f"<{len(ids)}I", *ids)


def block_keys(data: bytes, block_tokens: int, salt: str = "") -> list[int]:
    """Chained keys of a prompt's full blocks: a key stands for its block and everything before it."""
    size = block_tokens * TOKEN_BYTES
    digest = xxh3_64_intdigest
    key = digest(salt.encode()) if salt else 0
    keys = []
    for start in range(0, len(data) - size + 1, size):
        key = digest(data[start : start + size], key)
        keys.append(key)
    return keys


def render_chat(messages: Iterable[Mapping[str, Any]], tools: object = None, *, continues_last: bool = False) -> bytes:
    """A conversation in ChatML, open for the assistant's output; a list of tools comes first, in the system message.

    ``continues_last``: open after the last message, which the output continues.
    """
    parts = [f"<|im_start|>{message['role']}\n{_content(message)}<|im_end|>\n" for message in messages]
    if tools and isinstance(tools, list):
        definitions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        section = f"# Tools\n\n<tools>\n{definitions}\n</tools>\n\n"
        system = "<|im_start|>system\n"
        if parts[0].startswith(system):
            parts[0] = f"{system}{section}{parts[0][len(system) :]}"
        else:
            parts.insert(0, f"{system}{section}<|im_end|>\n")
    if continues_last:
        parts[-1] = parts[-1].removesuffix("<|im_end|>\n")
    else:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts).encode(errors="replace")


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    calls = message.get("tool_calls")
    return f"{content or ''}{json.dumps(calls, ensure_ascii=False) if calls else ''}"


class PseudoWords:
    """Deterministic output text: each token is a space and three letters."""

    COUNT = 16_384

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)  # noqa: S311 -- text, not secrets
        consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
        words = [f" {a}{b}{c}" for a in consonants for b in vowels for c in consonants]
        self._text = "".join(rng.choices(words, k=self.COUNT))
        self._words = frozenset(word.encode() for word in words)

    def generated_at_end(self, prompt: bytes) -> int:
        """How many tokens at the end of a prompt are those with which the model begins its output for the rest of it.

        So a prompt with an output so far is continued as if nothing had happened.
        """
        first = len(prompt)
        while prompt[max(0, first - TOKEN_BYTES) : first] in self._words:
            first -= TOKEN_BYTES
        for start in range(first, len(prompt), TOKEN_BYTES):
            generated = (len(prompt) - start) // TOKEN_BYTES
            if "".join(self.tokens(prompt[:start], generated)).encode() == prompt[start:]:
                return generated
        return 0

    def tokens(self, prompt: bytes, count: int, variant: int = 0) -> list[str]:
        """The texts of the output's tokens; ``variant`` distinguishes the choices of one request."""
        start = xxh3_64_intdigest(prompt, variant) % self.COUNT
        text = self._text[start * TOKEN_BYTES :]
        missing = count * TOKEN_BYTES - len(text)
        if missing > 0:
            text += self._text * (missing // len(self._text) + 1)
        return [text[i : i + TOKEN_BYTES] for i in range(0, count * TOKEN_BYTES, TOKEN_BYTES)]


# --- requests ---


@dataclass(slots=True)
class GenerationRequest:
    """A checked request for a generation."""

    is_chat: bool
    model: str
    prompts: list[bytes]  # their tokens' ids; a completion may have several
    n: int = 1  # choices for each prompt
    max_tokens: int | None = None  # as in the request
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stops: tuple[str, ...] = ()
    salt: str = ""
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: bool = False
    return_token_ids: bool = False
    reads_cache: bool = True
    call: ToolCall | None = None  # the tool that the output calls; None: the output is text
    transfer: dict[str, Any] = field(default_factory=dict)  # ``kv_transfer_params``
    external_tokens: int = 0  # of the prompt, fetched from another replica

    def output_length(self, prompt: bytes, variant: int, max_model_len: int, generated: int = 0) -> tuple[int, str]:
        """Tokens of the output, and its finish reason. The model ends a text by itself after 256 to 767 tokens.

        ``generated``: tokens at the end of the prompt that belong to this text.
        """
        limit = max_model_len - count_tokens(prompt)
        if self.max_tokens is not None:
            limit = min(limit, self.max_tokens)
        origin = prompt[: len(prompt) - generated * TOKEN_BYTES]
        natural = 256 + xxh3_64_intdigest(origin, variant ^ 0x5EED) % 512 if self.call is None else call_tokens(prompt)
        natural = max(self.min_tokens, natural - generated)
        return (natural, "stop") if natural <= limit and not self.ignore_eos else (limit, "length")


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
    return _dictionary(body, "body")


def _dictionary(value: Any, location: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", location, message, value)
    return value


def _bad_json(raw: bytes) -> ApiError:
    """The error of the standard library's decoder, whose message vLLM repeats."""
    position, reason = 0, "Invalid value"
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    except (ValueError, RecursionError):  # not UTF-8, or a number of thousands of digits
        pass
    context = f", 'ctx': {{'error': '{reason}'}}"
    return invalid("json_invalid", f"body.{position}", "JSON decode error", {}, context)


def read_chat(body: dict[str, Any], model: str, max_model_len: int, auto_tools: bool) -> GenerationRequest:
    """A chat request; ApiError describes what is wrong with it."""
    messages = read_messages(body)
    request = _read_common(body, model, is_chat=True)
    if body.get("tool_choice", "auto" if body.get("tools") else "none") == "auto" and not auto_tools:
        raise bad_request('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    for message in messages:
        _check_content(message, model)
    continues_last = body.get("continue_final_message") is True
    if continues_last and body.get("add_generation_prompt", True):
        problem = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise bad_request(problem)
    request.prompts = [encode(render_chat(messages, body.get("tools"), continues_last=continues_last))]
    request.call = read_call(body, request.prompts[0])
    check_length(request, max_model_len)
    return request


def read_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a conversation, each with a role."""
    messages = body.get("messages")
    if messages is None:
        raise invalid("missing", "body.messages", "Field required", body)
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "role" in message for message in messages
    ):
        raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
    return messages


def read_completion(body: dict[str, Any], model: str, max_model_len: int) -> GenerationRequest:
    """A completion request; ApiError describes what is wrong with it."""
    request = _read_common(body, model, is_chat=False)
    prompt = body.get("prompt")
    if not prompt:
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt")
    is_batch = isinstance(prompt, list) and not isinstance(prompt[0], int)  # a list of numbers is one prompt
    request.prompts = [_read_prompt(item) for item in (prompt if is_batch else [prompt])]
    if request.max_tokens is None:
        request.max_tokens = 16
    check_length(request, max_model_len)
    return request


def _read_prompt(prompt: Any) -> bytes:
    if isinstance(prompt, str):
        return encode(prompt.encode(errors="replace"))
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        for token in prompt:
            if not 0 <= token < VOCABULARY:
                raise bad_request(f"Token id {token} is out of vocabulary")
        return prompt_of_ids(prompt)
    raise invalid("string_type", "body.prompt", "Input should be a valid string", prompt)


def _read_common(body: dict[str, Any], model: str, *, is_chat: bool) -> GenerationRequest:
    name = "max_completion_tokens" if is_chat and body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = _integer(body, name)
    raw_options = body.get("stream_options")
    options = {} if raw_options is None else _dictionary(raw_options, "body.stream_options")
    stream = bool(body.get("stream"))
    if options and not stream:
        message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise bad_request(message, "stream_options")
    n = _integer(body, "n")
    check_model(body, model)
    _check_ranges(body, max_tokens, n)
    return GenerationRequest(
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
        reads_cache=_reads_cache(body, is_chat=is_chat),
        transfer=_dictionary(body.get("kv_transfer_params") or {}, "body.kv_transfer_params"),
    )


def _reads_cache(body: dict[str, Any], *, is_chat: bool) -> bool:
    """Whether cached blocks are used: not if log probabilities of the prompt's tokens are computed."""
    has_logprobs = is_chat or body.get("logprobs") is not None
    return body.get("prompt_logprobs") is None and not (body.get("echo") and has_logprobs)


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise invalid("string_type", "body.stop", "Input should be a valid string", stop)
    return tuple(stops)


def check_model(body: dict[str, Any], model: str) -> None:
    """Reject a model other than the served one; a request may omit it."""
    requested = body.get("model")
    if requested is not None and requested != model:
        raise unknown_model(str(requested), model)


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
        value = float(temperature)
        raise _out_of_range("temperature", f"temperature must be non-negative, got {value}.", value)
    if n is not None and not 1 <= n <= MAX_N:
        raise _out_of_range("n", f"n must be at least 1 and at most {MAX_N}, got {n}.", n)


def _out_of_range(name: str, message: str, value: float) -> ApiError:
    return bad_request(f"{message} (parameter={name}, value={value})", name)


def _check_content(message: dict[str, Any], model: str) -> None:
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict | str):
            raise invalid("dict_type", "body.messages", "Input should be a valid dictionary", part)
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise bad_request(f"{model} is not a multimodal model")


def check_length(request: GenerationRequest, max_model_len: int) -> None:
    """Reject prompts that do not fit into the model's context, with their output; ApiError."""
    max_tokens = request.max_tokens
    if max_tokens is not None and max_tokens > max_model_len:
        message = f"max_tokens={max_tokens} cannot be greater than max_model_len={max_model_len}. "
        raise _out_of_range("max_tokens", f"{message}Please request fewer output tokens.", max_tokens)
    for prompt in request.prompts:
        tokens = count_tokens(prompt)
        if tokens >= max_model_len:
            raise prompt_too_long(tokens, max_model_len)
        if max_tokens is not None and tokens + max_tokens > max_model_len:
            raise total_too_long(tokens, max_tokens, max_model_len)
