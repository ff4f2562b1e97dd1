"""Service discovery of replicas by DNS, Kubernetes and files. A poll returns targets; services make them replicas."""

from controlplane.discovery.poll import KINDS, SourceKind, canonical_settings, kind_named, poll
from controlplane.discovery.targets import PollError, PollResult, Target

__all__ = [
    "KINDS",
    "PollError",
    "PollResult",
    "SourceKind",
    "Target",
    "canonical_settings",
    "kind_named",
    "poll",
]
