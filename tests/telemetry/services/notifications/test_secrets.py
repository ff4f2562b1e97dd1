"""Secrets of channels: encrypted at rest, in no response or log, and rotated without losing a message."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from telemetry.models import Channel, DeliveryAttempt
from telemetry.services.notifications import outbox
from telemetry.services.notifications.channels import (
    open_config,
    public_config,
    rotate_secret,
    test_send,
    update_channel,
)
from tests.fakes.fake_webhook_receiver import Reply
from tests.telemetry.conftest import T0

pytestmark = pytest.mark.django_db


def test_the_log_has_responses_without_secrets(queued, channel, receiver, clock):
    secret = open_config(channel)["secret"]
    before = "." * 180  # the secret is where the log ends
    receiver.replies = [Reply(500, body=f"{before} {secret} {receiver.url} /hook/s3cret-path \x1b[31m".encode())]

    outbox.deliver_due(clock)

    assert DeliveryAttempt.objects.get().response == f"{before} ... ... ... [31m"
    channel.refresh_from_db()
    assert (channel.failed_at, channel.error, channel.delivered_at) == (T0, "it responded with status 500", None)


def test_a_rotated_secret_signs_together_with_the_old_one(channel, receiver, clock):
    old_secret = open_config(channel)["secret"]
    new_secret = rotate_secret(channel)
    channel.refresh_from_db()
    assert (open_config(channel)["secret"], open_config(channel)["previous_secret"]) == (new_secret, old_secret)
    test_send(channel)
    outbox.deliver_due(clock_now)
    update_channel(channel, config={"previous_secret": None})
    test_send(channel)
    outbox.deliver_due(clock_now)

    assert [len(got.headers["webhook-signature"].split()) for got in receiver.received] == [2, 1]


def clock_now():
    return datetime.now(UTC) + timedelta(seconds=1)


def test_secrets_are_encrypted_and_never_shown(channel, receiver):
    with connection.cursor() as cursor:
        cursor.execute("select row_to_json(c)::text from telemetry_channel c")
        stored = cursor.fetchone()[0]
    encrypted = bytes(Channel.objects.get().encrypted)
    config = open_config(channel)

    for planted in ("s3cret-path", config["secret"]):
        assert planted.encode() not in encrypted
        assert planted not in stored
        assert planted not in str(public_config(channel))


def test_changing_a_secret_keeps_other_fields(channel):
    before = open_config(channel)

    update_channel(channel, config={"previous_secret": before["secret"], "secret": None})

    channel.refresh_from_db()
    after = open_config(channel)
    assert after["url"] == before["url"]
    assert after["previous_secret"] == before["secret"] != after["secret"]
