"""A Kubernetes source whose API server is scripted by tests."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.models import ReplicaSource
from controlplane.services.discovery.sources import create_source
from controlplane.tasks import poll_sources
from tests.fakes.fake_kubernetes import TOKEN, FakeKubernetes, endpoint_slice, pod, serving_kubernetes


@dataclass
class Cluster:
    """A fake API server, a source that polls it, and a clock."""

    api: FakeKubernetes
    row: ReplicaSource
    travel: object

    def report(self, *pods, mode="answer", after_s=30.0, labels=None):
        """Advance the clock and poll while these pods exist: ``name``, ``(name, address)`` or an endpoint."""
        self.api.mode = mode
        self.api.slices = [endpoint_slice(*[self.endpoint(named) for named in pods], labels=labels)]
        self.travel.shift(timedelta(seconds=after_s))
        ReplicaSource.objects.update(next_poll_at=timezone.now())
        poll_sources()
        self.row.refresh_from_db()

    def endpoint(self, named):
        if isinstance(named, dict):
            return named
        name, address = named if isinstance(named, tuple) else (named, f"10.0.0.{named.rpartition('-')[2]}")
        return pod(name, address)

    @property
    def replicas(self):
        """States of the pool's replicas, by name."""
        return {replica.name: str(replica.state) for replica in self.row.pool.replicas.all()}

    @property
    def discovered(self):
        """States of the discovered engines, by key."""
        return {row.key: str(row.state) for row in self.row.discovered.all()}


@pytest.fixture
def api():
    with serving_kubernetes() as server:
        yield server


@pytest.fixture
def cluster(pool, api, time_machine):
    """A source that adopts automatically, drains after one minute and removes after five."""
    time_machine.move_to(timezone.now(), tick=False)
    source = create_source(
        pool,
        name="cluster",
        kind="kubernetes",
        settings={"service": "vllm", "namespace": "prod", "api_url": api.url},
        secret=TOKEN,
        adoption="adopt",
        drain_after_s=60,
        remove_after_s=300,
    )
    return Cluster(api, source, time_machine)
