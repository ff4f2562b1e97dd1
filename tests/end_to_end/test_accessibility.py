"""Every page, full and refused in both themes and at two widths, and empty: no axe violation, no sideways scrolling."""

import re

import pytest
from django.db import OperationalError

from controlplane.models import Replica, Role
from controlplane.services.access.users import add_user, set_role
from telemetry.models import Reading, ScrapeState
from tests.end_to_end.every_page import ANYWHERE, of_rows
from tests.end_to_end.looking import SIZES, THEMES, look, look_at

pytestmark = pytest.mark.timeout(900)
EXPECTED = ("404 (Not Found)", "422 (", "403 (Forbidden)", "400 (Bad Request)", "status of 500", "status of 503")
FORM = re.compile(r"/new/|/accounts/|/heartbeat/")
HELD = "htmx:error: timeout"  # axe holds a page's only thread, on a slow machine longer than a refresh may take


@pytest.fixture
def page(site, complaints):
    """A signed-in page. Console messages are allowed: error pages and delayed refreshes produce them."""
    page = site.open(viewport=SIZES[360])
    complaints.listen(page)
    yield page
    complaints.heard[:] = [text for text in complaints.heard if not any(code in text for code in (*EXPECTED, HELD))]


def test_pages_of_an_empty_installation(page):
    """A form is the same with and without rows."""
    assert look_at(page, [path for path in ANYWHERE if not FORM.search(path)], widths=[1280], themes=["light"]) == {}


@pytest.mark.generated
def test_pages_of_a_fleet_at_work(page, everything):
    assert look_at(page, [*ANYWHERE, *of_rows(everything)]) == {}


def test_a_replica_without_prefix_caching(page, full):
    """The longest text in place of a figure."""
    Reading.objects.filter(replica=Replica.objects.get(name="gpu-2")).update(queries=0, hits=0)
    ScrapeState.objects.filter(replica__name="gpu-2").update(lacks_prefix_cache=True)

    assert look_at(page, ["/replicas/gpu-2/"]) == {}
    assert page.get_by_text("not reported by this engine").first.is_visible()


# Forms that are sent as they should not be: the address, what is filled in, and the button.
REFUSED = (
    ("/policies/{policy}/edit/?strategy=prefix_hash", {"Slack": "-1"}, "Save draft and review"),
    ("/policies/{policy}/revert/1/", {"Reason": ""}, "Roll back to revision 1"),
    ("/fleet/pools/new/", {"Name": "No Name!"}, "Add pool"),
    ("/fleet/pools/{pool}/replicas/new/", {"Name": "gpu-9", "URL": "nowhere"}, "Add replica"),
    ("/task-groups/new/{pool}/", {"Name": "coding"}, "Add task group"),
    ("/alerts/silences/new/", {"Alerts with": "nonsense"}, "Create silence"),
    ("/alerts/rules/{rule}/", {"Fire at a drop of": "soon"}, "Save"),
    ("/channels/new/?kind=webhook", {"Name": "on-call", "URL": "ftp://x"}, "Add and send test"),
    ("/channels/heartbeat/", {"URL": "ftp://x"}, "Save"),
    ("/metrics-servers/new/", {"Name": "x", "URL": "ftp://x"}, "Add server"),
    ("/what-if/", {"Numbers of replicas": "three"}, "Predict"),
    ("/users/new/", {}, "Add"),
    ("/projects/new/", {"Name": "No Name!"}, "Add"),
    ("/client-keys/", {"Name": "No Name!"}, "Create"),
    ("/tokens/", {"Name": ""}, "Create"),
    ("/accounts/password/change/", {}, "Change"),
)


def test_forms_that_are_refused_and_a_rule_that_was_tried(page, everything):
    wrong = {}
    for path, filled, button in REFUSED:
        page.goto(path.format_map(everything))
        main = page.get_by_role("main")
        for label, text in filled.items():
            main.get_by_label(label).first.fill(text)
        main.locator("form").evaluate_all("forms => forms.forEach((form) => { form.noValidate = true })")
        main.get_by_role("button", name=button).first.click()
        page.locator("#errors").wait_for()
        if found := look(page):
            wrong[path] = found
        if not page.title().startswith("Error: ") or page.evaluate("document.activeElement.id") != "errors":
            wrong[path] = {"not announced": page.title()}
    page.goto(f"/alerts/rules/{everything['rule']}/")
    page.get_by_role("button", name="Preview on past data").click()
    page.locator("#preview-title").wait_for()
    wrong["preview of a rule"] = look(page)

    assert {path: found for path, found in wrong.items() if found} == {}


# What may go wrong at the server: what the view raises, and what the page says.
FAULTS = (
    (ValueError("x"), "Something went wrong"),
    (OperationalError("x"), "Database unavailable"),
)


def test_errors(page, site, monkeypatch):
    wrong = {}
    for fault, title in FAULTS:

        def fail(*_args, fault=fault):
            raise fault

        monkeypatch.setattr("telemetry.web.views.links.search", fail)
        page.goto("/search/?q=gpu")
        page.get_by_role("heading", name=title).wait_for()
        wrong[title] = look(page)
    set_role(user := add_user("vera", password="a long enough password"), Role.VIEWER, None)
    seen = page.context.new_page()
    seen.context.clear_cookies()
    seen.goto("/accounts/login/?next=/users/")
    wrong["sign in"] = look(seen)
    seen.get_by_label("Username").fill(user.username)
    seen.get_by_label("Password").fill("not hers")
    seen.get_by_role("button", name="Sign in").click()
    seen.get_by_role("alert").first.wait_for()
    wrong["wrong password"] = look(seen)
    seen.get_by_label("Username").fill(user.username)
    seen.get_by_label("Password").fill("a long enough password")
    seen.get_by_role("button", name="Sign in").click()
    seen.get_by_role("heading", name="Permission denied").wait_for()
    wrong["forbidden"] = look(seen)

    assert {title: found for title, found in wrong.items() if found} == {}


def test_the_theme_of_the_cookie_is_the_one_that_is_shown(site):
    for theme in THEMES:
        page = site.open(theme=theme, color_scheme="light")
        page.goto("/fleet/")
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == theme
