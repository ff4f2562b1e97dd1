"""A database with a full disk: writes fail, reads work, and it recovers without help."""

import subprocess
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import OperationalError, connection
from django.test import Client
from prometheus_client.parser import text_string_to_metric_families

from controlplane.celery import ResilientTask
from controlplane.database.base import is_disk_full
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.stack import paths
from telemetry import tasks
from telemetry.models import Reading, ScrapeShard
from telemetry.scraping.cycle import Shard, scrape_shard
from telemetry.services.self_monitoring import refused_since
from telemetry.storage.partitions import ensure_days
from tests.fakes.fake_metrics_server import serving, text
from tests.telemetry.conftest import T0
from tests.telemetry.expositions import replica_text

MAX_TICKS = 400  # more than fit into the rest of a database page


@contextmanager
def small_disk(folder, size="2m"):
    """A small file system for one tablespace; skips where mounting is not allowed."""
    folder.mkdir()
    account = paths.server_account()  # the account of the server
    owner = f",uid={account.uid},gid={account.gid}" if account else ""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}{owner}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def sql(*statements):
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def disk_is_full(statement):
    """Whether the server reports a full disk."""
    try:
        sql(statement)
    except OperationalError as error:
        if is_disk_full(error):
            return True
        raise
    return False


def fill_up():
    sql("create table filler (x text) tablespace small", "alter table filler alter x set storage plain")
    for bytes_each in (7000, 100):
        while not disk_is_full(f"insert into filler select repeat('x', {bytes_each}) from generate_series(1, 20)"):
            pass


@pytest.mark.django_db(transaction=True)
def test_a_full_disk_stops_only_writes_and_they_resume_by_themselves(short_dir):
    pool = create_pool("chat")
    ensure_days([T0.date()])
    partition = f"telemetry_reading_{T0:%Y%m%d}"
    with serving() as server, small_disk(short_dir / "small"):
        scrapes = [text(replica_text(100 * number, 10 * number)) for number in range(MAX_TICKS)]
        add_replica(pool, name="r1", url=server.script("/r1/metrics", *scrapes))
        sql(
            f"create tablespace small location '{short_dir / 'small'}'", f"alter table {partition} set tablespace small"
        )
        try:
            number = fill_and_recover()
        finally:
            sql(f"drop table if exists filler, {partition}", "drop tablespace small")
    assert number < MAX_TICKS


def refused_seconds():
    families = text_string_to_metric_families(Client().get("/metrics").content.decode())
    [family] = [family for family in families if family.name == "warmpath_controlplane_readings_refused_seconds"]
    return family.samples[0].value


def fill_and_recover():
    def tick(number):
        return scrape_shard(Shard(0, 1), (T0 + timedelta(seconds=5 * number)).timestamp())

    def stored():
        return list(Reading.objects.order_by("at").values_list("at", "state", "queries"))

    tick(0)
    tick(1)
    fill_up()
    number, before = 2, stored()
    while number < MAX_TICKS:
        before = stored()
        try:
            tick(number)
        except OperationalError:
            break
        number += 1
    assert stored() == before  # the failed tick stored nothing, and earlier rows are unchanged
    since = refused_since()
    assert since is not None
    with pytest.raises(OperationalError):
        tick(number + 1)
    assert refused_since() == since
    assert refused_seconds() > 0

    sql("drop table filler")
    tick(number + 2)
    assert refused_since() is None
    *_, last = stored()
    assert (last[1], last[2]) == ("gap", 300)  # counts from the time when nothing could be stored
    assert sum(queries or 0 for _, _, queries in stored()) == 100 * (number + 2)
    return number


@pytest.fixture
def disk_full(db):
    """The server rejects readings with PostgreSQL's disk-full error."""
    sql(
        "create function disk_full() returns trigger language plpgsql as "
        "$$ begin raise exception 'could not extend file' using errcode = '53100'; end $$",
        "create trigger disk_full before insert on telemetry_reading for each row execute function disk_full()",
    )


def test_a_worker_logs_the_start_and_the_end_of_a_full_disk_once(disk_full, monkeypatch, caplog):
    pool = create_pool("chat")
    with serving() as server:
        add_replica(pool, name="r1", url=server.script("/r1/metrics", text(replica_text(1, 0, facts=False))))
        monkeypatch.setattr("controlplane.celery._is_clock_right", lambda _: True)
        task = tasks.scrape_fleet
        assert isinstance(task, ResilientTask)
        for _ in range(2):
            ScrapeShard.objects.update(due_at=T0 - timedelta(days=3650))  # the next scrape is due
            task.apply()
        assert refused_since() is not None
        sql("drop trigger disk_full on telemetry_reading")
        ScrapeShard.objects.update(due_at=T0 - timedelta(days=3650))
        task.apply()

    lines = [record.getMessage() for record in caplog.records if record.name == "controlplane.celery"]
    assert [line.partition(" (")[0].partition(" after")[0] for line in lines] == [
        "the database's disk is full: telemetry.tasks.scrape_fleet stores nothing",
        "the database's disk has space again: telemetry.tasks.scrape_fleet continues",
    ]
    assert refused_since() is None
    assert Reading.objects.count() == 1
