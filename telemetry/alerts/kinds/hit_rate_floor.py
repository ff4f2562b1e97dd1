"""The hit rate is below what was promised, whatever is usual."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from msgspec import Meta

from telemetry.alerts.history_window import Seen, Source, WindowSum
from telemetry.alerts.kinds.base import (
    Asked,
    ForS,
    KeepFiringS,
    Kind,
    MinRequests,
    MinTokens,
    WarmUpS,
    Where,
    WindowS,
    WindowSettings,
    basis_of,
    length,
    percent,
    silence_of,
    traffic_of,
    unless_cold,
)
from telemetry.alerts.verdict import POOL, Reason, Result, Verdict, Verdicts, no_data


class HitRateFloorSettings(WindowSettings, frozen=True):
    """Settings of ``hit_rate_floor``."""

    floor_ratio: Annotated[
        float, Meta(gt=0, le=1, description="A hit rate below this is too low.", extra={"unit": "ratio"})
    ] = 0.5
    window_s: WindowS = 300.0
    min_requests: MinRequests = 50.0
    min_tokens: MinTokens = 20_000.0
    warm_up_s: WarmUpS = 300.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 600.0

    @property
    def warm_up_reach_s(self) -> float:
        """The warm-up."""
        return self.warm_up_s


def judge(settings: HitRateFloorSettings, seen: Seen, asked: Asked) -> Verdicts:
    """Compare the newest window with the floor."""
    verdict = compare(settings, seen.windows(asked.group)[-1])
    return {
        POOL: verdict if asked.group else unless_cold(verdict, seen, settings.warm_up_s, partial(compare, settings))
    }


def compare(settings: HitRateFloorSettings, newest: WindowSum) -> Verdict:
    """Judge a window."""
    silent = silence_of(newest, settings)
    if silent or newest.ratio is None:
        return no_data(silent or Reason.LITTLE_TRAFFIC, **traffic_of(newest))
    is_below = newest.ratio < settings.floor_ratio
    answer, reason = (Result.BREACH, Reason.BELOW) if is_below else (Result.OK, Reason.WITHIN)
    return Verdict(answer, reason, newest.ratio, settings.floor_ratio, figures=traffic_of(newest))


def sentence(where: Where, settings: HitRateFloorSettings, verdict: Verdict) -> str:
    """What is wrong."""
    floor = percent(settings.floor_ratio)
    return f"Hit rate of {where.words} is {percent(verdict.value)}, below its floor of {floor}.{basis_of(verdict)}"


def finds(settings: HitRateFloorSettings) -> str:
    """What it looks for."""
    return f"a hit rate below {percent(settings.floor_ratio)} over {length(settings.window_s)}"


KIND = Kind(
    name="hit_rate_floor",
    label="Hit rate floor",
    about="Compares the hit rate with a fixed value: for a fleet whose bill or capacity was planned with one. It knows "
    "nothing of what is usual; a drop that stays above the floor is for the other kind.",
    settings=HitRateFloorSettings,
    sources=frozenset({Source.ENGINES}),
    group_sources=frozenset({Source.GROUPS}),
    unit="ratio",
    judge=judge,
    sentence=sentence,
    finds=finds,
    is_drop=True,
    figure="Hit rate",
)
