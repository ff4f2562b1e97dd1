"""What a rollout's guard tolerates of a revision on trial, beside the one in force.

A limit that is null is off. What is compared, and how, is the guard's to say; what each limit means, its unit and its
range are said here alone, and read from here by forms, REST and documents.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from controlplane.schema_fields import SettingInfo, canonical, settings_of


class GuardLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much worse the trial may be. Beyond a limit it is rolled back; without enough requests it is held."""

    max_hit_rate_drop: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="How far the hit rate of what the trial places may lie below that of the revision in "
                "force: 0.05 tolerates 60 % where that has 65 %.",
                extra={"unit": "ratio"},
            ),
        ]
        | None
    ) = 0.05
    max_ttft_p95_growth: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=100,
                description="How much longer the time to the first token of streamed responses may be at p95: 0.25 "
                "tolerates a quarter more. Where hardly any is streamed, the latency of the others.",
                extra={"unit": "ratio"},
            ),
        ]
        | None
    ) = 0.25
    max_error_ratio: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="How far the share of failed requests may rise above that of the revision in force.",
                extra={"unit": "ratio"},
            ),
        ]
        | None
    ) = 0.01
    max_load_skew: (
        Annotated[
            float,
            Meta(
                ge=1,
                le=1000,
                description="Requests at the pool's busiest replica over the mean of all, by their weights; where it "
                "was higher before the trial, that.",
                extra={"unit": "ratio"},
            ),
        ]
        | None
    ) = 1.5
    min_requests: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Requests that either side needs before anything is judged; until then the rollout is held.",
            extra={"unit": "requests"},
        ),
    ] = 200
    warm_up_s: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400,
            description="Time after each widening that is not judged, while caches fill anew.",
            extra={"unit": "seconds"},
        ),
    ] = 120


def guard_limits(given: Any, path: str = "$.guard") -> GuardLimits:
    """Limits given as JSON, with every default filled in; InvalidError names what is wrong."""
    return msgspec.convert(canonical(GuardLimits, given, path), GuardLimits)


def guard_catalogue() -> tuple[SettingInfo, ...]:
    """Every limit with its unit, range, default and meaning, as forms show settings."""
    return settings_of(GuardLimits)
