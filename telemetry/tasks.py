"""What the worker does for telemetry: thin doors. Beat knocks at them; nothing imports them.

None is retried: each works off what the database says is due, and the next tick is seconds away.
"""

from celery import shared_task
from django.conf import settings
from django.utils import timezone

from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask
from telemetry.scraping import collect, cycle, fetch, metrics_servers
from telemetry.scraping.cycle import Shard
from telemetry.services import guards
from telemetry.services.alerts import explanations, refreshing
from telemetry.services.lab import replays
from telemetry.services.notifications import heartbeats, outbox
from telemetry.storage import partitions, rollup


@shared_task(acks_late=True, ignore_result=True)
def scrape_fleet() -> None:
    """Scrape a fleet of one shard; have each shard of a larger one scraped by whichever worker, when it is due."""
    shards = cycle.fleet_shards()
    if len(shards) == 1:
        cycle.scrape_shard(shards[0])
        return
    for shard, due, over in cycle.upcoming_cycles(shards, timezone.now()):
        scrape_shard.apply_async((shard.number, shard.of), eta=due, expires=over)


@shared_task(acks_late=True, ignore_result=True)
def scrape_shard(number: int, of: int) -> None:
    """Store one reading or one gap per replica and router of a shard. One that was told twice scrapes once."""
    cycle.scrape_shard(Shard(number, of))


@shared_task(acks_late=True, ignore_result=True)
def collect_decisions() -> None:
    """Store what routers decided since they were last asked."""
    collect.collect_decisions(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def read_metrics_servers() -> None:
    """Store one reading or one gap per replica that a metrics server scrapes for us."""
    metrics_servers.read_metrics_servers()


@shared_task(acks_late=True, ignore_result=True)
def check_versions() -> None:
    """Ask replicas which version of their engine they run."""
    fetch.check_versions(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def compute_ladders() -> None:
    """Replay what was decided since, and say what more room would bring."""
    with isolated_items(PeriodicTask.HOUSEKEEPING) as item:
        with item("ladders"):
            replays.replay_pools(timezone.now())
        with item("capacity curves"):
            replays.update_curves(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def evaluate_alerts() -> None:
    """Evaluate every rule, and put into the outbox what is to be told."""
    explanations.evaluate_alerts(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def analyze_rollouts() -> None:
    """Judge every trial that has a guard."""
    guards.analyze_rollouts(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def deliver_notifications() -> None:
    """Send what is due in the outbox."""
    outbox.deliver_due()


@shared_task(acks_late=True, ignore_result=True)
def refresh_alerts() -> None:
    """Tell receivers that forget what still fires."""
    refreshing.resend_firing(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def send_heartbeat() -> None:
    """Give the sign of life that is due, while all is well."""
    heartbeats.beat(timezone.now())


@shared_task(acks_late=True, ignore_result=True)
def maintain_partitions() -> None:
    """Make the days ahead, drop those whose time is over."""
    partitions.maintain(
        timezone.now(),
        retention_days=settings.READINGS_RETENTION_DAYS,
        decisions_h=settings.DECISIONS_RETENTION_H,
        rollup_days=settings.ROLLUP_RETENTION_DAYS,
    )


@shared_task(acks_late=True, ignore_result=True)
def roll_up_readings() -> None:
    """Roll up the minutes, 5 minutes and hours that are over, and repair those that were marked."""
    rollup.roll_up(timezone.now(), readings_kept_s=86_400.0 * settings.READINGS_RETENTION_DAYS)
