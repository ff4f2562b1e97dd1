import pytest
from django.db import connection


@pytest.mark.django_db
def test_the_database_is_a_real_postgresql():
    with connection.cursor() as cursor:
        cursor.execute("select version()")
        assert cursor.fetchone()[0].startswith("PostgreSQL")


def test_the_broker_is_a_real_server(valkey):
    from kombu import Connection

    with Connection(valkey) as broker:
        broker.ensure_connection(max_retries=1, timeout=2)
        assert broker.connected
