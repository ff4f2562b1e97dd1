"""Which half of a prefill/decode split a replica is (H19).

A decode replica gets its KV cache by transfer, so its own hit rate is near 1 whatever was reused. A pool's rate is that
of its other replicas. A replica's label ``role`` (or ``llm-d.ai/role``, as Kubernetes has it) says what it is, else its
engine's metrics: SGLang's do, vLLM's have no word for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.models import Replica
from telemetry.models import ScrapeState

LABELS = ("role", "llm-d.ai/role")
DECODE = "decode"
WITHOUT_DECODE = "Without decode replicas: their cache is filled by transfer, so their own rate is near 100 %."


def is_decode(replica: Replica, told: str = "") -> bool:
    """Whether its labels say so, or else its metrics (``told``)."""
    return next((replica.labels[name] for name in LABELS if name in replica.labels), told) == DECODE


def rated(replicas: Sequence[Replica]) -> list[Replica]:
    """Those whose counters make the hit rate of their pool. One query."""
    states = ScrapeState.objects.filter(replica__in=replicas).exclude(role="").only("replica_id", "role")
    told = {state.replica_id: state.role for state in states}
    return [replica for replica in replicas if not is_decode(replica, told.get(replica.pk, ""))]
