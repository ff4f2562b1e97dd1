"""Celery tasks of telemetry, scheduled by beat. Each calls one service; nothing imports this module.

No task is retried: each run reads from the database what is due, and the next run starts within seconds.
"""

from celery import shared_task
from django.conf import settings
from django.utils import timezone

from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask
from telemetry.guards import measurement
from telemetry.scraping import collect, cycle, fetch, metrics_servers
from telemetry.scraping.cycle import Shard
from telemetry.services import retention
from telemetry.services.alerts import explanations
from telemetry.services.lab import replays, value, what_if_runs
from telemetry.services.notifications import channels, heartbeats, outbox
from telemetry.storage import partitions, rollup


@shared_task(acks_late=True, ignore_result=True)
def scrape_fleet() -> None:
    """Scrape a fleet of one shard; schedule the shards of a larger fleet as tasks at their due times."""
    shards = cycle.fleet_shards()
    if len(shards) == 1:
        cycle.scrape_shard(shards[0])
        return
    for shard, due, expires in cycle.upcoming_cycles(shards, timezone.now()):
        scrape_shard.apply_async((shard.number, shard.count), eta=due, expires=expires)


@shared_task(acks_late=True, ignore_result=True)
def scrape_shard(number: int, shard_count: int) -> None:
    """Scrape the replicas and routers of a shard. A task that is delivered twice scrapes once."""
    cycle.scrape_shard(Shard(number, shard_count))


@shared_task(acks_late=True, ignore_result=True)
def collect_decisions() -> None:
    """Store the decisions that routers made since the last run."""
    collect.collect_decisions(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def read_metrics_servers() -> None:
    """Read the metrics of replicas whose pools use a Prometheus server."""
    metrics_servers.read_metrics_servers()


@shared_task(acks_late=True, ignore_result=True)
def check_versions() -> None:
    """Read the engine version of replicas."""
    fetch.check_versions(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def compute_breakdowns() -> None:
    """Replay new decisions, and compute hit rate by cache size."""
    with isolated_items(PeriodicTask.HOUSEKEEPING) as item:
        with item("breakdowns"):
            replays.replay_pools(timezone.now())
        with item("capacity curves"):
            replays.update_curves(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def run_what_ifs() -> None:
    """Run the what-ifs that are queued, or whose worker was killed."""
    what_if_runs.run_queued()


@shared_task(acks_late=True, ignore_result=True)
def evaluate_alerts() -> None:
    """Evaluate all alert rules, and queue the notifications that are due."""
    explanations.evaluate_alerts(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def analyze_rollouts() -> None:
    """Analyze every canary that has a guard."""
    measurement.analyze_rollouts(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def deliver_notifications() -> None:
    """Send the notifications that are due, those of the latest steps of rollouts among them."""
    with isolated_items(PeriodicTask.DELIVERIES) as item, item("steps of rollouts"):
        channels.notify_rollouts(timezone.now())
    outbox.deliver_due()


@shared_task(acks_late=True, ignore_result=True)
def refresh_alerts() -> None:
    """Send alerts that still fire again to receivers that expire them."""
    outbox.resend_firing(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def send_heartbeat() -> None:
    """Send the heartbeat that is due, unless telemetry is late."""
    heartbeats.send_if_due(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def maintain_partitions() -> None:
    """Create the partitions of the days ahead, drop or delete what is beyond its retention, and summarize the week."""
    partitions.maintain(
        timezone.now(),
        retention_days=settings.READINGS_RETENTION_DAYS,
        decisions_h=settings.DECISIONS_RETENTION_H,
        rollup_days=settings.ROLLUP_RETENTION_DAYS,
    )
    with isolated_items(PeriodicTask.HOUSEKEEPING) as item:
        with item("alerts and messages"):
            retention.delete_expired(timezone.now())
        with item("weekly summary"):
            value.notify_weekly_summary(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def roll_up_readings() -> None:
    """Roll up complete bins, and re-aggregate those with late readings."""
    rollup.roll_up(timezone.now(), readings_retention_s=86_400.0 * settings.READINGS_RETENTION_DAYS)
