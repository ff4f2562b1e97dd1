"""Cards for a workflow of Teams, received by a workflow that drops what Teams does not show, as the real one does."""

import json

import pytest

from telemetry.channels.base import ConfigError, DeliveryError
from telemetry.channels.teams import TEAMS
from tests.fakes.fake_webhook_receiver import Reply
from tests.telemetry.channels.messages import HOSTILE, NOTICE, ROLLED_BACK, ROLLOUT, TEST, message, several

ELEMENTS = {"TextRun": {"text", "weight", "size", "color", "selectAction"}, "RichTextBlock": {"inlines"}}
WORDS = {
    "weight": {"lighter", "default", "bolder"},
    "size": {"small", "default", "medium", "large"},
    "color": {"default", "accent", "good", "warning", "attention"},
}


def posted(received):
    """The card that Teams shows; what it would drop is an AssertionError."""
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
    return card


def teams(receiver, told):
    receiver.replies = [Reply(202)]
    TEAMS.send(TEAMS.complete({"url": receiver.url}), told)
    return posted(receiver.received[-1])


def texts(card):
    return ["".join(run["text"] for run in block["inlines"]) for block in card["body"]]


def test_a_card_has_facts_causes_and_links(receiver):
    card = teams(receiver, message())

    assert texts(card)[0].startswith("[FIRING] Hit rate of pool chat is 20.1 %")
    assert "Value: 20.1 %" in texts(card)
    assert "Cause: Revision 7 moved homes. (confidence 90 %) Revert it." in texts(card)
    assert card["actions"][0]["url"] == "https://warmpath.example/alerts/7/"


@pytest.mark.parametrize(
    ("state", "color"),
    [("firing", "attention"), ("repeated", "attention"), ("acknowledged", "warning"), ("resolved", "good")],
)
def test_the_color_is_that_of_the_state(receiver, state, color):
    assert teams(receiver, message(state=state))["body"][0]["inlines"][0]["color"] == color


def test_several_alerts_are_one_card_with_a_link_each(receiver):
    card = teams(receiver, several(1, 2))

    assert texts(card)[1:] == ["Alert 1.", texts(card)[2], "Alert 2.", texts(card)[2]]
    assert card["body"][3]["inlines"][0]["selectAction"]["url"] == "https://warmpath.example/alerts/2/"


def test_other_messages(receiver):
    assert texts(teams(receiver, TEST)) == ["[TEST] A test."]
    assert texts(teams(receiver, NOTICE)) == ["[NOTICE] Channel ops was disabled."]
    assert ROLLED_BACK in texts(teams(receiver, ROLLOUT))[0]


@pytest.mark.parametrize("character", ["x", '"', "é", "\U0001f525"])
def test_a_card_that_would_be_dropped_is_shortened(receiver, character):
    told = several(*range(1, 21))
    for alert in told.payload["data"]["alerts"]:
        alert["summary"] = character * 500
        alert["causes"][0]["summary"] = character * 500
    shown = texts(teams(receiver, told))

    assert len(shown) > 4
    assert shown[-1].endswith("more lines were left out.")
    assert int(shown[-1].split()[0]) == 40 - (len(shown) - 2)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_untrusted_text_is_shown_as_it_is_and_mentions_nobody(receiver, hostile):
    """Only a TextRun is text without Markdown; a mention needs an entity."""
    card = teams(receiver, message(summary=hostile, pool=hostile, rule=hostile, labels={"group": hostile}))

    assert "entities" not in json.dumps(card)
    assert {block["type"] for block in card["body"]} == {"RichTextBlock"}


def test_an_error_in_a_response_with_status_200_is_a_failure(receiver):
    text = b"Webhook message delivery failed with error: Microsoft Teams endpoint returned HTTP error 429"
    receiver.replies = [Reply(200, body=text)]
    with pytest.raises(DeliveryError, match="delivery failed") as caught:
        TEAMS.send(TEAMS.complete({"url": receiver.url}), message())

    assert (caught.value.retryable, caught.value.status) == (True, 200)


@pytest.mark.parametrize(
    "url",
    ["https://contoso.webhook.office.com/webhookb2/abc", "https://outlook.office.com/webhook/abc"],
)
def test_a_connector_is_refused_with_what_to_use_instead(url):
    with pytest.raises(ConfigError, match=r"Office 365 connector.* expected the URL of a workflow"):
        TEAMS.complete({"url": url})


def test_the_signature_in_the_url_is_not_shown():
    url = (
        "https://prod-1.westeurope.logic.azure.com:443/workflows/1/triggers/manual/paths/invoke?sig=s3cret-signature_9"
    )
    config = TEAMS.complete({"url": url})

    assert TEAMS.public(config)["target"] == "https://prod-1.westeurope.logic.azure.com:443/..."
    assert "s3cret-signature_9" in TEAMS.secrets(config)
