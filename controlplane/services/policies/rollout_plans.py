"""Rollout plans: the stages of a rollout, and the limits of the analysis between stages.

Theory of operation. A stage selects canary requests by three conditions that all apply: a share of prefixes, some
routers, some task groups. Each stage includes the one before it, so no prefix moves to the new revision, back, and to
it again. The last stage is every request: entering it makes the revision active, so it is not observed, because
nothing is left to compare with. A revision without stages becomes active at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta

from controlplane.errors import InvalidError
from controlplane.models import RevisionState, Router, RoutingPolicy, TaskGroup
from controlplane.schema_fields import SettingInfo, canonical, settings_of
from routing.schema import Canary, Name

MAX_STAGES = 100
OBSERVE_S = 600  # observation time of generated stages: the warm-up, and enough minutes to compare
SHARES = (0.05, 0.25)  # of the stages before the last one, which is every request


def _range(unit: str, low: float, high: float, description: str) -> Meta:
    return Meta(ge=low, le=high, description=description, extra={"unit": unit})


class GuardLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much worse than the active revision a canary may be before it is rolled back; null: no limit."""

    max_hit_rate_drop: (
        Annotated[
            float,
            _range(
                "ratio",
                0,
                1,
                "How far the hit rate of the canary may be below that of the active revision: 0.05 allows 60 % where "
                "the active revision has 65 %.",
            ),
        ]
        | None
    ) = 0.05
    max_ttft_p95_growth: (
        Annotated[
            float,
            _range(
                "ratio",
                0,
                100,
                "How much longer the time to first token of streamed responses may be at p95: 0.25 allows a quarter "
                "more. Where hardly any response is streamed, the latency of the others.",
            ),
        ]
        | None
    ) = 0.25
    max_error_ratio: (
        Annotated[
            float,
            _range("ratio", 0, 1, "How far the share of failed requests may rise above that of the active revision."),
        ]
        | None
    ) = 0.01
    min_requests: Annotated[
        int,
        _range(
            "requests",
            1,
            10_000_000,
            "Requests that canary and active revision each need for a result; until then the rollout is on hold.",
        ),
    ] = 100
    warm_up_s: Annotated[
        int, _range("seconds", 0, 86_400, "Time after each step that is not analyzed, while caches fill.")
    ] = 120


def guard_limits(limits: Any, path: str = "$.guard") -> GuardLimits:
    """Limits from JSON with defaults filled in; InvalidError names the invalid field."""
    return msgspec.convert(canonical(GuardLimits, limits, path), GuardLimits)


def read_guard(stored: Mapping[str, Any]) -> GuardLimits:
    """The limits that ``Rollout.guard`` stores; a limit that no longer exists is ignored."""
    known = {name: value for name, value in stored.items() if name in GuardLimits.__struct_fields__}
    return msgspec.convert(known, GuardLimits)


def guard_catalogue() -> tuple[SettingInfo, ...]:
    """Every limit with its unit, range, default and description, for forms."""
    return settings_of(GuardLimits)


class Plan(StrEnum):
    """Kinds of plans; only ``STAGES`` takes stages from the caller."""

    ALL_AT_ONCE = "all_at_once"
    BY_SHARE = "by_share"
    BY_ROUTER = "by_router"
    BY_GROUP = "by_group"
    STAGES = "stages"


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The canary's requests during one step, and how long they are observed."""

    share: Annotated[float, Meta(gt=0, le=1, description="Share of prefixes.", extra={"unit": "ratio"})] = 1.0
    routers: Annotated[tuple[Name, ...], Meta(min_length=1)] | None = None  # None: all
    groups: Annotated[tuple[Name, ...], Meta(min_length=1)] | None = None  # None: all that the policy places
    observe_s: Annotated[int, _range("seconds", 0, 604_800, "How long it is observed once every router runs it.")] = (
        OBSERVE_S
    )

    @property
    def covers_all_requests(self) -> bool:
        return self.share == 1.0 and self.routers is None and self.groups is None

    def includes(self, other: Stage) -> bool:
        """Whether every request of the other stage is also a request of this one."""
        pairs = ((self.routers, other.routers), (self.groups, other.groups))
        return self.share >= other.share and all(
            own is None or (narrower is not None and set(own) >= set(narrower)) for own, narrower in pairs
        )


ALL_REQUESTS = Stage(observe_s=0)


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How a publication takes effect. Without stages it does at once, without analysis."""

    name: Plan = Plan.ALL_AT_ONCE
    stages: tuple[Stage, ...] = ()
    guard: GuardLimits | None = None


AT_ONCE = RolloutPlan()


def make_plan(
    policy: RoutingPolicy,
    plan: str | None = None,
    *,
    stages: Any = None,
    guard: Any = UNSET,
    observe_s: int = OBSERVE_S,
    shares: Sequence[float] = SHARES,
) -> RolloutPlan:
    """A plan checked against the fleet; InvalidError names what is wrong.

    Without ``plan`` it consists of the ``stages``, or is all at once. ``observe_s`` and ``shares`` apply to generated
    stages. ``stages`` and ``guard`` are JSON. Without ``guard`` all default limits apply; None switches analysis off.
    """
    try:
        name = Plan(plan) if plan else Plan.ALL_AT_ONCE if stages is None else Plan.STAGES
    except ValueError:
        raise InvalidError("$.plan", f"expected one of {', '.join(Plan)}") from None
    if name is Plan.ALL_AT_ONCE and guard not in (UNSET, None):
        raise InvalidError("$.guard", "analysis compares a canary with the active revision: choose a plan with stages")
    if stages is not None and name is not Plan.STAGES:
        raise InvalidError("$.stages", f"plan {name} generates its stages; leave out one of the two")
    if name is Plan.ALL_AT_ONCE:
        return AT_ONCE
    if name is Plan.STAGES:
        if not stages:
            raise InvalidError("$.stages", "expected at least one stage")
        steps = msgspec.convert(canonical(tuple[Stage, ...], stages, "$.stages"), tuple[Stage, ...])
    else:
        steps = _generate_stages(policy, name, observe_s, shares)
    limits = None if guard is None else guard_limits({} if guard is UNSET else guard)
    return RolloutPlan(name, _check_stages(policy, steps), limits)


def read_stage(stored: Mapping[str, Any]) -> Stage:
    """A stage from the JSON that ``Rollout.stages`` stores."""
    return msgspec.convert(dict(stored), Stage)


def describe_stage(stage: Stage | Canary) -> str:
    """The requests of a stage, such as ``5 % of prefixes on router router-1``."""
    parts = ["every request" if stage.share == 1 else f"{stage.share * 100:.3g} % of prefixes"]
    if stage.groups is not None:
        parts.append(f"of {_enumerate(stage.groups, 'task group')}")
    if stage.routers is not None:
        parts.append(f"on {_enumerate(stage.routers, 'router')}")
    return " ".join(parts)


def placed_groups(policy: RoutingPolicy) -> list[str]:
    """The task groups that a pool's policy places: those without an active revision of their own policy."""
    own = policy.pool.policies.filter(revisions__state=RevisionState.LIVE, group__isnull=False).values("group_id")
    groups = TaskGroup.objects.filter(pool=policy.pool).exclude(pk__in=own).order_by("name")
    return list(groups.values_list("name", flat=True))


def _generate_stages(policy: RoutingPolicy, name: Plan, observe_s: int, shares: Sequence[float]) -> tuple[Stage, ...]:
    if name is Plan.BY_SHARE:
        stages = [{"share": share, "observe_s": observe_s} for share in shares]
        return msgspec.convert(canonical(tuple[Stage, ...], stages, "$.stages"), tuple[Stage, ...])
    if name is Plan.BY_ROUTER:
        names = list(Router.objects.filter(lost_at=None).order_by("name").values_list("name", flat=True))
        if not names:
            raise InvalidError("$.plan", "no router is connected; start one, or choose another plan")
        return tuple(Stage(routers=tuple(names[:end]), observe_s=observe_s) for end in range(1, len(names) + 1))
    names = placed_groups(policy) if policy.group_id is None else []
    if not names:
        raise InvalidError("$.plan", f"policy {policy.name} places no task groups; choose another plan")
    return tuple(Stage(groups=tuple(names[:end]), observe_s=observe_s) for end in range(1, len(names) + 1))


def _check_stages(policy: RoutingPolicy, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Valid stages, ending with the stage of all requests; InvalidError names the first invalid one."""
    canaries = [stage for stage in stages if not stage.covers_all_requests]
    if len(canaries) < len(stages) - 1 or (len(canaries) < len(stages) and not stages[-1].covers_all_requests):
        raise InvalidError("$.stages", "only the last stage can be every request: it makes the revision active")
    if len(canaries) >= MAX_STAGES:
        raise InvalidError("$.stages", f"expected at most {MAX_STAGES} stages")
    routers = set(Router.objects.values_list("name", flat=True)) if any(stage.routers for stage in canaries) else set()
    groups = set(placed_groups(policy)) if any(stage.groups for stage in canaries) else set()
    for index, stage in enumerate(canaries):
        path = f"$.stages[{index}]"
        if stage.groups is not None and policy.group_id is not None:
            raise InvalidError(f"{path}.groups", "only a pool's policy places several task groups; leave groups out")
        _check_names(stage.routers, routers, f"{path}.routers", "no router has announced itself as")
        _check_names(stage.groups, groups, f"{path}.groups", "the pool's policy places no task group")
    for index, (previous, stage) in enumerate(pairwise(canaries), start=1):
        if not stage.includes(previous) or previous.includes(stage):
            raise InvalidError(f"$.stages[{index}]", "expected all requests of the stage before it, and more")
    return (*canaries, ALL_REQUESTS)


def _check_names(names: Iterable[str] | None, existing: set[str], path: str, problem: str) -> None:
    for index, name in enumerate(names or ()):
        if name not in existing:
            raise InvalidError(f"{path}[{index}]", f"{problem} {name!r}")


def _enumerate(names: Sequence[str], singular: str) -> str:
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{singular}{'s' if len(names) > 1 else ''} {', '.join(names[:4])}{rest}"
