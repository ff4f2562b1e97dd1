"""Readings from a Prometheus-compatible server, for fleets that have one already."""

from .server import PrometheusError, Server
from .snapshots import Absent, Asked, Outcome, Snapshot, read_snapshots

__all__ = ["Absent", "Asked", "Outcome", "PrometheusError", "Server", "Snapshot", "read_snapshots"]
