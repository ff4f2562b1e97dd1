"""Stored cross-site scripting: sixty payloads in every text field, and every page opened in a browser."""

import csv
import io
import itertools
from pathlib import Path
from urllib.parse import quote

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.db import DataError, IntegrityError, connection, models, transaction
from django.db.models import Subquery

from controlplane.models import Event, EventKind, Pool, Role, Router, Scope
from controlplane.services.access.tokens import create_token
from controlplane.services.access.users import add_user
from controlplane.services.audit_log import append_entry
from telemetry.models import Decision, RouterReading
from tests.end_to_end.every_page import ANYWHERE, of_rows

STRINGS = (Path(__file__).parent.parent / "data/xss/strings.txt").read_text().splitlines()
FORMULAS = ("=cmd|'/c calc'!A1", "+1+1", "-1+1", "@SUM(1)", "\t=1", "\r=1")
pytestmark = pytest.mark.timeout(400)

# What would have run, or could still: seen from inside the page.
WATCH = """
window.ran = [];
for (const name of ["alert", "confirm", "prompt"]) window[name] = (what) => window.ran.push(`${name} ${what}`);
addEventListener("securitypolicyviolation", (event) => window.ran.push(`${event.violatedDirective} ${event.sample}`));
"""
ARMED = """() => [...document.querySelectorAll("*")].flatMap((element) => [...element.attributes]
    .filter(({name, value}) => name.startsWith("on") || name.startsWith("hx-on")
        || (["href", "src", "action", "formaction", "data", "xlink:href"].includes(name)
            && /^\\s*javascript:/i.test(value))
        || (element.tagName === "IFRAME"))
    .map(({name, value}) => `${element.tagName} ${name}=${value}`))"""


def texts(model):
    """Free-text fields of a model."""
    for field in model._meta.concrete_fields:
        if isinstance(field, models.CharField | models.TextField) and not field.choices and not field.primary_key:
            yield field


@pytest.fixture
def poisoned(everything, full, operator):
    """The fleet of ``full`` with payloads in every text field; the pool."""
    turn = itertools.cycle(STRINGS)
    for number, string in enumerate(STRINGS):
        Event.objects.create(
            kind=EventKind.POOL_CHANGED, pool=full, summary=string, detail={"before": {string: string}, "after": string}
        )
        append_entry("pool_changed", string, reason=string, before={string: string}, after=[string])
        create_token(operator, name=string, scopes=[Scope.READ])
        add_user(f"user-{number}", password="a long enough password")
    with connection.cursor() as cursor:
        cursor.execute("set session_replication_role = replica")  # what never changes is changed here
    written = set()
    for model in [
        User,
        *apps.get_app_config("controlplane").get_models(),
        *apps.get_app_config("telemetry").get_models(),
    ]:
        for field in texts(model):
            if field.name in KEPT or not model._meta.managed:
                continue
            for key in list(model._base_manager.order_by("pk").values_list("pk", flat=True)[:70]):
                if poison(model, key, field, next(turn)):
                    written.add((model._meta.label, field.name))
    Router.objects.update(
        last_nack={"revision": 1, "path": next(turn), "reason": next(turn), "at": "2026-11-21T10:00Z"}
    )
    full.replicas.update(labels={next(turn): next(turn) for _ in range(8)})
    for string in STRINGS:
        RouterReading.objects.filter(group="coding").update(policy=string)
    RouterReading.objects.filter(group="summaries").update(group=STRINGS[0])
    RouterReading.objects.filter(group="retrieval").update(group=STRINGS[36])
    Decision.objects.update(pool=Subquery(Pool.objects.values("name")[:1]))  # or nobody would find them
    with connection.cursor() as cursor:
        cursor.execute("set session_replication_role = origin")
    assert len(written) > 60, written
    full.refresh_from_db()
    return full


# Codes that only programs write, and by which a row is found or understood.
KEPT = {"username", "password", "boot", "kind", "move", "transition", "plan", "digest", "sha256", "unit"}


def poison(model, key, field, string):
    """Store a payload; False if the database rejects it."""
    try:
        with transaction.atomic():
            model._base_manager.filter(pk=key).update(**{field.name: string[: field.max_length]})
    except (IntegrityError, DataError):
        return False
    return True


def test_no_string_runs_on_any_page(site, everything, poisoned, complaints):
    page = site.open(viewport={"width": 1280, "height": 800})
    complaints.listen(page)
    dialogs, broken = [], []
    page.on("response", lambda answer: answer.status >= 500 and broken.append(answer.url))  # the charts' too
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.add_init_script(WATCH)
    ran, armed = {}, {}
    asked = [f"/audit/?actor={string}&kind={string}" for string in STRINGS[::12]]
    asked += [f"/?by={string}&range={string}" for string in STRINGS[::20]]
    asked += [f"/accounts/confirm/?next={string}" for string in ("javascript:alert(1)", STRINGS[0])]
    names = [quote(poisoned.name), quote(poisoned.replicas.first().name), quote(poisoned.groups.first().name)]
    asked += [f"/pools/{names[0]}/", f"/pools/{names[0]}/groups/{names[2]}/", f"/replicas/{names[1]}/"]
    for path in [*ANYWHERE, *of_rows(everything), *asked]:
        page.goto(path, wait_until="load")
        for element in page.locator(".js-plotly-plot").all():
            element.hover()
        if found := page.evaluate("window.ran"):
            ran[path] = found
        if found := page.evaluate(ARMED):
            armed[path] = found
    complaints.heard[:] = [text for text in complaints.heard if "Failed to load resource" not in text]  # 404, 400

    assert (broken, dialogs, ran, armed) == ([], [], {}, {})


def test_no_exported_cell_is_a_formula(client, full, here_admin):
    for string in FORMULAS:
        append_entry("pool_changed", string, reason=string)
    RouterReading.objects.filter(group="coding").update(group=FORMULAS[0])
    client.force_login(here_admin)
    for path in ("/audit.csv", "/charts/hit-rate.csv?by=group"):
        answer = client.get(path)
        text = b"".join(answer.streaming_content if answer.streaming else [answer.content]).decode()
        cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
        assert len(cells) > 5
        assert [cell for cell in cells if cell[:1] in "=+-@\t\r" and cell and not is_number(cell)] == []
        assert any(FORMULAS[0] in cell for cell in cells)


def is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


@pytest.fixture
def here_admin(db):
    from controlplane.services.access.users import set_role

    user = add_user("root", password="a long enough password")
    set_role(user, Role.ADMIN, None)
    return user
