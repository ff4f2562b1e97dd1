"""Channel that sends a body of your own to a URL, made of a template with the values of a message.

A template is text with placeholders ``{{ path | format }}``. A path walks JSON objects and lists, never Python objects,
and nothing is called or read, so a template can contain no code. The format is required: it says how a value is
escaped, so that a name in a label cannot change the structure of the body.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from django.conf import settings

from controlplane.services.checks import address_of
from telemetry.channels import base
from telemetry.channels.base import ChannelKind, Config, ConfigError, DeliveryError, Field, Message, Receipt
from telemetry.channels.http_post import open_client, post, to_json
from telemetry.channels.message_text import links, message_lines, title

MAX_TEMPLATE, MAX_HEADERS, MAX_BODY = 10_000, 4000, 1_000_000  # characters
METHODS = (("POST", "POST"), ("PUT", "PUT"))
ROOTS = ("id", "type", "timestamp", "title", "text", "url", "state", "data")
DEFAULT_BODY = '{"text": {{ text | json }}, "title": {{ title | json }}}'
_PLACEHOLDER = re.compile(r"\{\{(?P<expression>.*?)\}\}|(?P<unclosed>\{\{)", re.DOTALL)
_EXPRESSION = re.compile(r"\s*(?P<path>\w+(?:\.\w+)*)\s*\|\s*(?P<format>\w+)\s*\Z", re.ASCII)
_HEADER = re.compile(r"(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(?P<value>[\x20-\x7e]+)\Z")
_OWN_HEADERS = {"host", "content-type", "content-length", "transfer-encoding", "connection", "accept-encoding"}


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else to_json(value).decode()


Formats = Mapping[str, Callable[[Any], str]]
FORMATS: Formats = {
    "json": lambda value: to_json(value).decode(),
    "string": lambda value: to_json(_plain(value)).decode()[1:-1],  # inside the quotes of a JSON string
    "url": lambda value: quote(_plain(value), safe=""),
    "html": lambda value: html.escape(_plain(value)),
    "plain": _plain,
}
_RESTRICTED: dict[str, tuple[str, ...]] = {"json": ("json", "string"), "x-www-form-urlencoded": ("url",)}
# A JSON body that is valid with both is valid with all values: ``json`` is a whole value there, ``string`` in quotes.
_ANY_VALUE: tuple[Formats, ...] = (
    {"json": lambda _: '""', "string": lambda _: "x"},
    {"json": lambda _: "null", "string": lambda _: ""},
)


def render(template: str, values: Mapping[str, Any], formats: Formats = FORMATS) -> str:
    """The template with values for its placeholders; ValueError with the line and what was expected there."""
    size = len(template)

    def replace(match: re.Match[str]) -> str:
        nonlocal size
        expression = _EXPRESSION.match(match["expression"] or "")
        if expression is None or expression["format"] not in formats:
            expected = f"expected {{{{ path | format }}}} with one of the formats {', '.join(formats)}"
        elif (root := expression["path"].partition(".")[0]) not in ROOTS:
            expected = f"{root!r} is no value; expected one of {', '.join(ROOTS)}"
        else:
            text = formats[expression["format"]](_value_at(values, expression["path"]))
            if (size := size + len(text)) > MAX_BODY:
                raise ValueError(f"the body is longer than {MAX_BODY} characters")
            return text
        line = template.count("\n", 0, match.start()) + 1
        raise ValueError(f"line {line}: {expected}")

    return _PLACEHOLDER.sub(replace, template)


def _value_at(values: Any, path: str) -> Any:
    """The value at a path of names and numbers in JSON; None if there is none."""
    for step in path.split("."):
        if isinstance(values, Mapping):
            values = values.get(step)
        elif isinstance(values, list) and step.isdecimal() and int(step) < len(values):
            values = values[int(step)]
        else:
            return None
    return values


def _values(message: Message, site: str) -> dict[str, Any]:
    """What a template can show: the payload, and what every channel makes of it."""
    pages = links(message.data, site)
    shown = message_lines(message, site)
    return {
        **message.payload,
        "id": message.id,
        "state": message.state,
        "title": title(message.data),
        "text": "\n".join(line.text for line in shown),
        "url": pages[0][1] if pages else site,
    }


def _body(config: Config, message: Message, site: str) -> str:
    """ConfigError at ``body``."""
    try:
        return render(config["body"], _values(message, site), _formats_of(config["content_type"]))
    except ValueError as error:
        raise ConfigError("body", str(error)) from None


def _send(config: Config, message: Message) -> Receipt:
    try:
        body = _body(config, message, settings.PUBLIC_URL).encode()
    except ConfigError as error:  # too long
        raise DeliveryError(str(error), retryable=False) from None
    headers = {"content-type": config["content_type"], **dict(_headers_of(config.get("headers", "")))}
    expect = config.get("expect_in_response", "")
    with open_client() as http:
        return post(http, config["url"], body, now=message.at, headers=headers, method=config["method"], expect=expect)


def _headers_of(lines: str) -> Iterator[tuple[str, str]]:
    """Names and values of header lines; ValueError with the line."""
    for number, line in enumerate(lines.splitlines(), 1):
        match = _HEADER.match(line.strip())
        if match is None or match["name"].lower() in _OWN_HEADERS:
            raise ValueError(f"line {number}: expected Name: value, and none of {', '.join(sorted(_OWN_HEADERS))}")
        yield match["name"], match["value"].strip()


def _headers(value: Any) -> str:
    return "\n".join(f"{name}: {content}" for name, content in _headers_of(_lines(MAX_HEADERS)(value)))


def _lines(limit: int) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or len(value) > limit:
            raise ValueError(f"expected text of up to {limit} characters")
        return value.encode().decode().replace("\r\n", "\n")  # ValueError for half of a surrogate pair

    return read


def _formats_of(content_type: str) -> Formats:
    """The formats that cannot change the structure of a body."""
    allowed = next((names for part, names in _RESTRICTED.items() if part in content_type.lower()), tuple(FORMATS))
    return {name: FORMATS[name] for name in allowed}


def _preview(config: Config) -> str:
    body = _body(config, EXAMPLE, settings.PUBLIC_URL)
    try:
        for formats in _ANY_VALUE if "json" in config["content_type"].lower() else ():
            json.loads(render(config["body"], {}, formats))
    except json.JSONDecodeError as error:
        expected = "expected json in place of a value, string inside quotes"
        raise ConfigError("body", f"line {error.lineno}: invalid JSON: {error.msg}; {expected}") from None
    except RecursionError:
        raise ConfigError("body", "invalid JSON: it is nested too deeply") from None
    return body


def _check(config: Config) -> None:
    _preview(config)


EXAMPLE = Message(
    "msg_example",
    datetime(2026, 1, 31, 13, 45, tzinfo=UTC),
    {
        "type": "alert.firing",
        "timestamp": "2026-01-31T13:45:00.000+00:00",
        "data": {
            "alert": 7,
            "rule": "Hit rate drop",
            "pool": "chat",
            "state": "firing",
            "summary": "Hit rate of pool chat is 20.1 %, 58.9 points below its baseline of 79.0 %.",
            "labels": {"pool": "chat", "rule": "Hit rate drop", "kind": "hit_rate_drop", "severity": "warning"},
            "value_ratio": 0.201,
            "baseline_ratio": 0.79,
            "fired_at": "2026-01-31T13:45:00+00:00",
            "causes": [
                {"confidence": 0.9, "summary": 'Revision 5 of policy "chat" moved homes.', "advice": "Revert it."}
            ],
            "links": {"alert": "/alerts/7/"},
        },
    },
)

TEMPLATE = ChannelKind(
    "template",
    "Template",
    "Sends a body of your own to a URL, for any other service.",
    (
        Field("url", "URL", "URL that receives the body, https://host/path.", base.url, required=True, secret=True),
        Field("method", "Method", "POST or PUT.", base.one_of("POST", "PUT"), default="POST", choices=METHODS),
        Field("headers", "Headers", "One a line, such as Authorization: Bearer abc.", _headers, secret=True, rows=3),
        Field("content_type", "Content type", "Of the body.", base.text(100), default="application/json"),
        Field(
            "body",
            "Body",
            "Text with {{ path | format }}. Paths: title, text, url, state, id, type, timestamp, data.pool, "
            "data.labels.severity and so on. Formats: json and string; in forms url; elsewhere also html and plain. "
            "Not a secret: keys belong into headers or the URL.",
            _lines(MAX_TEMPLATE),
            default=DEFAULT_BODY,
            rows=8,
        ),
        Field(
            "expect_in_response",
            "Expected in response",
            "A response without it is a failure, whatever its status.",
            base.text(200),
        ),
    ),
    _send,
    lambda config: f"{base.origin(config['url'])}/...",
    lambda config: address_of(config["url"]),
    check=_check,
    preview=_preview,
)
