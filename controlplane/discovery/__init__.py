"""Where replicas may be found: DNS, Kubernetes, a file. Each kind asks the outside world and answers targets; which of
them become replicas is for the services to say.
"""

from controlplane.discovery.poll import KINDS, SourceKind, canonical_settings, kind_named, look_at
from controlplane.discovery.targets import Found, PollError, Target

__all__ = [
    "KINDS",
    "Found",
    "PollError",
    "SourceKind",
    "Target",
    "canonical_settings",
    "kind_named",
    "look_at",
]
