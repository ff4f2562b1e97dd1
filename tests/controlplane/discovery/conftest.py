"""A source whose answers tests write: an API server's, as that can say most."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.models import ReplicaSource
from controlplane.services.discovery.sources import create_source
from controlplane.tasks import look_at_sources
from tests.fakes.fake_kubernetes import TOKEN, FakeKubernetes, endpoint_slice, pod, serving_kubernetes


@dataclass
class Cluster:
    """An API server, a source that looks at it, and a clock."""

    api: FakeKubernetes
    row: ReplicaSource
    travel: object

    def answers(self, *pods, mode="answer", after_s=30.0):
        """Let time pass, and have the source look at these pods: ``name`` or ``(name, address)`` or an endpoint."""
        self.api.mode = mode
        self.api.slices = [endpoint_slice(*[self.endpoint(one) for one in pods])]
        self.travel.shift(timedelta(seconds=after_s))
        ReplicaSource.objects.update(next_look_at=timezone.now())
        look_at_sources()
        self.row.refresh_from_db()

    def endpoint(self, one):
        if isinstance(one, dict):
            return one
        name, address = one if isinstance(one, tuple) else (one, f"10.0.0.{one.rpartition('-')[2]}")
        return pod(name, address)

    @property
    def replicas(self):
        """What the pool holds, by name."""
        return {replica.name: str(replica.state) for replica in self.row.pool.replicas.all()}

    @property
    def known(self):
        return {row.key: str(row.state) for row in self.row.discovered.all()}


@pytest.fixture
def api():
    with serving_kubernetes() as server:
        yield server


@pytest.fixture
def cluster(pool, api, time_machine):
    """Adopts by itself; drains after a minute, removes after five."""
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
