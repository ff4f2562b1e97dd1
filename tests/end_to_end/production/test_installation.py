"""The documented commands install and start a site."""

import re

import pytest
import yaml

from tests.contracts.documents.reading import ROOT
from tests.end_to_end.production.conftest import HEADERS, documented

COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
pytestmark = pytest.mark.timeout(400)


def test_the_documented_commands_bring_up_a_site(site):
    page = site.get("/accounts/login/", HEADERS)

    assert len(documented("")) == len(documented("warmpath")), "the commands of this file are all that there are"
    assert re.search(r"Sign in as admin with the password \S{12,}", site.output["seed_fleet"])
    assert page.status_code == 200
    assert re.match(r"__Host-csrftoken=\w+; .*Path=/; SameSite=Lax; Secure$", page.headers["Set-Cookie"])
    assert re.search(r'href="/static/css/[\w.-]+\.[0-9a-f]{12}\.css"', page.text), "static files are hashed"
    plain = site.get("/accounts/login/")
    assert (plain.status_code, plain.headers["Location"][:8]) == (301, "https://")


@pytest.mark.parametrize("name", ["web", "worker", "beat", "router-1"])
def test_the_health_check_of_the_compose_file_passes(site, name):
    """The chart runs those of worker and beat too."""
    _, *command = COMPOSE["services"][name]["healthcheck"]["test"]
    places = {":8000/": f":{site.ports['web']}/", ":8081/": f":{site.ports['admin-1']}/",
              '"/tmp"': f'"{site.host.folder}/var/lib/warmpath/beat"'}  # fmt: skip
    for in_container, here in places.items():
        command = [word.replace(in_container, here) for word in command]
    done = site.parts[name].run(command)
    assert done.returncode == 0, done.stdout + done.stderr
