"""Whose shape is taken: a request a second of each task group, and no more than ``MOST_PER_S`` of all.

Describing one costs a millisecond, so a request that is not looked at asks nothing but whether it is time to look. Once
a request was looked at and its group had its turn, the next look is a moment later, at whoever comes then: each group
is met as often as its traffic is, and none can keep this router busy with describing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from routing.core.prompt.parsing import parse_body
from routing.proxy.log import defect

if TYPE_CHECKING:
    from routing.placement.decision import Decision
    from routing.proxy.http.request import Request

GROUP_S = 1.0  # between two of one task group
MOST_PER_S = 8.0  # of all groups together
LOOK_S = 0.02  # between two looks that found nothing to do
MAX_BODY_BYTES = 1 << 20  # whose tools are read once more
MAX_GROUPS = 4096  # whose turns are remembered

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class ShapeSampler:
    """One router's. Times are of the clock that requests arrive by."""

    __slots__ = ("_described_at", "due_at")

    def __init__(self) -> None:
        self.due_at = 0.0  # when a group is looked up next
        self._described_at: dict[tuple[str, str], float] = {}

    def takes(self, decision: Decision, now: float) -> bool:
        """Whether it is the turn of a request's group, which then has had it."""
        if now < self.due_at:
            return False
        group = (decision.pool, decision.group)
        if now - self._described_at.get(group, -GROUP_S) < GROUP_S:
            self.due_at = now + LOOK_S
            return False
        self.due_at = now + 1 / MOST_PER_S
        if len(self._described_at) >= MAX_GROUPS:
            self._described_at.clear()
        self._described_at[group] = now
        return True


def shape_json(decision: Decision, request: Request) -> bytes | None:
    """The JSON of a request's shape; None for a prompt without segments. A millisecond: for when it has been sent."""
    try:
        shape = decision.keys.shape(_tools(request))
    except Exception as error:  # noqa: BLE001 - a description that fails is no reason to fail a client
        defect(logger, error, "shape")
        return None
    return _encode(shape) if shape.segments else None


def _tools(request: Request) -> Any:
    """The tools as they were sent, which the canonical prompt does not keep; None without any."""
    body = request.body
    if b'"tools"' not in body or len(body) > MAX_BODY_BYTES:
        return None
    return getattr(parse_body(request.head.path.decode(), body), "tools", None)
