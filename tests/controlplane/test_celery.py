import json
import time
from contextlib import closing

import pytest
import redis
from celery.beat import SchedulingError
from django.db import transaction
from kombu.exceptions import ContentDisallowed
from redis.exceptions import ConnectionError as RedisConnectionError

from controlplane.celery import OutageLoggingScheduler, _broker, app, wake
from tests.fakes.fake_metrics_server import silent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def broker(valkey, monkeypatch):
    """A connection to a real broker with an empty queue."""
    monkeypatch.setattr(app.conf, "broker_url", valkey)
    path = valkey.removeprefix("redis+socket://").partition("?")[0]
    with redis.Redis(unix_socket_path=path) as connection:
        connection.flushall()
        yield connection


def test_a_wake_up_is_sent_on_commit(broker):
    with transaction.atomic():
        wake("controlplane.tasks.push_config", 7)
        assert broker.llen("celery") == 0
    (message,) = broker.lrange("celery", 0, -1)
    assert json.loads(message)["headers"]["task"] == "controlplane.tasks.push_config"


def test_a_rollback_sends_no_wake_up(broker):
    with transaction.atomic():
        wake("controlplane.tasks.push_config", 7)
        transaction.set_rollback(True)
    assert broker.llen("celery") == 0


def test_a_hanging_broker_delays_no_request(monkeypatch, caplog):
    _broker.record_recovery(time.monotonic())
    with silent() as port:
        monkeypatch.setattr(app.conf, "broker_url", f"redis://127.0.0.1:{port}/0")
        started_s = time.monotonic()
        wake("controlplane.tasks.push_config", 7)
        assert time.monotonic() - started_s < 10
    assert "tasks cannot be sent to the broker (controlplane.tasks.push_config: " in caplog.text


def test_an_outage_of_the_broker_and_its_recovery_are_logged_once_each(broker, monkeypatch, caplog):
    _broker.record_recovery(time.monotonic())
    caplog.clear()
    with monkeypatch.context() as unavailable:
        unavailable.setattr(app.conf, "broker_url", "redis://127.0.0.1:1/0")
        for number in range(3):
            wake("controlplane.tasks.push_config", number)
    for number in range(3):
        wake("controlplane.tasks.push_config", number)
    assert [record.getMessage().partition(" (")[0].partition(" after ")[0] for record in caplog.records] == [
        "tasks cannot be sent to the broker",
        "tasks can be sent to the broker again",
    ]
    assert broker.llen("celery") == 3


@pytest.fixture
def beat(broker, tmp_path):
    """A beat with the site's schedule, which sends to the real broker."""
    scheduler = OutageLoggingScheduler(app=app, schedule_filename=str(tmp_path / "schedule"))
    with closing(scheduler):
        yield scheduler


def test_without_a_worker_the_queue_is_bounded_and_work_resumes_when_one_is_back(broker, beat, monkeypatch, caplog):
    monkeypatch.setattr("controlplane.celery.MAX_QUEUED", 5)
    entry = beat.schedule["deliver"]
    for _ in range(12):
        beat.apply_entry(entry, producer=beat.producer)
    assert broker.llen("celery") == 5
    broker.delete("celery")  # a worker takes and discards them
    beat.apply_entry(entry, producer=beat.producer)
    assert broker.llen("celery") == 1
    assert [record.getMessage().partition(" after ")[0] for record in caplog.records] == [
        "no worker takes messages (5 wait); due work is postponed",
        "workers take messages again",
    ]


def test_a_closed_channel_does_not_stop_the_beat(broker, beat):
    producer = beat.producer
    producer.channel.close()
    beat.apply_entry(beat.schedule["deliver"], producer=producer)  # as after the end of a broker
    beat.apply_entry(beat.schedule["deliver"], producer=beat.producer)


def test_a_beat_without_a_broker_logs_that_and_not_that_workers_are_missing(broker, beat, monkeypatch, caplog):
    producer = beat.producer
    monkeypatch.setattr(type(producer.channel), "queue_declare", raising(RedisConnectionError("refused")))
    monkeypatch.setattr(beat, "apply_async", raising(SchedulingError("refused")))
    for _ in range(3):
        beat.apply_entry(beat.schedule["deliver"], producer=producer)
    assert [record.getMessage() for record in caplog.records] == [
        "the broker is unavailable (refused); due work is postponed"
    ]


def test_a_beat_that_is_closed_while_it_sends_ends_without_an_error(broker, beat, monkeypatch, caplog):
    def send(*_args, **_options):
        beat.close()  # as Celery does on SIGTERM
        raise SchedulingError("the connection was closed")

    monkeypatch.setattr(beat, "apply_async", send)
    with pytest.raises(SystemExit):
        beat.apply_entry(beat.schedule["deliver"], producer=beat.producer)
    assert caplog.records == []


def raising(error):
    def fail(*_args, **_options):
        raise error

    return fail


def test_tasks_are_accepted_as_json_only(broker):
    """With pickle, any client of the broker could run code in a worker."""
    accepted, errors = [], []
    with app.connection_for_read() as connection:
        consumer = app.amqp.TaskConsumer(connection.default_channel, callbacks=[lambda body, _: accepted.append(body)])
        consumer.on_decode_error = lambda _, error: errors.append(type(error))
        for serializer in ("pickle", "yaml", "json"):
            producer = connection.Producer(serializer=serializer)
            producer.publish({"by": serializer}, routing_key="celery", exchange="celery")
        with consumer:
            for _ in range(3):
                connection.drain_events(timeout=5)
    assert [body["by"] for body in accepted] == ["json"]
    assert errors == [ContentDisallowed, ContentDisallowed]


def test_a_worker_has_only_our_tasks():
    app.loader.import_default_modules()
    packages = {name.partition(".")[0] for name in app.tasks}
    assert packages == {"celery", "controlplane", "telemetry"}
    assert app.conf.accept_content == ["json"]
    assert {entry["task"] for entry in app.conf.beat_schedule.values()} <= set(app.tasks)
