import re
from datetime import timedelta

import pytest

from telemetry.models import Channel, Notification, NotificationState
from telemetry.services.notifications.channels import create_channel, open_config, test_send
from telemetry.services.notifications.outbox import Outcome, record_outcome
from tests.telemetry.services.notifications.scripted import claim_next


@pytest.fixture
def channel(visitor) -> Channel:
    return create_channel("on-call", config={"url": "http://127.0.0.1:1/a-secret-path"})


def test_a_webhook_is_added_and_its_secret_shown_once(visitor):
    answer = visitor.post("/channels/new/?kind=webhook", {"name": "on-call", "url": "https://example.org/hook"})

    channel = Channel.objects.get()
    secret = open_config(channel)["secret"]
    assert secret in answer.text
    assert "no-store" in answer["Cache-Control"]
    assert secret not in visitor.get("/channels/").text


def test_a_channel_is_added_and_tested_by_one_click(visitor):
    form = visitor.get("/channels/new/?kind=webhook").text
    assert re.search(r'<button class="button primary" name="test" value="1">Add and send test</button>', form)
    given = {"name": "on-call", "url": "https://example.org/hook"}
    text = visitor.post("/channels/new/?kind=webhook", {**given, "test": "1"}).text
    (sent,) = Notification.objects.all()
    assert (sent.kind, sent.channel.name) == ("test", "on-call")
    assert f'href="/deliveries/{sent.pk}/"' in text
    assert open_config(sent.channel)["secret"] in text


def test_an_invalid_url_is_rejected_with_an_error_at_its_field(visitor):
    answer = visitor.post("/channels/new/?kind=webhook", {"name": "on-call", "url": "ftp://example.org"})

    assert answer.status_code == 422
    assert 'id="id_url_error"' in answer.text


def test_the_list_shows_the_target_of_a_channel_and_no_secret(visitor, channel, django_assert_num_queries):
    with django_assert_num_queries(6):
        text = visitor.get("/channels/").text

    assert "http://127.0.0.1" in text
    assert "a-secret-path" not in text


def test_a_test_notification_is_queued_and_its_attempts_are_shown(visitor, channel, noon):
    visitor.post(f"/channels/{channel.pk}/test/")
    claim = claim_next(noon + timedelta(seconds=1))
    record_outcome(claim, Outcome(204, 0.125), noon)

    text = visitor.get("/channels/", headers={"HX-Request": "true"}).text

    assert "delivered, status 204, 125 ms" in text
    assert '<span class="badge good">delivered</span>' in text
    assert "<html" not in text


def test_a_notification_can_be_sent_again_with_the_same_id(visitor, channel, noon):
    notification = test_send(channel)
    record_outcome(claim_next(noon + timedelta(seconds=1)), Outcome(204, 0.1), noon)

    visitor.post(f"/deliveries/{notification.pk}/replay/")

    assert Notification.objects.get().state == NotificationState.PENDING


def test_a_channel_is_switched_off_and_removed(visitor, channel):
    visitor.post(f"/channels/{channel.pk}/switch/")
    assert not Channel.objects.get().enabled
    assert "No more notifications are sent to it" in visitor.get(f"/channels/{channel.pk}/remove/").text
    visitor.post(f"/channels/{channel.pk}/remove/")
    assert not Channel.objects.exists()


def test_without_a_channel_the_page_says_the_next_step(visitor):
    text = visitor.get("/channels/").text

    assert re.search(r"on these pages only.*Add channel", text, re.DOTALL)
    assert "No notifications yet" in text


def test_a_channel_asks_for_the_weekly_summary(visitor, channel):
    page = visitor.get(f"/channels/{channel.pk}/").text
    assert "Weekly summary" in page
    form = {"name": "on-call", "weekly_summary": "on"}
    assert visitor.post(f"/channels/{channel.pk}/", form).status_code == 302
    channel.refresh_from_db()
    assert channel.topics == ["weekly_summary"]
    assert "Weekly summary" in visitor.get("/channels/").text
    assert re.search(r'name="weekly_summary"[^>]* checked', visitor.get(f"/channels/{channel.pk}/").text)
    assert "Weekly summary" not in visitor.get("/channels/new/?kind=pagerduty").text


def test_a_template_is_previewed_before_it_is_saved(visitor):
    new = "/channels/new/?kind=template"
    text = visitor.get(new).text
    assert "Hit rate of pool chat is 20.1 %" in text
    assert '<button class="button" name="preview" value="1">Preview</button>' in text
    given = {"name": "t", "url": "https://example.org/hook", "method": "POST", "content_type": "application/json"}
    page = visitor.post(new, {**given, "body": '{"at": {{ data.pool | json }}}', "preview": "1"})
    assert (page.status_code, page.context["preview"]) == (200, '{"at": "chat"}')
    for button in ("preview", "save"):
        page = visitor.post(new, {**given, "body": '{\n"at": {{ data.pool }}}', button: "1"})
        assert page.status_code == 422
        assert page.context["form"].errors["body"][0].startswith("line 2: expected")
    long = {"content_type": "text/plain", "body": "{{ data | plain }}" * 1000}
    assert visitor.post(new, {**given, **long, "preview": "1"}).context["preview"] == ""
    assert not Channel.objects.exists()

    visitor.post(new, {**given, "body": "{}", "headers": "X-Key: s3cret"})
    channel = Channel.objects.get()
    edit = f"/channels/{channel.pk}/"
    page = visitor.post(edit, {**given, "url": "", "body": "[{{ state | json }}]", "preview": "1"})
    assert page.context["preview"] == '["firing"]'
    assert "s3cret" not in page.text
    assert open_config(channel)["body"] == "{}"
