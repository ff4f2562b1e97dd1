"""What several queries read belongs to one moment, whatever is committed in between."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from django.db import DatabaseError, connection
from django.test import Client

from controlplane.access.actor import roles_of
from controlplane.api.bundle import export_bundle
from controlplane.database.transactions import repeatable_read
from controlplane.models import Pool
from controlplane.services.fleet.pools import create_pool, remove_pool
from tests.controlplane.threads import at_once

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def committed_before(table: str, work: Callable[[], object]) -> Iterator[None]:
    """Somebody else's change is committed right before a table is asked for."""
    waiting = [work]

    def before(execute, sql, params, many, context):
        if f'FROM "{table}"' in sql and waiting:
            assert at_once(waiting.pop()) == [None]
        return execute(sql, params, many, context)

    with connection.execute_wrapper(before):
        yield
    assert not waiting


def test_a_pool_that_is_removed_while_it_is_exported_is_whole_in_the_bundle(pool, admin_user):
    whole = export_bundle(roles_of(admin_user))
    with committed_before("controlplane_routingpolicy", lambda: remove_pool(pool)):
        assert export_bundle(roles_of(admin_user)) == whole
    assert export_bundle(roles_of(admin_user))["pools"] == []


def test_a_pool_that_is_removed_while_policies_are_listed_is_no_error(pool, admin_user):
    client = Client()
    client.force_login(admin_user)
    with committed_before("controlplane_routingpolicy", lambda: remove_pool(pool)):
        assert "default" in client.get("/policies/").content.decode()


def test_nothing_is_written_in_such_a_moment_and_anything_after_it(pool):
    with pytest.raises(DatabaseError, match="read-only"), repeatable_read():
        create_pool("other", models=["m"])
    create_pool("other", models=["m"])
    assert Pool.objects.count() == 2
