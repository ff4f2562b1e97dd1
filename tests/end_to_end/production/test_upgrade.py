"""What clients of the routers may see of crashes and upgrades, under load.

- Anything that happens to web, workers or beat, a migration included: nothing.
- A router that gets SIGTERM (restart, upgrade): nothing, streamed responses included.
- A router that is killed: responses that have begun are cut off. Every other request gets a complete response.
"""

from collections import Counter

import psycopg
import pytest

from tests.end_to_end.production.client_load import KINDS
from tests.end_to_end.production.conftest import RESUMES_S, ROUTERS, Site, documented
from tests.reliability.stand import soon

NEXT_RELEASE = "tests.reliability.next_release.production"
COLUMNS = """
    select count(distinct column_name) from information_schema.columns where column_name in ('next_note', 'next_figure')
"""
pytestmark = pytest.mark.timeout(400)


def columns_of_next_release(site: Site) -> int:
    with psycopg.connect(site.database) as server:
        return server.execute(COLUMNS).fetchone()[0]


def test_a_killed_router_breaks_at_most_the_requests_that_it_had(site, load):
    site.parts["router-1"].crash()
    load.until_served(10)
    failed = Counter(outcome.kind for outcome in load.failures)
    assert max(failed.values(), default=0) <= 1, "each client has one request at a time"
    assert failed.total() < len(KINDS), "most of them are sent to the other router"


def test_clients_notice_nothing_while_the_next_release_migrates(site, load):
    settings = site.host.folder / "etc/warmpath/control-plane.env"
    settings.write_text(settings.read_text().replace("controlplane.settings.production", NEXT_RELEASE))
    site.host.install("0.2.0")
    (command,) = documented("0.2.0/deploy")
    site.host.sh(command)
    assert columns_of_next_release(site) == 2
    site.until_works()
    assert load.failures == []


def test_clients_notice_nothing_of_a_rolling_upgrade_of_the_routers(site, load):
    site.host.use_release("0.2.0")
    for number in ROUTERS:
        site.parts[f"router-{number}"].restart()
        assert site.runs_release(f"router-{number}", "0.2.0")
        soon(lambda number=number: site.has_requests(number), RESUMES_S, f"requests at router {number}", every_s=0.1)
    load.until_served(10)
    assert load.failures == []


@pytest.mark.parametrize("name", ["web", "worker", "beat"])
def test_clients_notice_nothing_of_a_killed_part_which_starts_again_as_the_next_release(site, load, name):
    site.parts[name].crash()
    assert site.runs_release(name, "0.2.0")
    site.until_works()
    assert load.failures == []


def test_every_part_stops_in_time_and_logs_no_error(site):
    site.http.close()  # the web process waits 10 s for open connections
    for part in site.parts.values():
        part.stop()
    lines = [line for part in site.parts.values() for line in part.process.lines]
    assert [line for line in lines if "Traceback" in line] == []
