"""Showing the fleet, and applying documents."""

import pytest
import yaml
from django.utils import timezone

from controlplane.cli import fleet
from controlplane.models import Pool, Replica, Router
from controlplane.services.fleet.pools import create_pool, update_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from tests.fakes.fake_router import FakeRouter

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def document(warmpath, replica, tmp_path):
    """A file with the fleet in it."""
    path = tmp_path / "fleet.yaml"
    assert warmpath("export", str(path)).status == 0
    return path


def change_pool(path, change):
    """Change the document's first pool by a function."""
    bundle = yaml.safe_load(path.read_text())
    change(bundle["pools"][0])
    path.write_text(yaml.safe_dump(bundle))


def test_lists_are_tables_or_json(warmpath, replica):
    add_replica(replica.pool, name="r2", url="http://10.0.0.2:8000")
    table = warmpath("get", "replicas").out
    assert [line.split()[0] for line in table.splitlines()] == ["name", "r1", "r2"]
    rows = warmpath("--json", "get", "replicas", "-f", "pool=default").json
    assert [(row["name"], row["capacity_blocks"]) for row in rows] == [("r1", None), ("r2", None)]
    assert warmpath("get", "replicas", "-f", "state=disabled").out == "No replicas.\n"
    assert warmpath("--json", "get", "replicas", "r1").json["url"] == "http://10.0.0.1:8000"
    assert len(warmpath("--json", "get", "replicas", "--limit", "1").json) == 1


def test_a_plan_shows_actions_and_changes_nothing(warmpath, document):
    assert warmpath("plan", str(document), "--exit-code").status == 0
    change_pool(document, lambda pool: pool["replicas"][0].update(weight=3))
    planned = warmpath("plan", str(document), "--exit-code")
    assert planned.status == 3
    assert "weight: 1 -> 3" in planned.out
    assert Replica.objects.get().weight == 1.0


def test_applying_asks_for_confirmation(warmpath, document):
    change_pool(document, lambda pool: pool.update(description="H200s"))
    declined = warmpath("apply", str(document), stdin="n\n")
    assert (declined.status, Pool.objects.get().description) == (1, "")
    confirmed = warmpath("apply", str(document), stdin="y\n")
    assert (confirmed.status, Pool.objects.get().description) == (0, "H200s")
    assert "Nothing to do" in warmpath("apply", str(document)).out


def test_a_change_since_the_plan_is_rejected(warmpath, document, monkeypatch):
    change_pool(document, lambda pool: pool["replicas"][0].update(weight=3))
    asked = []

    def meanwhile(*arguments, **options):
        asked.append(arguments)
        update_pool(Pool.objects.get(), description="somebody was faster")

    monkeypatch.setattr(fleet.click, "confirm", meanwhile)
    late = warmpath("apply", str(document))
    assert (late.status, len(asked), Replica.objects.get().weight) == (1, 1, 1.0)
    assert "412" in late.err


def test_a_document_can_draft_policies(warmpath, document, policy):
    change_pool(document, lambda pool: pool.update(policy={"strategy": "prefix_hash"}))
    assert "change  draft  default" in warmpath("plan", str(document), "--draft").out
    assert policy.draft() is None
    assert warmpath("apply", str(document), "--draft", "--yes").status == 0
    assert (policy.live().strategy, policy.draft().strategy) == ("round_robin", "prefix_hash")


def test_pruning_is_an_option(warmpath, document):
    create_pool("other", models=["llama"])
    assert "Nothing to do" in warmpath("plan", str(document)).out
    assert "remove  pool  other" in warmpath("plan", str(document), "--prune").out
    assert warmpath("apply", str(document), "--prune", "--yes").status == 0
    assert [pool.name for pool in Pool.objects.all()] == ["default"]


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (2, "- a\n- b\n", "expected a document"),
        (2, "pools: [", "expected the node content"),
        (1, "format: 1\npools: [{name: default, colour: red}]\n", "#/pools/0/colour: There is no such field."),
    ],
)
def test_an_invalid_document_is_rejected_with_a_pointer(warmpath, replica, tmp_path, status, text, message):
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    result = warmpath("plan", str(path))
    assert result.status == status
    assert message in result.err


def test_a_document_can_come_from_standard_input(warmpath, document):
    assert "Nothing to do" in warmpath("plan", "-", stdin=document.read_text()).out


def test_an_export_can_be_json(warmpath, replica, tmp_path):
    warmpath("export", str(tmp_path / "fleet.json"))
    assert (tmp_path / "fleet.json").read_text() == warmpath("--json", "export").out
    assert yaml.safe_load(warmpath("export").out) == warmpath("--json", "export").json


def test_terminal_control_characters_are_removed(warmpath, pool):
    update_pool(pool, description="\x1b[31m[bold]red[/bold]\x1b[2J")
    shown = warmpath("get", "pools").out
    assert "\x1b" not in shown
    assert "[bold]red[/bold]" in shown


KEY = "0123456789abcdef"


def test_purge_counts_removes_and_fails_where_a_router_does_not_confirm(warmpath, pool):
    group = create_task_group(pool, "faq", response_cache={})
    with FakeRouter() as router:
        row = Router.objects.create(name="a", boot="b", admin_url=router.admin_url, last_seen_at=timezone.now())
        router.purged = {"memory_entries": 3, "store_entries": 2, "remaining_entries": 0, "problem": None}
        counted = warmpath("purge", str(group), "--dry-run")
        aborted = warmpath("purge", str(group), stdin="n\n")
        done = warmpath("--json", "purge", str(group), "--namespace", "", "--yes")
        router.purged = {**router.purged, "problem": "the store of response caches failed (TimeoutError)"}
        failed = warmpath("purge", str(group), "--key", KEY, "--yes")
        wrong = warmpath("purge", str(group), "--key", "*", "--yes")
    Router.objects.filter(pk=row.pk).update(admin_url="http://127.0.0.1:9")
    away = warmpath("purge", str(group), "--dry-run")
    unknown = warmpath("purge", f"{pool}.nothing", "--yes")

    scope = {"pool": pool.name, "group": "faq", "model": None, "namespace": None, "key": None}
    assert router.purges == [
        {**scope, "dry_run": True},
        {**scope, "namespace": "", "dry_run": False},
        {**scope, "key": KEY, "dry_run": False},
    ]
    assert wrong.status == 1
    assert "expected 16 to 64 of the characters 0-9 and a-f" in wrong.err
    assert (counted.status, counted.out.splitlines()[1].split()) == (0, ["a", "3", "2", "0", "-"])
    assert aborted.status == 1
    assert done.json["routers"] == [{"router": "a", **router.purged, "problem": None}]
    assert (failed.status, away.status, unknown.status) == (1, 1, 1)
    assert "router a: the store of response caches failed (TimeoutError)" in failed.err
    assert "router a: no response (ConnectError)" in away.err
    assert "There is no task group" in unknown.err
