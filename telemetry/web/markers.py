"""Events as marks on a chart: those of one step share a mark, so that a fleet's worth of them stays readable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from controlplane.models import Event, EventKind
from telemetry.metrics.windows import Window

# What is worth a mark, the most telling first, with its label and tone.
KINDS = {
    EventKind.POLICY_PUBLISHED: ("policy", "policy"),
    EventKind.ROLLOUT_ROLLED_BACK: ("rolled back", "bad"),
    EventKind.ROLLOUT_ABORTED: ("aborted", "bad"),
    EventKind.ROLLOUT_STARTED: ("trial", "policy"),
    EventKind.ROLLOUT_WIDENED: ("wider", "policy"),
    EventKind.ALERT_FIRING: ("alert", "bad"),
    EventKind.REPLICA_DOWN: ("down", "bad"),
    EventKind.REPLICA_RESTARTED: ("restart", "cold"),
    EventKind.REPLICA_REMOVED: ("removed", "fleet"),
    EventKind.REPLICA_STATE_CHANGED: ("state", "fleet"),
    EventKind.REPLICA_ADDED: ("added", "fleet"),
    EventKind.TRAFFIC_MIX_CHANGED: ("mix", "fleet"),
    EventKind.REPLICA_UP: ("up", "good"),
    EventKind.ALERT_RESOLVED: ("resolved", "good"),
    EventKind.CONFIG_REFUSED: ("refused", "bad"),
    EventKind.ROUTER_LOST: ("router lost", "bad"),
    EventKind.CONFIG_APPLIED: ("applied", "policy"),
}
COLOURS = {"policy": "#d9581a", "bad": "#e0504c", "cold": "#3f86cc", "good": "#4d9c3a", "fleet": "#7f8b98"}
TOLD = 6  # events that a mark's text tells
APART = 40  # marks closer than a 40th of the chart are one


@dataclass(frozen=True, slots=True)
class Marker:
    """A mark at a time; ``text`` tells its events, one a line."""

    at: datetime
    label: str
    colour: str
    text: str
    count: int


def markers(events: Iterable[Event], window: Window) -> list[Marker]:
    """The marks of a window, ascending."""
    apart = timedelta(seconds=window.length_s / APART)
    groups: list[list[Event]] = []
    for event in events:
        if event.kind not in KINDS:
            continue
        if groups and event.at - groups[-1][0].at < apart:
            groups[-1].append(event)
        else:
            groups.append([event])
    return [_marker(group) for group in groups]


def _marker(events: list[Event]) -> Marker:
    first = min(events, key=lambda event: list(KINDS).index(EventKind(event.kind)))
    label, tone = KINDS[EventKind(first.kind)]
    lines = [f"{event.at:%H:%M:%S} UTC {event.summary}" for event in events[:TOLD]]
    if len(events) > TOLD:
        lines.append(f"and {len(events) - TOLD} more")
    return Marker(first.at, _named(first, label), COLOURS[tone], "\n".join(lines), len(events))


def _named(event: Event, label: str) -> str:
    """The label with the name of what it is about, where it is short."""
    if event.kind == EventKind.POLICY_PUBLISHED:
        return f"{event.detail.get('policy', label)} r{event.detail.get('revision', '')}"
    if event.replica is not None and len(event.replica.name) <= 12:
        return f"{event.replica.name} {label}"
    return label
