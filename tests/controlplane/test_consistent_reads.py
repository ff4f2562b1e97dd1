"""Several queries of one export or page read one snapshot of the database."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from django.db import DatabaseError, connection
from django.test import Client

from controlplane.access.actor import roles_of
from controlplane.api.bundle import export_bundle, read_pools
from controlplane.database.transactions import repeatable_read
from controlplane.models import Pool
from controlplane.services.fleet.pools import create_pool, remove_pool
from tests.controlplane.threads import at_once

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def committed_before(table: str, change: Callable[[], object]) -> Iterator[None]:
    """Commit another connection's change right before a table is queried."""
    pending = [change]

    def before(execute, sql, params, many, context):
        if f'FROM "{table}"' in sql and pending:
            assert at_once(pending.pop()) == [None]
        return execute(sql, params, many, context)

    with connection.execute_wrapper(before):
        yield
    assert not pending


def test_an_export_is_consistent_with_a_concurrent_removal(pool, admin_user):
    before = export_bundle(read_pools(roles_of(admin_user)))
    with committed_before("controlplane_routingpolicy", lambda: remove_pool(pool)):
        assert export_bundle(read_pools(roles_of(admin_user))) == before
    assert export_bundle(read_pools(roles_of(admin_user)))["pools"] == []


def test_a_list_tolerates_a_concurrent_removal(pool, admin_user):
    client = Client()
    client.force_login(admin_user)
    with committed_before("controlplane_routingpolicy", lambda: remove_pool(pool)):
        assert "default" in client.get("/policies/").content.decode()


def test_repeatable_read_is_read_only(pool):
    with pytest.raises(DatabaseError, match="read-only"), repeatable_read():
        create_pool("other", models=["m"])
    create_pool("other", models=["m"])
    assert Pool.objects.count() == 2
