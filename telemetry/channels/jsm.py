"""Channel that opens, acknowledges and closes alerts in Jira Service Management or Opsgenie, whose API is the same.

Both respond with 202 before they process a request, so the result of the last new alert is read once afterwards.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from django.conf import settings

from controlplane.services.checks import address_of
from telemetry.channels.base import ChannelKind, Config, DeliveryError, Field, Message, Receipt, source_field, text, url
from telemetry.channels.http_post import open_client, post, post_each
from telemetry.channels.message_text import cut, inert, lines, links, one_line

MAX_MESSAGE, MAX_DESCRIPTION = 130, 15_000  # characters that the API accepts
PROCESSED_AFTER_S = 1.0  # then the result is read
PRIORITIES = {"critical": "P1", "page": "P1", "error": "P2", "warning": "P3", "info": "P5"}
OK = 200
FAILED = r'"isSuccess"\s*:\s*false'
_REQUEST = re.compile(r'"requestId"\s*:\s*"([\w-]+)"')
ACTIONS = {"acknowledged": "acknowledge", "resolved": "close"}


def requests_of(message: Message, source: str, site: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, body) of one request per alert; a test and a notice open an alert of their own."""
    for alert in message.alerts:
        alias = f"{source}-alert-{alert['alert']}"
        if action := ACTIONS.get(message.state):
            yield _path(alias, action), {"source": source}
        else:
            severity = str((alert.get("labels") or {}).get("severity"))
            yield "alerts", _new_alert(alert, alias, PRIORITIES.get(severity, "P3"), source, site)
    if not message.alerts:
        priority = "P5" if message.state == "test" else "P3"
        yield "alerts", _new_alert(message.data, f"{source}-{message.id}", priority, source, site)


def _path(alias: str, action: str) -> str:
    return f"alerts/{quote(alias, safe='')}/{action}?identifierType=alias"


def _new_alert(data: Mapping[str, Any], alias: str, priority: str, source: str, site: str) -> dict[str, Any]:
    summary = inert(one_line(data.get("summary")))
    facts = [f"{inert(label)}: {inert(value)}" for label, value in lines(data)]
    pages = [f"{inert(label)}: {address.replace('<', '%3C')}" for label, address in links(data, site)]
    return {
        "message": cut(summary, MAX_MESSAGE),
        "alias": alias,
        "description": cut("\n".join([summary, *facts, *pages]), MAX_DESCRIPTION),
        "priority": priority,
        "source": source,
        **({"entity": inert(data["pool"])} if data.get("pool") else {}),
    }


def _send(config: Config, message: Message) -> Receipt:
    base, source = config["endpoint"].rstrip("/"), config["source"]
    options: dict[str, Any] = {"now": message.at, "headers": {"authorization": f"GenieKey {config['api_key']}"}}
    requests = ((f"{base}/{path}", body) for path, body in requests_of(message, source, settings.PUBLIC_URL))
    receipt = post_each(requests, **options, expect="requestId")
    request = _REQUEST.search(receipt.response)
    if request and message.state not in ACTIONS:
        time.sleep(PROCESSED_AFTER_S)
        address = f"{base}/alerts/requests/{request[1]}"
        try:
            with open_client() as http:
                receipt = post(http, address, b"", **options, method="GET", reject=FAILED)
        except DeliveryError as error:
            if error.status == OK:  # it was not processed; any other failure says nothing about it
                raise
    if message.state == "test":
        post_each([(f"{base}/{_path(f'{source}-{message.id}', 'close')}", {"source": source})], **options)
    return receipt


JSM = ChannelKind(
    "jsm",
    "Jira Service Management",
    "Opens, acknowledges and closes alerts there, or in Opsgenie.",
    (
        Field("api_key", "API key", "Of an API integration.", text(200), required=True, secret=True),
        Field(
            "endpoint",
            "Endpoint",
            "Opsgenie until its end: https://api.opsgenie.com/v2, or https://api.eu.opsgenie.com/v2 in the EU.",
            url,
            default="https://api.atlassian.com/jsm/ops/integration/v2",
        ),
        source_field("alerts", "closed"),
    ),
    _send,
    lambda config: str(config["endpoint"]),
    lambda config: address_of(config["endpoint"]),
    topics=(),
)
