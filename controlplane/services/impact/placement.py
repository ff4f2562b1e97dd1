"""How requests are placed: strategies, their settings, where openings end, trials. Route by route, told together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from controlplane.services.impact.effect import (
    Differences,
    Effect,
    Impact,
    Path,
    Route,
    joined,
    part,
    routes_of,
    shown,
    some,
)
from controlplane.services.impact.strategies import (
    OPENING_FIELDS,
    Consequence,
    change_of_opening,
    change_of_setting,
    change_of_strategy,
)
from routing import schema


@dataclass(frozen=True)
class _Change:
    """One consequence for one route."""

    kind: str
    verb: str  # what its sentence says between who and the consequence
    consequence: Consequence
    before: Any
    after: Any
    route: Route  # as it is afterwards
    paths: tuple[Path, ...]


def placement_effects(
    before: schema.RouterConfig | None, after: schema.RouterConfig, left: Differences
) -> list[Effect]:
    """One effect for each change, for all whom it concerns."""
    old, new = routes_of(before), routes_of(after)
    changes = [
        change
        for key, route in new.items()
        if key in old
        for change in _changes(old[key], route, _knew(old[key]), left)
    ]
    told = [_told(same) for same in _together(changes)]
    renumbered = list(_revisions(old, new, left, told))
    return [*told, *_trials(old, new, left), *renumbered]


def _changes(before: Route, after: Route, knew: bool, left: Differences) -> Iterator[_Change]:
    paths = tuple(path for path in left.under(before.policy_path, after.policy_path) if "trial" not in path)
    opening = _opening_paths(before, after, left)
    if before.settings.name != after.settings.name:
        consequence = change_of_strategy(before, after, knows=knew)
        verb = f"are placed by {after.settings.name} instead of {before.settings.name}"
        yield _Change(
            "strategy", verb, consequence, _plain(before.settings), _plain(after.settings), after, paths + opening
        )
        return
    for field in after.settings.__struct_fields__:
        old, new = getattr(before.settings, field), getattr(after.settings, field)
        if field not in OPENING_FIELDS and old != new:
            yield _Change(
                "setting",
                f"{field}:",
                _said(field, before, after),
                old,
                new,
                after,
                _fielded(paths, field, before, after),
            )
    moved = change_of_opening(before, after)
    if moved is not None:
        yield _Change("opening", "tier 1:", moved, _plain(before.tier1), _plain(after.tier1), after, opening)
    elif opening:
        unused = Consequence(Impact.QUIET, "what was changed about where openings end is not used, so nothing moves")
        yield _Change("opening", "tier 1:", unused, _plain(before.tier1), _plain(after.tier1), after, opening)


def _said(field: str, before: Route, after: Route) -> Consequence:
    said = change_of_setting(field, before, after)
    if said is not None:
        return said
    old, new = getattr(before.settings, field), getattr(after.settings, field)
    return Consequence(Impact.STEER, f"{field} is {shown(new, field)} instead of {shown(old, field)}")


def _fielded(paths: tuple[Path, ...], field: str, before: Route, after: Route) -> tuple[Path, ...]:
    """The setting's own leaves; all of a policy's where another policy took over."""
    if before.policy_path != after.policy_path:
        return paths
    return tuple(path for path in paths if path[-1] == field)


def _opening_paths(before: Route, after: Route, left: Differences) -> tuple[Path, ...]:
    """What differs about where a route's openings end."""
    places = [route.path for route in (before, after)] + [("pools", after.pool.name)]
    said = left.under(*((*place, "tier1") for place in places))
    own = left.under(before.policy_path, after.policy_path) if before.settings.name == after.settings.name else ()
    return said + tuple(path for path in own if path[-1] in OPENING_FIELDS and "trial" not in path)


def _knew(before: Route) -> bool:
    """Whether any policy of the pool asked what its replicas hold."""
    settings = [before.pool.policy.settings, *(group.policy.settings for group in before.pool.groups if group.policy)]
    return any(isinstance(one, schema.ResidencySettings) for one in settings)


def _together(changes: Iterable[_Change]) -> Iterable[list[_Change]]:
    """Those that say the same of different routes of a pool."""
    same: dict[tuple[Any, ...], list[_Change]] = {}
    for change in changes:
        same.setdefault((change.route.pool.name, change.kind, change.verb, change.consequence), []).append(change)
    return same.values()


def _told(same: list[_Change]) -> Effect:
    first, routes = same[0], [change.route for change in same]
    mark = "" if first.verb.endswith(":") else ":"
    text = f"Requests of {whom(routes)} {first.verb}{mark} {first.consequence.text}."
    if first.verb.endswith(":"):
        text = f"For requests of {whom(routes)}, {first.consequence.text}."
    return Effect(
        first.kind,
        first.consequence.impact,
        tuple(route.who for route in routes),
        text,
        first.before,
        first.after,
        first.consequence.moved_ratio,
        tuple(dict.fromkeys(path for change in same for path in change.paths)),
    )


def whom(routes: list[Route]) -> str:
    """Routes of one pool in a sentence: pool chat outside its task groups, and of groups a and b."""
    pool = routes[0].pool
    groups = [route.group.name for route in routes if route.group]
    named = f"{'task group' if len(groups) == 1 else 'task groups'} {some(groups)}" if groups else ""
    if all(route.group for route in routes):
        return f"{named} of pool {pool.name}"
    if len(routes) == 1 + len(pool.groups):
        return f"pool {pool.name}"
    outside = f"pool {pool.name} outside its task groups"
    return f"{outside}, and of {named}," if groups else outside


# --- trials and revisions ------------------------------------------------------------------------------


def _trials(old: Mapping[Any, Route], new: Mapping[Any, Route], left: Differences) -> Iterator[Effect]:
    """A trial that begins, grows, changes or ends; told once for each policy."""
    for path, route, before in _policies(old, new):
        paths = left.under((*path, "trial"))
        if paths:
            former = before.policy.trial if before else None
            yield _trial(route, former, route.policy.trial, paths)


def _trial(route: Route, before: schema.Canary | None, after: schema.Canary | None, paths: tuple[Path, ...]) -> Effect:
    policy = route.policy
    if after is None:
        ended = before.revision if before else 0
        end = (
            "is in force for all"
            if policy.revision == ended
            else f"is tried no more; revision {policy.revision} places all"
        )
        text = f"Revision {ended} of policy {policy.name} {end} of its requests."
    else:
        text = f"Revision {after.revision} ({after.settings.name}) of policy {policy.name} is tried on {_scope(after)}"
        text += f", until now on {_scope(before)}." if before and before.revision == after.revision else "."
    impact = Impact.QUIET if after is None and policy.revision != (before.revision if before else 0) else Impact.MOVE
    return Effect("trial", impact, (route.who,), text, _plain(before), _plain(after), None, paths)


def _scope(trial: schema.Canary) -> str:
    words = ["all of the prefix space" if trial.share >= 1 else f"{part(trial.share)} of the prefix space"]
    words += [f"for task groups {some(trial.groups)}"] if trial.groups is not None else []
    words += [f"on routers {some(trial.routers)}"] if trial.routers is not None else []
    return joined(words) if len(words) < 3 else ", ".join(words)


def _revisions(
    old: Mapping[Any, Route], new: Mapping[Any, Route], left: Differences, told: list[Effect]
) -> Iterator[Effect]:
    """Another number, or a policy of its own: a sentence of its own only where nothing else of the policy differs."""
    said = {path for effect in told for path in effect.paths}
    for path, route, before in _policies(old, new):
        paths = left.under(path)
        number = tuple(one for one in paths if one in {(*path, "revision"), path})
        if number and not any(one in said for one in paths):
            same = (
                f"says the same as {before.policy.name} did"
                if before and before.policy.name != route.policy.name
                else "says the same as before"
            )
            text = (
                f"Revision {route.policy.revision} of policy {route.policy.name} {same}: nothing is placed differently."
            )
            yield Effect("revision", Impact.QUIET, (route.who,), text, None, route.policy.revision, 0.0, number)
        elif number:
            first = next(place for place, effect in enumerate(told) if any(one in paths for one in effect.paths))
            told[first] = replace(told[first], paths=(*told[first].paths, *number))
    for path, _, _ in _policies({}, old):
        if path in left and path not in said and left[path][1] is None:
            text = f"{_name(path)} loses its own policy, and its pool's says the same: nothing is placed differently."
            yield Effect("revision", Impact.QUIET, (_name(path).lower(),), text, None, None, 0.0, (path,))


def _name(path: Path) -> str:
    """A task group's name in a sentence, by where its policy stands."""
    return f"Task group {path[1]}.{path[3]}"


def _policies(old: Mapping[Any, Route], new: Mapping[Any, Route]) -> Iterator[tuple[Path, Route, Route | None]]:
    """Each policy once, by the route that it belongs to: where it stands, afterwards, before."""
    for key, route in new.items():
        if route.policy_path == (*route.path, "policy"):
            yield route.policy_path, route, old.get(key)


def _plain(value: Any) -> Any:
    return None if value is None else msgspec.to_builtins(value)
