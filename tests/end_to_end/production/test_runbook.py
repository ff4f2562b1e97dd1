"""The commands of docs/runbook.md on a running site: a backup, the loss of the database, and its restoration."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import httpx
import psycopg
import pytest

from controlplane.stack.servers import EmbeddedPostgres
from tests.contracts.documents.reading import ROOT, shown
from tests.end_to_end.production.conftest import HEADERS, ROUTERS, Site
from tests.reliability.stand import soon

CONTROL_PLANE = ("web", "worker", "worker-2", "beat")
CONVERGES_S = 60.0
REVISION = re.compile(r"^warmpath_router_config_revision (\d+)$", re.MULTILINE)
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def programs(short_dir: Path) -> str:
    """A path with pg_dump, pg_restore and psql of the server's version, as a host with the server has them."""
    binaries = EmbeddedPostgres(short_dir / "unused", short_dir / "unused")._binaries
    return f"{binaries}:/usr/bin:/bin"


class Runbook:
    """Runs the documented commands on a site."""

    def __init__(self, site: Site, programs: str) -> None:
        self.commands = shown((ROOT / "docs/runbook.md").read_text())
        self.executed: set[str] = set()
        self._site, self._programs = site, programs

    def run(self, word: str) -> str:
        """Output of the commands that contain a word, in order."""
        chosen = [command for command in self.commands if word in command]
        assert chosen, word
        return "".join(self._run(command) for command in chosen)

    def _run(self, command: str) -> str:
        self.executed.add(command)
        ports = {":8083": f":{self._site.ports['admin-1']}", ":8000": f":{self._site.ports['web']}"}
        for documented, port in ports.items():
            command = command.replace(documented, port)
        return self._site.host.sh(command.replace("/var/backups", str(self._site.host.folder)), PATH=self._programs)


@pytest.fixture(scope="module")
def runbook(site: Site, programs: str) -> Runbook:
    return Runbook(site, programs)


def newest(site: Site) -> int:
    """Number of the newest configuration in the database."""
    with psycopg.connect(site.database) as server:
        return server.execute("select max(number) from controlplane_configsnapshot").fetchone()[0]


def run_newest(site: Site, above: int = 0) -> bool:
    """Whether all routers say that they run the newest configuration, and its number is greater than ``above``."""
    urls = [f"http://127.0.0.1:{site.ports[f'admin-{number}']}/metrics" for number in ROUTERS]
    number = newest(site)
    running = [REVISION.search(site.http.get(url).text) for url in urls]  # None of a router without a configuration
    return number > above and all(match is not None and int(match[1]) == number for match in running)


def replicas_of(site: Site) -> set[str]:
    with psycopg.connect(site.database) as server:
        return {url for (url,) in server.execute("select url from controlplane_replica")}


def signed_in_page(site: Site) -> httpx.Response:
    """The overview after a sign-in as admin with the password that the installation printed."""
    password = re.search(r"the password (\S+)", site.output["seed_fleet"])[1].rstrip(".")
    form = site.get("/accounts/login/", HEADERS)
    token = re.search(r"csrftoken=(\w+)", form.headers["Set-Cookie"])[1]
    url, cookie = f"http://127.0.0.1:{site.ports['web']}", f"__Host-csrftoken={token}"
    headers = HEADERS | {"Cookie": cookie, "Referer": "https://warmpath.example.com/accounts/login/"}
    fields = {"login": "admin", "password": password, "csrfmiddlewaretoken": token}
    answer = site.http.post(f"{url}/accounts/login/", data=fields, headers=headers)
    assert answer.status_code == 302, answer.text
    session = re.search(r"(__Host-sessionid=[\w-]+)", ", ".join(answer.headers.get_list("Set-Cookie")))[1]
    return site.http.get(f"{url}/", headers=HEADERS | {"Cookie": session})


def served(site: Site, number: str) -> int:
    """Status of a request through a router."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    return site.http.post(f"http://127.0.0.1:{site.ports[f'data-{number}']}/v1/chat/completions", json=body).status_code


def test_a_lost_database_is_restored_from_its_backup(site, runbook):
    soon(lambda: run_newest(site), CONVERGES_S, "routers")
    backed_up = replicas_of(site)
    runbook.run("pg_dump")
    site.host.sh("/opt/warmpath/current/deploy/systemd/warmpath-manage seed_fleet --replica http://127.0.0.1:9")
    assert len(replicas_of(site)) == len(backed_up) + 1
    soon(lambda: run_newest(site), CONVERGES_S, "routers with the change")
    lost_number = newest(site)

    for name in CONTROL_PLANE:
        site.parts[name].stop()
    lose_database(site)
    assert [served(site, number) for number in ROUTERS] == [200, 200]
    runbook.run("pg_restore")
    runbook.run("manage migrate")
    runbook.run("manage maintain_partitions")
    audit = runbook.run("verify_audit")
    for name in CONTROL_PLANE:
        site.parts[name].start()

    assert re.search(r"[0-9a-f]{64}", audit), audit
    soon(site.is_ready, CONVERGES_S, "web and workers", every_s=0.5)
    soon(lambda: run_newest(site, above=lost_number), CONVERGES_S, "routers with the restored configuration")
    assert replicas_of(site) == backed_up
    assert signed_in_page(site).status_code == 200
    assert [served(site, number) for number in ROUTERS] == [200, 200]


def lose_database(site: Site) -> None:
    """Drop the database and create an empty one."""
    info = psycopg.conninfo.conninfo_to_dict(site.database)
    with psycopg.connect(host=info["host"], user="postgres", dbname="postgres", autocommit=True) as server:
        server.execute(f"drop database {info['dbname']} with (force)")
        server.execute(f"create database {info['dbname']}")


def test_commands_that_change_nothing_of_value_work_too(site, runbook):
    assert '"ready"' in runbook.run("/readyz")
    sizes = re.findall(r"^ (\w+) +\| \d+ (?:bytes|kB|MB)$", runbook.run("pg_size_pretty"), re.MULTILINE)
    assert len(sizes) == 12
    assert [name for name in sizes if re.search(r"_20\d{6}$", name)] == [], "partitions are added up"
    assert "WARMPATH_ROUTER_CONFIG_KEYS=" in runbook.run("config_key")
    runbook.run("--retention-days")


def test_after_the_loss_of_the_secret_key_the_fleet_can_be_changed_again(site, runbook):
    file = site.host.folder / "etc/warmpath/secrets/secret_key"
    file.write_text(secrets.token_urlsafe(48))
    for name in CONTROL_PLANE:
        site.parts[name].restart()
    soon(site.is_ready, CONVERGES_S, "web and workers", every_s=0.5)

    before = newest(site)
    assert "controlplane.FleetSecret.encrypted" in runbook.run("--discard-unreadable")

    soon(lambda: run_newest(site, above=before), CONVERGES_S, "routers with a new hash secret")
    assert signed_in_page(site).status_code == 200
    assert [served(site, number) for number in ROUTERS] == [200, 200]


def test_every_documented_command_was_executed(runbook):
    assert runbook.commands
    assert set(runbook.commands) == runbook.executed
