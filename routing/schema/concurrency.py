"""What a pool or a task group does about more requests than its replicas can do.

Why each default is what it is stands in ``limits.md``.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from routing.schema.base import Frozen

PRIORITIES = 10  # 0 is the most urgent
LEAST_URGENT = PRIORITIES - 1


class ConcurrencyConfig(Frozen, frozen=True):
    """How many requests may run at once; the others wait in the router, for a while and up to a number."""

    max_running: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Requests at replicas at once.", extra={"unit": "requests"})
    ]
    max_waiting: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Requests in line; 0 refuses at once.", extra={"unit": "requests"})
    ] = 256
    max_wait_s: Annotated[
        float, Meta(gt=0, le=3600, description="How long a request waits in line.", extra={"unit": "seconds"})
    ] = 10.0
