"""The kinds for chats: receivers that refuse what the services refuse, and respond as they do."""

import json
import re

import pytest

from telemetry.channels.base import ConfigError, DeliveryError
from telemetry.channels.discord import DISCORD
from telemetry.channels.google_chat import GOOGLE_CHAT
from telemetry.channels.ntfy import NTFY
from telemetry.channels.slack import SLACK
from telemetry.channels.teams import TEAMS
from tests.fakes.fake_webhook_receiver import Reply
from tests.telemetry.channels.messages import HOSTILE, NOTICE, ROLLED_BACK, ROLLOUT, TEST, message, several

TOPIC, TOKEN = "warm-s3cret-topic", "tk_s3crettoken0123456789"
ELEMENTS = {"TextRun": {"text", "weight", "size", "color", "selectAction"}, "RichTextBlock": {"inlines"}}
WORDS = {
    "weight": {"lighter", "default", "bolder"},
    "size": {"small", "default", "medium", "large"},
    "color": {"default", "accent", "good", "warning", "attention"},
}
POSTED = {"discord": b'{"id": "1"}', "google_chat": b'{"name": "spaces/1/messages/1"}', "ntfy": b'{"id": "a"}'}


def discord(received):
    """Every text of an embed; what Discord refuses is an AssertionError."""
    body = received.payload
    assert received.path.endswith("?wait=true")
    assert body["allowed_mentions"] == {"parse": []}
    (embed,) = body["embeds"]
    assert embed.keys() <= {"title", "description", "color", "fields"}
    fields = embed.get("fields", [])
    assert 0 < len(embed["title"]) <= 256
    assert 0 < len(embed.get("description", "none")) <= 4096
    assert len(fields) <= 25
    assert all(0 < len(field["name"]) <= 256 and 0 < len(field["value"]) <= 1024 for field in fields)
    texts = [embed["title"], embed.get("description", ""), *(text for field in fields for text in field.values())]
    assert sum(map(len, texts)) <= 6000
    assert 0 <= embed["color"] <= 0xFFFFFF
    return texts


def google_chat(received):
    body = received.payload
    assert "key=k3y&token=s3cret-token" in received.path
    assert "messageReplyOption=REPLY_MESSAGE_FALLBACK_TO_NEW_THREAD" in received.path
    assert received.headers["content-type"] == "application/json; charset=utf-8"
    assert len(received.body) <= 32_000
    assert body.keys() <= {"text", "cardsV2", "thread"}
    assert body["text"]
    widgets = [
        widget
        for card in body.get("cardsV2", [])
        for section in card["card"]["sections"]
        for widget in section["widgets"]
    ]
    assert len(widgets) <= 100
    assert "cardsV2" not in body or widgets
    assert all(len(widget) == 1 for widget in widgets)
    texts = [widget["textParagraph"]["text"] for widget in widgets if "textParagraph" in widget]
    return [body["text"], *(line for text in texts for line in text.split("<br>"))]


def ntfy(received):
    body = received.payload
    assert received.path == "/"
    assert received.headers["authorization"] == f"Bearer {TOKEN}"
    assert body["topic"] == TOPIC
    assert 0 < len(body["message"].encode()) <= 4096
    assert len(received.body) <= 4000  # what Firebase passes on uncut
    assert body["priority"] in range(1, 6)
    assert len(body["actions"]) <= 3
    assert all(set(action) == {"action", "label", "url"} for action in body["actions"])
    return [body["title"], *body["message"].splitlines()]


def teams(received):
    """A workflow accepts everything: what Teams would drop is an AssertionError."""
    assert received.headers["content-type"] == "application/json; charset=utf-8"
    assert max(len(received.body), len(received.body.decode().encode("utf-16-le"))) <= 28 * 1024
    envelope = received.payload
    assert envelope.keys() == {"type", "attachments"}
    assert envelope["type"] == "message"
    (attachment,) = envelope["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    card = attachment["content"]
    assert card["type"] == "AdaptiveCard"
    assert tuple(map(int, card["version"].split("."))) <= (1, 4)
    assert len(card["actions"]) <= 6
    for element in (*card["body"], *(run for block in card["body"] for run in block["inlines"])):
        assert element.keys() - {"type"} <= ELEMENTS[element["type"]]
        assert all(element[name] in words for name, words in WORDS.items() if name in element)
        assert element["type"] != "TextRun" or element["text"]
    actions = [run["selectAction"] for block in card["body"] for run in block["inlines"] if "selectAction" in run]
    for action in (*card["actions"], *actions):
        assert action["type"] == "Action.OpenUrl"
        assert action["url"].startswith("https://")
    assert {block["type"] for block in card["body"]} == {"RichTextBlock"}  # only a TextRun is text without Markdown
    return ["".join(run["text"] for run in block["inlines"]) for block in card["body"]]


def slack(received):
    """The texts of the blocks. Slack reads markup in all but the header, and other chats a plain @channel."""
    header, *sections = received.payload["blocks"]
    assert header["text"]["type"] == "plain_text"
    assert 0 < len(header["text"]["text"]) <= 150
    assert len(sections) < 50
    fields = [field for section in sections for field in section.get("fields", [section.get("text")])]
    assert all(len(section.get("fields", [])) <= 10 for section in sections)
    assert all(field["verbatim"] and 0 < len(field["text"]) <= 3000 for field in fields)
    return [header["text"]["text"], *(field["text"] for field in fields)]


KINDS = {
    "discord": (DISCORD, discord, lambda receiver: {"url": receiver.url}),
    "google_chat": (GOOGLE_CHAT, google_chat, lambda receiver: {"url": f"{receiver.url}?key=k3y&token=s3cret-token"}),
    "ntfy": (NTFY, ntfy, lambda receiver: {"server": receiver.origin, "topic": TOPIC, "token": TOKEN}),
    "teams": (TEAMS, teams, lambda receiver: {"url": receiver.url}),
    "slack": (SLACK, slack, lambda receiver: {"url": receiver.url}),
}


def deliver(name, receiver, notification, *replies):
    kind, check, config = KINDS[name]
    receiver.replies = list(replies) or [Reply(200, body=POSTED.get(name, b"ok"))]
    kind.send(kind.complete(config(receiver)), notification)
    return check(receiver.received[-1])


each = pytest.mark.parametrize("name", KINDS)


@each
def test_a_message_has_facts_causes_and_links(name, receiver):
    title, *texts = deliver(name, receiver, message())

    assert title.startswith("[FIRING] Hit rate of pool chat is 20.1 %")
    assert "Revision 7 moved homes. (confidence 90 %) Revert it." in "\n".join(texts).replace("\\", "")
    assert "20.1 %" in "\n".join(texts)
    assert "https://warmpath.example/alerts/7/" in receiver.received[-1].body.decode()


@each
@pytest.mark.parametrize(
    ("notification", "title"),
    [
        (message(state="repeated"), "[STILL FIRING] "),
        (message(state="acknowledged"), "[ACKNOWLEDGED] "),
        (message(state="resolved"), "[RESOLVED] "),
        (several(1, 2), "[FIRING] 2 alerts firing in pool chat: Alert 1."),
        (TEST, "[TEST] A test."),
        (NOTICE, "[NOTICE] Channel ops was disabled."),
    ],
)
def test_each_state_and_kind_of_message(name, receiver, notification, title):
    assert deliver(name, receiver, notification)[0].startswith(title)


@each
def test_several_alerts_are_one_message_with_a_link_each(name, receiver):
    texts = "\n".join(deliver(name, receiver, several(1, 2, state="resolved"))[1:])
    body = receiver.received[-1].body.decode()

    assert texts.index("Alert 1.") < texts.index("Alert 2.")
    if name != "ntfy":  # whose text has no links
        assert body.index("/alerts/1/") < body.index("/alerts/2/")


@each
def test_the_reason_of_a_rollout_is_whole(name, receiver):
    texts = "\n".join(deliver(name, receiver, ROLLOUT)).replace("\\", "")
    assert ROLLED_BACK in texts


@each
@pytest.mark.parametrize("character", ["x", '"', "*", "<", "\U0001f525"])
def test_a_message_that_would_be_refused_is_shortened(name, receiver, character):
    notification = several(*range(1, 21))
    notification.payload["data"]["summary"] = character * 600
    notification.payload["data"]["links"] = {"runbook": f"https://wiki.example/{'r' * 480}", "rollout": "/rollouts/3/"}
    for alert in notification.payload["data"]["alerts"]:
        alert["summary"] = character * 500
        alert["causes"][0]["summary"] = character * 500

    texts = deliver(name, receiver, notification)
    if name != "slack" and (name != "google_chat" or character not in "x*"):  # they have room for all
        assert "more lines were left out." in "\n".join(texts)


@each
@pytest.mark.parametrize("hostile", [*HOSTILE, "<users/all>", "<@&1> **b** [click](https://evil.example)"])
def test_untrusted_text_mentions_nobody_and_creates_no_link(name, receiver, hostile):
    labels = {"group": hostile, "replica": hostile, "severity": hostile}
    texts = deliver(name, receiver, message(summary=hostile, pool=hostile, rule=hostile, labels=labels, links={}))
    text = "\n".join(texts).replace("<b>", "").replace("</b>", "").replace("\u200b", "~")

    if name == "teams":  # the function of Teams above: it is shown as it is, and a mention needs an entity
        assert b"entities" not in receiver.received[-1].body
        return
    assert "@" not in text.replace("@~", "")
    assert "://" not in text or name == "slack"  # which makes no links of "verbatim" text
    if name == "discord":
        shown = "".join(re.sub(r"\*\*(.*?)\*\* ", r"\1", one) for one in text.partition("] ")[2].splitlines())
        assert not {"<", "[", "*"} & set(re.sub(r"\\[<[*]", "", shown))
    if name == "google_chat":
        assert "<" not in text.replace("<~", "")
    if name == "slack":
        assert "<" not in text.partition("\n")[2]


FAILED = b"Webhook message delivery failed with error: Microsoft Teams endpoint returned HTTP error 429"


@pytest.mark.parametrize(
    ("name", "body"), [("discord", b"{}"), ("google_chat", b"{}"), ("ntfy", b"<html>Sign in</html>"), ("teams", FAILED)]
)
def test_a_response_with_status_200_may_be_a_failure(name, receiver, body):
    with pytest.raises(DeliveryError, match=r"the response (lacks|is an error)") as caught:
        deliver(name, receiver, TEST, Reply(200, body=body))
    assert (caught.value.retryable, caught.value.status) == (True, 200)


@pytest.mark.parametrize(
    ("headers", "body", "seconds"),
    [
        ({}, b'{"message": "You are being rate limited.", "retry_after": 64.57, "global": false}', 64.57),
        ({"Retry-After": "65.2"}, b'{"retry_after": 1}', 65.2),
        ({}, b"{}", None),
    ],
)
def test_discord_says_when_to_retry(receiver, headers, body, seconds):
    with pytest.raises(DeliveryError) as caught:
        deliver("discord", receiver, TEST, Reply(429, headers, body=body))
    assert (caught.value.retryable, caught.value.retry_after_s) == (True, seconds)


@pytest.mark.parametrize("version", ["", "v6/"])
def test_discord_is_sent_to_one_version_of_the_api(version):
    """Others say in milliseconds when to retry."""
    url = DISCORD.complete({"url": f"https://discord.com/api/{version}webhooks/1/api/webhooks/"})["url"]
    assert url == "https://discord.com/api/v10/webhooks/1/api/webhooks/"


def test_messages_about_one_alert_are_one_thread_of_google_chat(receiver):
    for notification in (message(), message(state="resolved"), message(8), several(1, 2)):
        deliver("google_chat", receiver, notification)
    first, end, other, group = (got.payload.get("thread") for got in receiver.received)
    assert first == end != other
    assert group is None


@pytest.mark.parametrize(
    ("state", "severity", "priority"),
    [
        ("firing", "critical", 5),
        ("repeated", "page", 5),
        ("firing", "warning", 4),
        ("resolved", "critical", 3),
        ("acknowledged", "critical", 2),
    ],
)
def test_the_priority_of_ntfy_is_that_of_state_and_severity(receiver, state, severity, priority):
    deliver("ntfy", receiver, message(state=state, labels={"severity": severity}))
    assert receiver.received[-1].payload["priority"] == priority


@pytest.mark.parametrize(
    "url",
    ["https://contoso.webhook.office.com/webhookb2/abc", "https://outlook.office.com/webhook/abc"],
)
def test_a_connector_is_refused_with_what_to_use_instead(url):
    with pytest.raises(ConfigError, match=r"Office 365 connector.* expected the URL of a workflow"):
        TEAMS.complete({"url": url})


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        (GOOGLE_CHAT, {"url": "https://chat.googleapis.com/v1/spaces/A/messages?key=k"}, "url"),
        (NTFY, {}, "topic"),
        (NTFY, {"topic": "a/b"}, "topic"),
        (NTFY, {"topic": "t", "server": "https://ntfy.sh/s3cret"}, "server"),
        (NTFY, {"topic": "t", "server": "https://ntfy.sh?topic=s3cret"}, "server"),
        (DISCORD, {"url": "discord.com/api/webhooks/1/x"}, "url"),
    ],
)
def test_invalid_settings_of_chats_are_refused_by_field(kind, given, field):
    with pytest.raises(ConfigError) as caught:
        kind.complete(given)
    assert caught.value.field == field


@each
def test_secrets_of_chats_are_not_shown_and_removed_from_logs(name, receiver):
    kind, _, settings = KINDS[name]
    config = kind.complete(settings(receiver))
    echo = json.dumps(config)
    for secret in kind.secrets(config):
        echo = echo.replace(secret, "...")

    assert "s3cret" not in f"{kind.public(config)} {echo}"
