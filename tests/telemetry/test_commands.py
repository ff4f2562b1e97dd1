from io import StringIO

import pytest
from django.core.management import call_command

from telemetry import tasks

pytestmark = pytest.mark.django_db


def test_maintain_partitions_reports_what_it_did(no_days):
    out = StringIO()

    call_command("maintain_partitions", "--days-ahead", "4", stdout=out)

    assert out.getvalue() == "15 tables created, 0 dropped.\n"


TASKS = (
    tasks.maintain_partitions,
    tasks.roll_up_readings,
    tasks.scrape_fleet,
    tasks.read_metrics_servers,
    tasks.check_versions,
    tasks.collect_decisions,
    tasks.compute_breakdowns,
    tasks.evaluate_alerts,
    tasks.run_what_ifs,
    tasks.analyze_rollouts,
    tasks.deliver_notifications,
    tasks.refresh_alerts,
    tasks.send_heartbeat,
)


def test_beat_schedules_every_task(settings):
    """Except the task of one shard, which the task of the fleet schedules."""
    names = {entry["task"] for entry in settings.CELERY_BEAT_SCHEDULE.values() if "telemetry" in entry["task"]}

    assert names == {task.name for task in TASKS}


def test_every_task_runs_on_an_empty_fleet():
    for task in TASKS:
        task()
    tasks.scrape_shard(0, 1)
