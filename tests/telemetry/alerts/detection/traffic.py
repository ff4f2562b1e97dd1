"""Seeded hit-rate bins of a pool with several task groups."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from telemetry.alerts.detection import Bin, Detection, Detector, GroupBin, Sensitivity, State
from tests.telemetry.conftest import T0

BIN_S = 10.0
MIX = {"chat": 0.5, "coding": 0.3, "support": 0.2}


@dataclass(frozen=True)
class Stretch:
    """So long a time with one hit rate for all task groups, or one for each."""

    seconds: float
    ratio: float | Mapping[str, float]
    rate: float = 8.0  # requests/s
    mix: Mapping[str, float] | None = None


def bins(stretches: Sequence[Stretch], seed: int = 1) -> list[Bin]:
    """The stretches one after another. A request hits all or nothing of its prompt, or a part (a beta distribution)."""
    rng, found, second = random.Random(seed), [], 0.0
    for stretch in stretches:
        for _ in range(round(stretch.seconds / BIN_S)):
            second += BIN_S
            groups = {name: _group(rng, stretch, name, part) for name, part in (stretch.mix or MIX).items()}
            known = {name: group for name, group in groups.items() if group is not None}
            found.append(Bin(T0 + timedelta(seconds=second), known))
    return found


def _group(rng: random.Random, stretch: Stretch, name: str, part: float) -> GroupBin | None:
    mean = stretch.rate * BIN_S * part
    count = max(round(rng.gauss(mean, mean**0.5)), 0)
    ratio = stretch.ratio[name] if isinstance(stretch.ratio, Mapping) else stretch.ratio
    prompts = [rng.uniform(300, 2500) for _ in range(count)]
    cached = sum(tokens * rng.betavariate(ratio, 1 - ratio) for tokens in prompts)
    return GroupBin(sum(prompts), cached, count) if count else None


def detections(
    known: Sequence[Bin], sensitivity: Sensitivity | None = None, changes: Sequence[datetime] = ()
) -> list[Detection]:
    """What a new detector says after each bin."""
    detector, found, before = Detector(sensitivity or Sensitivity()), [], T0
    for item in known:
        found.append(detector.add(item, [at for at in changes if before < at <= item.end]))
        before = item.end
    return found


def alarms(found: Sequence[Detection]) -> list[Detection]:
    """Those at which an alarm began."""
    states = [State.STEADY, *(item.state for item in found)]
    return [item for item, before in zip(found, states, strict=False) if item.state is State.DOWN is not before]


def second(at: datetime | None) -> float | None:
    """Seconds after the first bin began."""
    return None if at is None else (at - T0).total_seconds()
