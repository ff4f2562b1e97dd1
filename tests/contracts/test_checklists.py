"""CONTRIBUTING.md's checklists: they are short and name files that exist, and no step was forgotten.

Where the package of an addition has tests of its own, those name what is missing: ``tests/telemetry/alerts`` and
``tests/telemetry/web/test_status_strip.py`` for a kind of alert, ``tests/telemetry/channels`` for a channel,
``tests/routing/proxy/test_pool_requests.py`` for a path, ``documents/test_strategies.py`` for a strategy, and
``tests/controlplane/access/test_rules.py`` for the roles of a REST resource.
"""

import re

import pytest

from telemetry.services.figures.figures import FIGURES
from telemetry.web.charts import CHARTS
from tests.contracts.documents.reading import ROOT
from tests.controlplane.api.test_document import DOCUMENT

MAX_STEPS = {
    "a channel": 4,
    "a chart": 2,
    "a path": 3,
    "a REST resource": 7,
    "a strategy": 4,
    "an alert kind": 4,
    "an engine": 2,
}
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
CHECKLISTS = dict(re.findall(r"^## Adding (.+)\n\n((?:.|\n)+?)(?=\n## )", CONTRIBUTING, re.MULTILINE))
# Figures of REST alone: sums that clients divide themselves, and what a page shows as a line of another chart.
ONLY_REST = {"cached_tokens", "errors", "latency", "local_hit_rate", "prompt_tokens", "reachable", "requests"}


@pytest.mark.parametrize("name", CHECKLISTS)
def test_a_checklist_is_short_and_names_files_that_exist(name):
    steps = re.findall(r"^\d\. (.*)", CHECKLISTS[name], re.MULTILINE)
    assert 0 < len(steps) <= MAX_STEPS[name]
    paths = re.findall(r"`([\w.]+/[\w./]*)`", CHECKLISTS[name])
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_no_checklist_is_missing():
    assert len(CHECKLISTS) >= 6


def test_every_figure_is_a_view_of_a_chart():
    shown = {(view.figure.metric, view.figure.by) for chart in CHARTS.values() for view in chart.views}
    figures = {(metric, by) for metric, figures in FIGURES.items() if metric not in ONLY_REST for by in figures}
    assert figures - shown == set(), "a view in telemetry/web/charts.py"


def test_the_readme_has_every_resource_of_the_api():
    rows = re.findall(r"^\| (`.+?) \| ", (ROOT / "controlplane/api/README.md").read_text(), re.MULTILINE)
    listed = {path.split("/")[0] for row in rows for path in re.findall(r"`([^`]+)`", row)}
    resources = {path.removeprefix("/api/v1/").split("/")[0] for path in DOCUMENT["paths"]} - {"openapi.json"}
    assert resources - listed == set(), "a row of the table in controlplane/api/README.md"
