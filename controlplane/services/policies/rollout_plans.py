"""What a rollout's guard tolerates of a revision on trial, beside the one in force.

A limit that is null is off. What is compared, and how, is the guard's to say; what each limit means, its unit and its
range are said here alone, and read from here by forms, REST and documents.

Which requests a revision is tried on, stage by stage, before it is in force for all.

Theory of operation. A stage names the requests on trial by three limits that all hold at once: a share of the prefix
space, some routers, some task groups. Each stage includes the one before it, so that nobody is moved to the new
revision, back, and to it again. The last stage is everything: entering it puts the revision in force, so it is not
observed, for nothing is left to compare with. A plan without stages is in force at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta

from controlplane.errors import InvalidError
from controlplane.models import RevisionState, Router, RoutingPolicy, TaskGroup
from controlplane.schema_fields import SettingInfo, canonical, settings_of
from routing.schema import Name


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


MAX_STAGES = 100
OBSERVE_S = 600  # of a plan's stages: the warm-up, and enough minutes to judge by
SHARES = (0.05, 0.25)  # before everything


class Plan(StrEnum):
    """Ways to a plan: the first four are laid out here, the last as it is given."""

    ALL_AT_ONCE = "all_at_once"
    BY_SHARE = "by_share"
    BY_ROUTER = "by_router"
    BY_GROUP = "by_group"
    STAGES = "stages"


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests on which a revision is tried, and for how long before it goes on."""

    share: Annotated[float, Meta(gt=0, le=1, description="Part of the prefix space.", extra={"unit": "ratio"})] = 1.0
    routers: Annotated[tuple[Name, ...], Meta(min_length=1)] | None = None  # None: on all
    groups: Annotated[tuple[Name, ...], Meta(min_length=1)] | None = None  # None: for all that the policy places
    observe_s: Annotated[
        int,
        Meta(
            ge=0,
            le=604_800,
            description="How long it is observed once every router runs it.",
            extra={"unit": "seconds"},
        ),
    ] = OBSERVE_S

    @property
    def is_everything(self) -> bool:
        """Whether no request is left out."""
        return self.share == 1.0 and self.routers is None and self.groups is None

    def includes(self, other: Stage) -> bool:
        """Whether each request of the other is one of this one's."""
        return (
            self.share >= other.share
            and _includes(self.routers, other.routers)
            and _includes(self.groups, other.groups)
        )


EVERYTHING = Stage(observe_s=0)


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How a publication takes effect. Without stages it does at once, and nothing is guarded."""

    name: Plan = Plan.ALL_AT_ONCE
    stages: tuple[Stage, ...] = ()
    guard: GuardLimits | None = None

    def stages_as_json(self) -> list[dict[str, Any]]:
        """The stages as a rollout keeps them."""
        return [dict(msgspec.to_builtins(stage)) for stage in self.stages]

    def guard_as_json(self) -> dict[str, Any] | None:
        """The limits as a rollout keeps them."""
        return dict(msgspec.to_builtins(self.guard)) if self.guard else None


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
    """What was asked for, checked against what there is; InvalidError names what is wrong.

    Without a ``plan`` it is the one that ``stages`` are, else all at once. ``observe_s`` and ``shares`` are for plans
    that are laid out here. ``stages`` and ``guard`` are JSON; limits that are left out take their defaults. ``guard``
    unset: every default; None: nobody watches.
    """
    name = _named(plan, stages)
    if name is Plan.ALL_AT_ONCE:
        if guard not in (UNSET, None):
            raise InvalidError("$.guard", "a guard compares a trial with what is in force: choose a plan with stages")
        return AT_ONCE
    laid_out = _given(stages) if name is Plan.STAGES else _laid_out(policy, name, observe_s, shares)
    checked = _checked(policy, laid_out)
    return RolloutPlan(name, checked, guard_limits({} if guard is UNSET else guard) if guard is not None else None)


def read_stage(stored: Mapping[str, Any]) -> Stage:
    """A stage as a rollout keeps it."""
    return msgspec.convert(dict(stored), Stage)


def describe_stage(stage: Stage) -> str:
    """Its requests in words, such as ``5 % of the prefix space on router-1``."""
    if stage.is_everything:
        return "every request"
    parts = [f"{stage.share * 100:g} % of the prefix space" if stage.share < 1 else "every request"]
    if stage.groups is not None:
        parts.append(f"of {_listed(stage.groups, 'task group')}")
    if stage.routers is not None:
        parts.append(f"on {_listed(stage.routers, 'router')}")
    return " ".join(parts)


def groups_placed(policy: RoutingPolicy) -> list[str]:
    """The names of the task groups that a pool's policy places: those without a revision in force of their own."""
    own = policy.pool.policies.filter(revisions__state=RevisionState.LIVE, group__isnull=False).values("group_id")
    return list(
        TaskGroup.objects.filter(pool=policy.pool).exclude(pk__in=own).order_by("name").values_list("name", flat=True)
    )


def _named(plan: str | None, stages: Any) -> Plan:
    try:
        name = Plan(plan) if plan else Plan.ALL_AT_ONCE if stages is None else Plan.STAGES
    except ValueError:
        raise InvalidError("$.plan", f"expected one of {', '.join(Plan)}") from None
    if stages is not None and name is not Plan.STAGES:
        raise InvalidError("$.stages", f"the plan {name} lays out its own; leave out one of both")
    if name is Plan.STAGES and not stages:
        raise InvalidError("$.stages", "expected at least one stage")
    return name


def _given(stages: Any) -> list[Stage]:
    return msgspec.convert(canonical(list[Stage], stages, "$.stages"), list[Stage])


def _laid_out(policy: RoutingPolicy, name: Plan, observe_s: int, shares: Sequence[float]) -> list[Stage]:
    """The stages of one of the plans that need none to be given."""
    if name is Plan.BY_SHARE:
        return _given([{"share": share, "observe_s": observe_s} for share in shares])
    if name is Plan.BY_ROUTER:
        names = list(Router.objects.filter(lost_at=None).order_by("name").values_list("name", flat=True))
        if not names:
            raise InvalidError("$.plan", "no router is present to begin with; start one, or choose another plan")
        return [Stage(routers=tuple(some), observe_s=observe_s) for some in _growing(names)]
    names = groups_placed(policy) if policy.group_id is None else []
    if not names:
        raise InvalidError("$.plan", f"policy {policy.name} places no task groups; choose another plan")
    return [Stage(groups=tuple(some), observe_s=observe_s) for some in _growing(names)]


def _growing(names: Sequence[str]) -> list[list[str]]:
    """The first, the first two, and so on."""
    return list(accumulate(([name] for name in names), lambda some, more: [*some, *more]))


def _checked(policy: RoutingPolicy, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with everything as the last; InvalidError names the first that cannot be."""
    before = [stage for stage in stages if not stage.is_everything]
    if len(before) < len(stages) - 1 or (len(before) < len(stages) and not stages[-1].is_everything):
        raise InvalidError("$.stages", "only the last stage can be everything: it puts the revision in force")
    if len(before) >= MAX_STAGES:
        raise InvalidError("$.stages", f"expected at most {MAX_STAGES} stages")
    _check_names(policy, before)
    for at, (former, stage) in enumerate(pairwise(before), start=1):
        if not stage.includes(former) or former.includes(stage):
            raise InvalidError(f"$.stages[{at}]", "expected all requests of the stage before it, and more")
    return (*before, EVERYTHING)


def _check_names(policy: RoutingPolicy, stages: Sequence[Stage]) -> None:
    """InvalidError for a router that never announced itself, or a task group that the policy does not place."""
    routers = set(Router.objects.values_list("name", flat=True)) if any(stage.routers for stage in stages) else set()
    groups = set(groups_placed(policy)) if any(stage.groups for stage in stages) else set()
    for at, stage in enumerate(stages):
        path = f"$.stages[{at}]"
        if stage.groups is not None and policy.group_id is not None:
            raise InvalidError(f"{path}.groups", "only a pool's policy places several task groups; leave them out")
        _check_known(stage.routers, routers, f"{path}.routers", "no router has announced itself as")
        _check_known(stage.groups, groups, f"{path}.groups", "the pool's policy places no task group")


def _check_known(names: Iterable[str] | None, known: set[str], path: str, complaint: str) -> None:
    for at, name in enumerate(names or ()):
        if name not in known:
            raise InvalidError(f"{path}[{at}]", f"{complaint} {name!r}")


def _includes(wider: tuple[str, ...] | None, narrower: tuple[str, ...] | None) -> bool:
    return wider is None or (narrower is not None and set(wider) >= set(narrower))


def _listed(names: Sequence[str], noun: str) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{noun}{'s' if len(names) > 1 else ''} {shown}"
