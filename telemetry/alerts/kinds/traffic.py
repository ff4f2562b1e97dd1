"""Whether a window says anything: the floors that kinds share."""

from __future__ import annotations

from typing import Protocol

from telemetry.alerts.kinds.base import percent
from telemetry.alerts.past import WindowSum
from telemetry.alerts.verdict import Reason, Verdict


class Floors(Protocol):
    """Settings with both floors."""

    @property
    def min_requests(self) -> float:
        """Requests."""

    @property
    def min_tokens(self) -> float:
        """Queried tokens."""


def has_traffic(window: WindowSum, floors: Floors) -> bool:
    """Whether a window is above both floors; one whose requests are unknown is judged by its tokens."""
    if not window.queries or window.queries < floors.min_tokens:
        return False
    return window.requests is None or window.requests >= floors.min_requests


def silence_of(window: WindowSum, floors: Floors) -> Reason | None:
    """Why a window says nothing; None where it does."""
    if window.queries is None:
        return Reason.NO_READINGS
    return None if has_traffic(window, floors) and window.ratio is not None else Reason.LITTLE_TRAFFIC


def traffic_of(window: WindowSum) -> dict[str, float | None]:
    """A window's traffic, for a verdict's figures."""
    figures = {"requests": window.requests, "tokens": window.queries}
    return figures if window.accounted_ratio is None else {**figures, "accounted_ratio": window.accounted_ratio}


def basis_of(verdict: Verdict) -> str:
    """What a task group's hit rate rests on, as the end of a sentence; nothing for a pool's, which engines count."""
    share = verdict.figures.get("accounted_ratio")
    return "" if share is None else f" It rests on {percent(share)} of the responses."
