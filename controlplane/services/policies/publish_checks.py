"""What a pool requires of a prediction before its drafts are published, and the registered checks that decide.

Theory of operation. The pool stores the requirement; predictions belong to telemetry, which registers a check when
Django starts. A check returns what is in doubt about a draft, or None if it is predicted to be clearly better. A doubt
preselects a gradual rollout; one whose code is not ``WITHIN_LIMITS`` is a finding, which speaks against publishing.
Publishing runs the checks on the locked policy, before anything is written. Without a registered check, a pool that
requires a prediction rejects drafts; an approver can still publish with a reason. Reverting, aborting and rolling back
are never checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from controlplane.errors import PredictionRequiredError
from controlplane.models import PolicyRevision, Pool


class PredictionMode(StrEnum):
    """Whether a draft needs a prediction."""

    OFF = "off"  # neither shown nor checked
    ADVISE = "advise"  # shown, with a warning if it is worse
    REQUIRE = "require"  # publishing is rejected without one within the limits


class PredictionPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a pool requires of the what-if of a draft. Null: no limit.

    A limit is exceeded if the predicted difference from the active policy is beyond it, and its 95 % interval
    excludes 0.
    """

    mode: Annotated[
        PredictionMode,
        Meta(
            description="off: drafts are not predicted. advise: a worse prediction is shown as a warning. require: "
            "publishing is rejected unless a calibrated what-if of the draft is within the limits."
        ),
    ] = PredictionMode.ADVISE
    max_hit_rate_drop: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="How far the predicted hit rate may be below that of the active policy: 0.03 allows 3 "
                "points.",
                extra={"unit": "ratio"},
            ),
        ]
        | None
    ) = 0.03
    max_ttft_p50_growth: (
        Annotated[float, Meta(ge=0, le=100, description="How much longer TTFT p50 may be.", extra={"unit": "ratio"})]
        | None
    ) = 0.2
    max_ttft_p95_growth: (
        Annotated[float, Meta(ge=0, le=100, description="How much longer TTFT p95 may be.", extra={"unit": "ratio"})]
        | None
    ) = 0.25
    max_age_s: Annotated[
        int,
        Meta(
            ge=300,
            le=2_592_000,
            description="Age of the newest captured traffic that the prediction is based on.",
            extra={"unit": "seconds"},
        ),
    ] = 86_400


class FindingCode(StrEnum):
    """Why a draft may not be published without a reason."""

    MISSING = "what-if-missing"
    RUNNING = "what-if-running"
    FAILED = "what-if-failed"
    NOT_CALIBRATED = "what-if-not-calibrated"
    OUTDATED = "what-if-outdated"
    UNKNOWN = "what-if-inconclusive"  # a limited figure could not be predicted
    WORSE = "what-if-worse"
    WITHIN_LIMITS = "what-if-within-limits"  # it may be published, but is not clearly better
    UNAVAILABLE = "what-if-unavailable"  # no check is registered


@dataclass(frozen=True, slots=True)
class PredictedFigure:
    """One figure of the active policy and the draft, both replayed; None: unknown."""

    name: str  # hit_rate, ttft_p50_s or ttft_p95_s
    title: str
    active: float | None
    predicted: float | None
    difference: Mapping[str, float] | None  # value, low and high; of TTFT relative to the active policy
    limit: float | None  # of the difference; None: no limit
    is_exceeded: bool

    def change(self, ratio: float | None) -> str:
        """A difference or limit in words: ``-12 points``, ``+24 %``."""
        return "none" if ratio is None else f"{100 * ratio:+.3g} {'points' if self.name == 'hit_rate' else '%'}"

    @property
    def difference_text(self) -> str:
        """The difference with its 95 % interval: ``-12 points (-14 to -10)``."""
        if self.difference is None:
            return "unknown"
        low, high = (f"{100 * self.difference[name]:+.3g}" for name in ("low", "high"))
        return f"{self.change(self.difference['value'])} ({low} to {high})"

    @property
    def limit_text(self) -> str:
        return self.change(self.limit)


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a draft should not be published as it is."""

    code: FindingCode
    detail: str
    to_do: str
    links: Mapping[str, Any]  # what_if and page of an existing what-if; start: the request that creates one
    figures: tuple[PredictedFigure, ...] = ()
    blocks: bool = False  # False: it is only shown

    def as_json(self) -> dict[str, Any]:
        """Members of a problem document."""
        figures = [asdict(figure) for figure in self.figures]
        return {"code": str(self.code), "to_do": self.to_do, "links": dict(self.links), "figures": figures}


Check = Callable[[PolicyRevision, PredictionPolicy], Finding | None]
_checks: list[Check] = []


def register_check(check: Check) -> None:
    """Add a check of drafts; called once for each when Django starts."""
    if check not in _checks:
        _checks.append(check)


def prediction_policy(pool: Pool) -> PredictionPolicy:
    """What the pool requires, with defaults filled in."""
    return msgspec.convert(pool.what_if or {}, PredictionPolicy)


def doubt_about(draft: PolicyRevision) -> Finding | None:
    """Why a draft is not clearly better than the active policy; None if it is, or if the pool is not predicted.

    At most 6 queries.
    """
    policy = prediction_policy(draft.policy.pool)
    active = draft.policy.live()
    if policy.mode is PredictionMode.OFF or (active is not None and active.digest == draft.digest):
        return None
    if not _checks:
        text, to_do = "This process has no check of predictions.", "Start it with telemetry installed."
        return Finding(FindingCode.UNAVAILABLE, text, to_do, {})
    return next((finding for check in _checks if (finding := check(draft, policy)) is not None), None)


def finding_in(doubt: Finding | None, pool: Pool) -> Finding | None:
    """What in a doubt speaks against publishing; it ``blocks`` if the pool requires a prediction."""
    if doubt is None or doubt.code is FindingCode.WITHIN_LIMITS:
        return None
    if prediction_policy(pool).mode is PredictionMode.ADVISE:
        return doubt if doubt.code is FindingCode.WORSE else None
    return replace(doubt, blocks=True)


def finding_of(draft: PolicyRevision) -> Finding | None:
    """What speaks against publishing a draft. At most 6 queries."""
    return finding_in(doubt_about(draft), draft.policy.pool)


def check_publishable(draft: PolicyRevision, override_reason: str) -> Finding | None:
    """PredictionRequiredError if the pool's requirement is not met and no reason is given; the finding if one is."""
    if prediction_policy(draft.policy.pool).mode is not PredictionMode.REQUIRE:
        return None
    finding = finding_of(draft)
    if finding is not None and not override_reason.strip():
        detail = f"Pool {draft.policy.pool.name} requires a prediction. {finding.detail} {finding.to_do}"
        raise PredictionRequiredError(f"{detail} {OVERRIDE}", finding.as_json())
    return finding


OVERRIDE = "An approver can publish without it by giving a reason (override_reason); it is audited."
