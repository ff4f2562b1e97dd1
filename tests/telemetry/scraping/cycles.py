"""Scrape cycles over scripted replicas and a scripted router."""

from datetime import timedelta

from controlplane.models import Event, Replica, Router
from controlplane.services.fleet.replicas import add_replica
from telemetry.models import Reading
from telemetry.scraping.cycle import Shard, scrape_shard
from tests.fakes.fake_metrics_server import text
from tests.telemetry.conftest import T0

WHOLE = Shard(0, 1)  # the only shard of a small fleet


def run_cycle(number: int):
    return scrape_shard(WHOLE, (T0 + timedelta(seconds=5 * number)).timestamp())


def replica(pool, server, name, *responses) -> Replica:
    """A replica with scripted responses; a string is an exposition."""
    scripted = [text(response) if isinstance(response, str) else response for response in responses]
    return add_replica(pool, name=name, url=server.script(f"/{name}/metrics", *scripted))


def scrape(pool, server, *responses) -> Replica:
    """The replica ``r1``, scraped once for each response."""
    added = replica(pool, server, "r1", *responses)
    for number in range(len(responses)):
        run_cycle(number)
    return added


def scrape_router(server, *expositions) -> Router:
    """A router, scraped once for each exposition."""
    url = server.script("/router/metrics", *map(text, expositions))
    router = Router.objects.create(name="router-1", admin_url=url, boot="b1", last_seen_at=T0)
    for number in range(len(expositions)):
        run_cycle(number)
    return router


def stored(*columns):
    """Columns of all readings of replicas, in the order of time."""
    return list(Reading.objects.order_by("at").values_list(*columns, flat=len(columns) == 1))


def events():
    """Kinds of events about replicas, in order."""
    rows = Event.objects.filter(kind__startswith="replica_").exclude(kind="replica_added")
    return list(rows.order_by("pk").values_list("kind", flat=True))
