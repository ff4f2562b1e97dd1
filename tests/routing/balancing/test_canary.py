"""Canaries: which requests they place, agreement between routers, and what strategies learnt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Decision, Placement
from routing.balancing.replicas import HealthRegistry
from routing.balancing.request import PlacementRequest
from routing.balancing.residency import Residency
from routing.balancing.routes import Arm, ArmReason
from routing.balancing.strategies.affinity_groups import AffinityGroups
from routing.proxy.admission import NO_PROMPT
from routing.schema import (
    AffinityGroupsSettings,
    Boundary,
    Canary,
    LeastLoadSettings,
    LowestCostSettings,
    PolicyConfig,
    PrefixHashSettings,
    RoundRobinSettings,
    RouterConfig,
    Settings,
    TaskGroupConfig,
    Tier1,
)
from tests.routing.building import chat, config, pool, request

ACTIVE = 3  # of the pool in ``building.py``
CANARY = 4
texts = st.text(max_size=20)
shares = st.floats(0.0, 1.0, exclude_min=True)


def with_canary(
    share: float = 1.0,
    settings: Settings | None = None,
    *,
    active: Settings | None = None,
    groups: tuple[TaskGroupConfig, ...] = (),
    tier1: Tier1 | None = None,
    name: str = "everyday",
    routers: tuple[str, ...] | None = None,
    only: tuple[str, ...] | None = None,
) -> RouterConfig:
    """A pool with a canary; ``only``: for these groups."""
    base = pool(active or PrefixHashSettings(), groups=groups)
    next_settings = settings or LeastLoadSettings()
    canary = Canary(revision=CANARY, settings=next_settings, share=share, routers=routers, groups=only)
    policy = replace(base.policy, name=name, canary=canary)
    return config(replace(base, policy=policy, tier1=tier1))


def placement(snapshot: RouterConfig, router: str = "router-1", seed: int = 0) -> Placement:
    return Placement(snapshot, LoadTracker(), seed=seed, router=router)


def decided(router: Placement, text: str = "Hello", **what: Any) -> Decision:
    return router.decide(request(text, **what), HealthRegistry())


def revision(router: Placement, text: str = "Hello", **what: Any) -> int:
    return decided(router, text, **what).policy.revision


def verdict_reason(router: Placement, query: PlacementRequest) -> ArmReason:
    found = router.canary_verdict(router.decide(query, HealthRegistry()), query)
    assert found is not None
    return found.why


# --- requests of the canary --------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9])
def test_the_canary_gets_its_share_of_prefixes(share):
    router = placement(with_canary(share))
    next_settings = sum(revision(router, f"prefix {number}") == CANARY for number in range(4000))

    assert next_settings / 4000 == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)


@given(text=texts, first=shares, second=shares)
def test_a_prefix_stays_with_the_canary_when_the_share_grows(text, first, second):
    less, more = (placement(with_canary(share)) for share in sorted((first, second)))

    assert revision(less, text) <= revision(more, text)
    assert revision(placement(with_canary(1.0)), text) == CANARY


@given(text=texts, share=shares, turns=st.lists(st.text(max_size=5), min_size=1, max_size=4))
def test_all_requests_of_one_prefix_are_placed_by_one_revision(text, share, turns):
    router = placement(with_canary(share))
    system = ("system", "You are a helpful clerk. " * 20 + text)
    prompts = [chat(system, ("user", turn)) for turn in turns]

    assert (
        len({revision(router, prompt=prompt, session=turn) for prompt, turn in zip(prompts, turns, strict=True)}) == 1
    )


@given(text=texts, share=shares, seed=st.integers(0, 1 << 64))
def test_routers_and_workers_agree_on_the_canarys_requests(text, share, seed):
    snapshot = with_canary(share)
    decisions = [decided(placement(snapshot, router, seed + number), text) for number, router in enumerate("aabb")]

    assert len({decision.policy.revision for decision in decisions}) == 1


def test_canaries_of_different_policies_get_different_prefixes():
    first, second = placement(with_canary(0.2)), placement(with_canary(0.2, name="other"))
    both = sum(revision(first, str(n)) == revision(second, str(n)) == CANARY for n in range(2000))

    assert both / 2000 == pytest.approx(0.04, abs=0.02)


@given(text=texts, share=shares)
def test_a_changed_boundary_does_not_change_the_canarys_requests(text, share):
    prompts = [chat(("system", "Be brief."), ("user", text + turn)) for turn in "ab"]
    moved = PrefixHashSettings(boundary=Boundary.SYSTEM)
    same, second = placement(with_canary(share)), placement(with_canary(share, moved, active=moved))

    assert [revision(same, prompt=it) for it in prompts] == [revision(second, prompt=it) for it in prompts]


def test_the_canarys_own_boundary_applies_to_its_requests():
    router = placement(with_canary(1.0, PrefixHashSettings(boundary=Boundary.SYSTEM)))
    first, second = (chat(("system", "Be brief."), ("user", text)) for text in "ab")

    assert decided(router, prompt=first).prefix == decided(router, prompt=second).prefix


def test_a_pools_boundary_determines_the_canarys_requests():
    router = placement(with_canary(0.5, tier1=Tier1(boundary=Boundary.SYSTEM)))
    system = ("system", "Be brief.")

    assert len({revision(router, prompt=chat(system, ("user", str(number)))) for number in range(20)}) == 1
    assert (
        len({revision(router, str(number)) for number in range(20)}) == 2
    )  # without a system prompt, by the default boundary


def test_a_request_without_a_prompt_uses_the_active_revision():
    router = placement(with_canary(1.0))
    nothing = PlacementRequest(None, None, None, NO_PROMPT)

    assert router.decide(nothing, HealthRegistry()).policy.revision == ACTIVE
    assert verdict_reason(router, nothing) is ArmReason.NO_PROMPT


def test_a_canary_may_be_limited_to_routers():
    snapshot = with_canary(1.0, routers=("router-1", "router-3"))

    assert [revision(placement(snapshot, f"router-{number}")) for number in (1, 2, 3)] == [CANARY, ACTIVE, CANARY]
    assert verdict_reason(placement(snapshot, "router-2"), request()) is ArmReason.OTHER_ROUTERS


def test_a_canary_may_be_limited_to_groups():
    groups = (TaskGroupConfig(name="coding"), TaskGroupConfig(name="batch"))
    all_of_them, first = (placement(with_canary(1.0, groups=groups, only=only)) for only in (None, ("coding",)))
    names = ("coding", "batch", None)

    assert [revision(all_of_them, group=name) for name in names] == [CANARY] * 3
    assert [revision(first, group=name) for name in names] == [CANARY, ACTIVE, ACTIVE]
    assert [verdict_reason(first, request(group=name)) for name in names] == [
        ArmReason.WITHIN_SHARE,
        ArmReason.OTHER_GROUPS,
        ArmReason.OTHER_GROUPS,
    ]


def test_a_task_groups_own_policy_may_have_a_canary():
    own = PolicyConfig(
        name="batch", revision=7, settings=RoundRobinSettings(), canary=Canary(revision=8, settings=LeastLoadSettings())
    )
    router = placement(config(pool(groups=(TaskGroupConfig(name="batch", policy=own),))))

    assert (revision(router, group="batch"), revision(router)) == (8, ACTIVE)


# --- verdicts ----------------------------------------------------------------------------------------


@given(text=texts, share=shares)
def test_the_verdict_agrees_with_the_placement(text, share):
    router = placement(with_canary(share))
    query = request(text)
    decision = router.decide(query, HealthRegistry())
    verdict = router.canary_verdict(decision, query)

    assert verdict is not None
    assert verdict.place is not None
    assert (verdict.active_revision, verdict.canary_revision, verdict.share) == (ACTIVE, CANARY, share)
    assert 0.0 <= verdict.place <= 1.0
    is_canary = decision.policy.revision == CANARY
    assert (verdict.arm is Arm.CANARY) == is_canary
    assert verdict.why is (ArmReason.WITHIN_SHARE if is_canary else ArmReason.BEYOND_SHARE)
    assert decision.route.arm is verdict.arm


# --- shared and retained state -----------------------------------------------------------------------


def test_both_revisions_share_loads_and_residency():
    tracker, residency = LoadTracker(), Residency()
    router = Placement(with_canary(0.5, LowestCostSettings()), tracker, residency=residency)
    by_revision = {}
    for number in range(40):
        decision = decided(router, f"{number} " + "much the same every time " * 40)
        router.dispatch(decision)
        by_revision[decision.policy.revision] = decision

    assert set(by_revision) == {ACTIVE, CANARY}
    assert len({id(decision.candidates) for decision in by_revision.values()}) == 1
    for decision in by_revision.values():  # recorded for both, although the ring placed one of them
        assert residency.match(decision.keys.chain).blocks == len(decision.keys.chain) > 0


def test_a_promoted_revision_keeps_what_it_learnt():
    settings = AffinityGroupsSettings(half_life=100)
    before = placement(with_canary(0.5, settings, active=RoundRobinSettings()))
    hot, rare, *_ = [text for text in map(str, range(100)) if revision(before, text) == CANARY]
    for _ in range(300):
        before.dispatch(decided(before, hot)).end()
    plan_before = plan_of(before, rare)
    promoted = config(pool(settings))
    promoted = config(replace(promoted.pools[0], policy=replace(promoted.pools[0].policy, revision=CANARY)))
    after, fresh = placement(promoted), placement(promoted)
    after.carry_over(before)

    assert len(plan_before) == 1
    assert plan_of(after, rare) == plan_before
    assert plan_of(fresh, rare) != plan_before


def plan_of(router: Placement, text: str) -> dict[int, list[str]]:
    decision = decided(router, text)
    assert isinstance(decision.route.strategy, AffinityGroups)
    return {int(prefix): [str(name) for name in owned] for prefix, owned in decision.route.strategy.plan().items()}


def test_changes_of_a_canary_keep_the_turns_of_the_active_revision():
    def turns(snapshots: list[RouterConfig]) -> list[str]:
        targets, before = [], None
        for snapshot in snapshots:
            router = placement(snapshot)
            if before is not None:
                router.carry_over(before)
            targets += [decided(router, group="batch").replica.name for _ in range(3)]
            before = router
        return targets

    groups = (TaskGroupConfig(name="batch"), TaskGroupConfig(name="coding"))
    stages = [
        with_canary(share, active=RoundRobinSettings(), groups=groups, only=("coding",)) for share in (0.1, 0.7, 1.0)
    ]
    ended = config(pool(RoundRobinSettings(), groups=groups))
    targets = turns([ended, *stages, ended])

    assert targets == (targets[:4] * 4)[:15]
    assert len(set(targets[:4])) == 4
