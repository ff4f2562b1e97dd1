"""Ticks over a fleet of scripted replicas and a scripted router."""

from datetime import timedelta

from controlplane.models import Event, Replica, Router
from controlplane.services.fleet.replicas import add_replica
from telemetry.scraping.cycle import Shard, scrape_shard
from tests.telemetry.conftest import T0

WHOLE = Shard(0, 1)  # a small fleet's only one


def tick(number: int):
    return scrape_shard(WHOLE, (T0 + timedelta(seconds=5 * number)).timestamp())


def replica(pool, server, name, *answers) -> Replica:
    return add_replica(pool, name=name, url=server.script(f"/{name}/metrics", *answers))


def kinds():
    return list(
        Event.objects.filter(kind__startswith="replica_")
        .exclude(kind="replica_added")
        .order_by("pk")
        .values_list("kind", flat=True)
    )


def router(server, *answers) -> Router:
    url = server.script("/router/metrics", *answers)
    return Router.objects.create(name="router-1", admin_url=url, boot="b1", last_seen_at=T0)
