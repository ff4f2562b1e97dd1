"""Change impact of policies: strategies, their settings, tier-1 boundaries, canaries and revisions.

Each change is described per route; routes of one pool with the same description share one effect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from controlplane.services.impact.effect import (
    Differences,
    Effect,
    Impact,
    Path,
    Route,
    enumerate_names,
    format_count,
    format_value,
    percent,
    routes_of,
)
from controlplane.services.policies.rollout_plans import describe_stage
from routing import schema
from routing.schema import moved_by_chance

# What each strategy keeps on one replica; other strategies keep nothing together.
AFFINITY = {
    "session_affinity": "conversations",
    "prefix_hash": "prefixes",
    "tiered": "prefixes",
    "affinity_groups": "prefixes",
}
BOUNDARY_FIELDS = frozenset(schema.Tier1.__struct_fields__)


class Consequence(NamedTuple):
    """What a change does to the requests of one route; ``text`` continues a sentence."""

    impact: Impact
    text: str
    moved_ratio: float | None = None


@dataclass(frozen=True)
class _Change:
    """One consequence for one route."""

    kind: str
    verb: str  # "are placed by ..."; "" if the consequence is the whole sentence
    consequence: Consequence
    before: Any
    after: Any
    route: Route  # after the change
    paths: tuple[Path, ...]


def placement_effects(
    before: schema.RouterConfig | None, after: schema.RouterConfig, differences: Differences
) -> Iterator[Effect]:
    """One effect for each change, covering all routes with the same consequence."""
    old, new = routes_of(before), routes_of(after)
    similar: dict[tuple[Any, ...], list[_Change]] = defaultdict(list)
    for key, route in new.items():
        if key in old:
            for change in _route_changes(old[key], route, differences):
                similar[route.pool.name, change.kind, change.verb, change.consequence].append(change)
    described = set[Path]()
    for changes in similar.values():
        effect = _merge_changes(changes)
        described.update(effect.paths)
        yield effect
    yield from _canary_effects(old, new, differences)
    yield from _renumbering_effects(old, new, differences.keys() - described)


def _route_changes(before: Route, after: Route, differences: Differences) -> Iterator[_Change]:
    policies = (before.policy_path, after.policy_path)
    of_canaries = differences.under(*((*path, "canary") for path in policies))
    policy = tuple(path for path in differences.under(*policies) if path not in of_canaries)
    tier1_overrides = [(*path, "tier1") for path in (before.path, after.path, ("pools", after.pool.name))]
    boundary = differences.under(*tier1_overrides)
    if before.settings.name != after.settings.name:
        verb = f"are placed by {after.settings.name} instead of {before.settings.name}"
        sides = (_json(before.settings), _json(after.settings))
        yield _Change("strategy", verb, strategy_consequence(before, after), *sides, after, policy + boundary)
        return
    same_policy = before.policy_path == after.policy_path
    for field in after.settings.__struct_fields__:
        old, new = getattr(before.settings, field), getattr(after.settings, field)
        if field not in BOUNDARY_FIELDS and old != new:
            paths = tuple(path for path in policy if not same_policy or path[-1] in {field, "revision"})
            yield _Change("setting", "", setting_consequence(field, before, after), old, new, after, paths)
    boundary += tuple(path for path in policy if path[-1] in BOUNDARY_FIELDS)
    if boundary or before.tier1 != after.tier1:
        boundary += tuple(path for path in policy if path[-1] == "revision")
        sides = (_json(before.tier1), _json(after.tier1))
        yield _Change("tier1_boundary", "", boundary_consequence(before, after), *sides, after, boundary)


def _merge_changes(changes: Sequence[_Change]) -> Effect:
    first, routes = changes[0], [change.route for change in changes]
    subject, consequence = name_routes(routes), first.consequence
    clause = f"Requests of {subject} {first.verb}:" if first.verb else f"For requests of {subject.rstrip(',')},"
    return Effect(
        first.kind,
        consequence.impact,
        tuple(route.label for route in routes),
        f"{clause} {consequence.text}.",
        first.before,
        first.after,
        consequence.moved_ratio,
        tuple(dict.fromkeys(path for change in changes for path in change.paths)),
    )


def name_routes(routes: Sequence[Route]) -> str:
    """Routes of one pool in a sentence: ``pool chat outside its task groups, and of task groups a and b,``."""
    pool = routes[0].pool
    groups = [route.group.name for route in routes if route.group]
    named = f"{'task group' if len(groups) == 1 else 'task groups'} {enumerate_names(groups)}"
    if len(groups) == len(routes):
        return f"{named} of pool {pool.name}"
    if len(routes) == 1 + len(pool.groups):
        return f"pool {pool.name}"
    outside = f"pool {pool.name} outside its task groups"
    return f"{outside}, and of {named}," if groups else outside


# --- strategies -----------------------------------------------------------------------------------------


def strategy_consequence(before: Route, after: Route) -> Consequence:
    old, new = before.settings, after.settings
    if isinstance(new, schema.ResidencySettings):
        if isinstance(old, schema.ResidencySettings) or _tracks_blocks(before.pool):
            return Consequence(
                Impact.PLACEMENT, "routers already track the cached blocks of the replicas, so no cache becomes cold"
            )
        text = (
            "routers start to estimate the cached blocks of each replica from the requests that they send. At first "
            "every prompt counts as uncached"
        )
        return Consequence(Impact.COLD_CACHES, text)
    if not isinstance(old, schema.ResidencySettings):
        return Consequence(Impact.PLACEMENT, "neither strategy keeps a prefix on one replica, so no cache becomes cold")
    text = (
        "prompts no longer go to the replica that cached them; they reach it by chance, about once in "
        f"{format_count(len(after.replicas), 'request')}"
    )
    return Consequence(Impact.COLD_CACHES, text, moved_by_chance(after.points))


def _tracks_blocks(pool: schema.PoolConfig) -> bool:
    policies = [pool.policy, *(group.policy for group in pool.groups if group.policy)]
    return any(isinstance(policy.settings, schema.ResidencySettings) for policy in policies)


def _moved_conversations_ratio(before: Route, after: Route) -> float:
    """Share of conversations that move when the number of replicas of a prefix changes: the first ones stay."""
    active = max(1, len(after.replicas))
    smaller, larger = sorted(min(active, getattr(route.settings, "replicas", 1)) for route in (before, after))
    return 1.0 - smaller / larger


# --- settings -------------------------------------------------------------------------------------------

# By field: the effect on requests, the text, and how it continues if the value decreases or increases.
_SETTINGS: dict[str, tuple[Impact, str, str, str]] = {
    "slack_s": (
        Impact.PLACEMENT,
        "a request waits for its preferred replica up to {new} s of prefill longer than that saves, instead of {old}: ",
        "more requests overflow to another replica",
        "fewer requests overflow, and they wait longer",
    ),
    "hot_ratio": (
        Impact.MOVE,
        "a prefix gets its own replicas from {new} of the work on, instead of {old}: ",
        "more prefixes have their own replicas, and prefixes that move are cold at first",
        "fewer prefixes have their own replicas, and prefixes that move are cold at first",
    ),
    "half_life": (
        Impact.PLACEMENT,
        "the weight of a request halves after {new} further requests, instead of {old}: ",
        "the number of replicas of a prefix follows its traffic faster",
        "the number of replicas of a prefix follows its traffic more slowly",
    ),
    "min_hit_ratio": (
        Impact.PLACEMENT,
        "a replica is preferred once it has cached {new} of a prompt, instead of {old}: ",
        "more requests go to a replica with a partly cached prompt",
        "fewer requests go to a replica with a partly cached prompt",
    ),
    "alpha": (
        Impact.PLACEMENT,
        "uncached tokens weigh up to {new} times as much as queued tokens, instead of {old}: ",
        "requests leave the replica that cached their prefix sooner",
        "requests wait longer for the replica that cached their prefix",
    ),
}


def setting_consequence(field: str, before: Route, after: Route) -> Consequence:
    old, new = getattr(before.settings, field), getattr(after.settings, field)
    if field == "replicas":
        moved = _moved_conversations_ratio(before, after)
        outcome = (
            f"{percent(moved)} of conversations move"
            if moved
            else "the pool has no more replicas, so no conversation moves"
        )
        text = f"each prefix is shared by {format_count(new, 'replica')} instead of {old:,}: {outcome}"
        return Consequence(Impact.MOVE if moved else Impact.NONE, text, moved)
    format_setting = percent if field.endswith("_ratio") else format_value
    if field not in _SETTINGS:
        return Consequence(
            Impact.PLACEMENT, f"{field} is {format_value(new, field)} instead of {format_value(old, field)}"
        )
    impact, text, decreased, increased = _SETTINGS[field]
    return Consequence(
        impact, text.format(old=format_setting(old), new=format_setting(new)) + (decreased if new < old else increased)
    )


# --- the tier-1 boundary ----------------------------------------------------------------------------------

_BOUNDARY_PARAMETERS: dict[schema.Boundary, tuple[str, ...]] = {
    schema.Boundary.AUTO: ("boundary_bytes",),
    schema.Boundary.SYSTEM: (),
    schema.Boundary.BYTES: ("boundary_bytes",),
    schema.Boundary.MESSAGES: ("boundary_messages",),
    schema.Boundary.MARKER: ("boundary_marker", "boundary_bytes"),
}


def boundary_consequence(before: Route, after: Route) -> Consequence:
    old, new = before.tier1, after.tier1
    if old is None or new is None or _boundary_in_use(old) == _boundary_in_use(new):
        return Consequence(Impact.NONE, "the changed boundary settings are not used, so no prefix moves")
    text = f"tier-1 prefixes end {_boundary_text(new)} instead of {_boundary_text(old)}: "
    if not isinstance(after.settings, schema.Tier1Settings):
        return Consequence(Impact.NONE, text + "prefix hashes and charts change, placement does not")
    if old.boundary is new.boundary:
        if old.boundary is schema.Boundary.AUTO:
            return Consequence(Impact.MOVE, text + "only prompts whose tools and system prompt are short move")
        if old.boundary is schema.Boundary.MARKER and old.boundary_marker == new.boundary_marker:
            return Consequence(Impact.MOVE, text + "only prompts without the marker move")
    moved = moved_by_chance(after.points)
    text += (
        f"all prefixes get new hashes, and {percent(moved)} of them another preferred replica, to which they move when "
        "the one that has them cached is busy. Prefix hashes in earlier records no longer match"
    )
    return Consequence(Impact.MOVE, text, moved)


def _boundary_in_use(tier1: schema.Tier1 | None) -> tuple[Any, ...] | None:
    """The kind of boundary and the fields that it uses."""
    if tier1 is None:
        return None
    return (tier1.boundary, *(getattr(tier1, field) for field in _BOUNDARY_PARAMETERS[tier1.boundary]))


def _boundary_text(tier1: schema.Tier1) -> str:
    match tier1.boundary:
        case schema.Boundary.AUTO:
            return f"after tools and system prompt, or after {tier1.boundary_bytes:,} bytes where those are short"
        case schema.Boundary.BYTES:
            return f"after {tier1.boundary_bytes:,} bytes"
        case schema.Boundary.MESSAGES:
            return f"after message {tier1.boundary_messages}"
        case schema.Boundary.MARKER:
            return f"before the first {tier1.boundary_marker!r}"
    return "after tools and system prompt"


# --- canaries and revisions -------------------------------------------------------------------------------


def _canary_effects(old: Mapping[Any, Route], new: Mapping[Any, Route], differences: Differences) -> Iterator[Effect]:
    for path, route, old_route in _policies(old, new):
        if paths := differences.under((*path, "canary")):
            yield _canary_effect(route, old_route.policy.canary if old_route else None, paths)


def _canary_effect(route: Route, before: schema.Canary | None, paths: tuple[Path, ...]) -> Effect:
    policy, after, impact = route.policy, route.policy.canary, Impact.MOVE
    if after is not None:
        text = f"Revision {after.revision} ({after.settings.name}) of policy {policy.name} is a canary for "
        text += describe_stage(after)
        text += f", previously for {describe_stage(before)}." if before and before.revision == after.revision else "."
    elif before is not None and policy.revision != before.revision:
        text = (
            f"Revision {before.revision} of policy {policy.name} is no longer a canary; revision {policy.revision} "
            "places all requests."
        )
        impact = Impact.NONE
    else:
        text = f"Revision {policy.revision} of policy {policy.name} becomes active for all requests."
    return Effect("canary", impact, (route.label,), text, _json(before), _json(after), None, paths)


def _renumbering_effects(
    old: Mapping[Any, Route], new: Mapping[Any, Route], undescribed: set[Path]
) -> Iterator[Effect]:
    """Revisions, and policies of task groups, with the settings that applied before."""
    for path, route, old_route in _policies(old, new):
        paths = tuple({path, (*path, "revision")} & undescribed)
        if paths and old_route is not None:
            policy = route.policy
            same_as = "before" if old_route.policy.name == policy.name else f"policy {old_route.policy.name}"
            comparison = f"has the same settings as {same_as}: no request is placed differently."
            text = f"Revision {policy.revision} of policy {policy.name} {comparison}"
            yield Effect("revision", Impact.NONE, (route.label,), text, None, policy.revision, 0.0, paths)
    for path, route, _ in _policies({}, old):
        if path in undescribed and route.group is not None:
            text = (
                f"The policy of {route.label} is removed; the pool's policy has the same settings, so no prefix moves."
            )
            yield Effect("revision", Impact.NONE, (route.label,), text, None, None, 0.0, (path,))


def _policies(old: Mapping[Any, Route], new: Mapping[Any, Route]) -> Iterator[tuple[Path, Route, Route | None]]:
    """Each policy once: its path, its route, and that route before the change."""
    for key, route in new.items():
        if route.policy_path == (*route.path, "policy"):
            yield route.policy_path, route, old.get(key)


def _json(value: Any) -> Any:
    return None if value is None else msgspec.to_builtins(value)
