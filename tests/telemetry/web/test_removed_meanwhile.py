"""What is changed on a page and was removed by somebody else since the page was looked at: a message, not an error."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connection
from django.test import Client

from controlplane.services.discovery.sources import create_source
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from telemetry.models import AlertRule
from telemetry.services.metrics_servers import create_server
from telemetry.services.notifications.channels import create_channel


@contextmanager
def removed_before(table: str, statement: str) -> Iterator[None]:
    """Somebody removes rows right before one of that table is locked."""
    waiting = [statement]

    def before(execute, sql, params, many, context):
        if f'FROM "{table}"' in sql and "FOR " in sql and "UPDATE" in sql and waiting:
            with connection.cursor() as cursor:
                cursor.execute(waiting.pop())
        return execute(sql, params, many, context)

    with connection.execute_wrapper(before):
        yield
    assert not waiting


@pytest.fixture
def rows(db) -> dict[str, int]:
    """A row of each kind by what addresses call it."""
    pool = create_pool("empty")
    rule = AlertRule.objects.filter(pool=pool).first()
    assert rule is not None
    return {
        "replica": add_replica(pool, name="r9", url="http://10.0.0.9:8000").pk,
        "group": create_task_group(pool, name="coding").pk,
        "source": create_source(pool, name="here", kind="dns", settings={"host": "vllm.example"}).pk,
        "rule": rule.pk,
        "channel": create_channel("on-call", config={"url": "http://127.0.0.1:1/hook"}).pk,
        "server": create_server(name="cluster", url="http://10.0.0.9:9090").pk,
    }


REMOVALS = {
    "/fleet/replicas/{replica}/remove/": ("controlplane_replica", "replica"),
    "/fleet/replicas/{replica}/state/draining/": ("controlplane_replica", "replica"),
    "/task-groups/{group}/remove/": ("controlplane_taskgroup", "group"),
    "/fleet/sources/{source}/remove/": ("controlplane_replicasource", "source"),
    "/alerts/rules/{rule}/remove/": ("telemetry_alertrule", "rule"),
    "/channels/{channel}/remove/": ("telemetry_channel", "channel"),
    "/channels/{channel}/rotate/": ("telemetry_channel", "channel"),
    "/channels/{channel}/switch/": ("telemetry_channel", "channel"),
    "/metrics-servers/{server}/remove/": ("telemetry_metricsserver", "server"),
}


@pytest.mark.parametrize("address", REMOVALS)
def test_a_second_click_on_a_removal_says_that_it_is_gone(address: str, visitor: Client, rows: dict[str, int]) -> None:
    table, name = REMOVALS[address]
    with removed_before(table, f"delete from {table} where id = {rows[name]}"):
        answer = visitor.post(address.format(**rows), follow=True)

    assert answer.status_code == 200
    assert "was removed meanwhile. Nothing was changed." in answer.text
