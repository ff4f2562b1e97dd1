"""Under ASGI, exports and files are streamed instead of collected in memory."""

from __future__ import annotations

import csv
import io
import json
from datetime import datetime

import pytest
from asgiref.sync import async_to_sync
from django.http import StreamingHttpResponse
from django.test import AsyncClient, AsyncRequestFactory, RequestFactory

from controlplane.middleware import CHUNK_BYTES, StreamingMiddleware
from controlplane.models import AuditEntry
from controlplane.services.audit_log import digest_of
from controlplane.services.fleet.pools import create_pool

PARTS = 1000
PART = b"x" * 1024


def streamed(factory):
    """(the response's content, the parts that the view has yielded)."""
    yielded = []

    def parts():
        for number in range(PARTS):
            yielded.append(number)
            yield PART

    response = StreamingMiddleware(lambda _: StreamingHttpResponse(parts()))(factory().get("/"))
    return response.streaming_content, yielded


def test_a_stream_reads_no_more_than_one_chunk_ahead():
    content, yielded = streamed(AsyncRequestFactory)

    async def read():
        return [(len(chunk), len(yielded)) async for chunk in content]

    progress = async_to_sync(read)()
    assert progress[:2] == [(CHUNK_BYTES, 64), (CHUNK_BYTES, 128)]
    assert sum(size for size, _ in progress) == PARTS * len(PART)


def test_under_wsgi_the_iterator_is_unchanged():
    content, yielded = streamed(RequestFactory)
    assert (next(content), len(yielded)) == (PART, 1)


@pytest.mark.django_db(transaction=True)
def test_exports_and_files_are_complete_under_asgi(django_user_model):
    olga = django_user_model.objects.create_superuser("olga")
    for number in range(3):
        create_pool(f"pool-{number}", models=[f"m{number}"], by=olga)

    async def fetch(path):
        client = AsyncClient()
        await client.aforce_login(olga)
        response = await client.get(path)
        return b"".join([piece async for piece in response.streaming_content]).decode()

    rows = list(csv.DictReader(io.StringIO(async_to_sync(fetch)("/audit.csv"))))
    assert len(rows) >= AuditEntry.objects.filter(kind="pool_created").count() == 3
    lines = [json.loads(line) for line in async_to_sync(fetch)("/api/v1/audit/export").splitlines()]
    entries = [AuditEntry(**{**line, "at": datetime.fromisoformat(line["at"])}) for line in lines]
    assert [entry.number for entry in entries] == list(range(1, AuditEntry.objects.count() + 1))
    assert [digest_of(entry) for entry in entries] == [entry.digest for entry in entries], "verifiable elsewhere"
    assert {
        json.loads(line)["kind"] for line in async_to_sync(fetch)("/api/v1/audit/export?kind=pool_created").splitlines()
    } == {"pool_created"}
    assert ":root" in async_to_sync(fetch)("/static/css/tokens.css")
