"""What strategies keep together, and so what a change from one to another, or of one's settings, moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from controlplane.services.impact.effect import Impact, Route, part, several
from routing import schema


class Consequence(NamedTuple):
    """What a change does to the requests of one route; ``text`` follows a colon or stands as a clause."""

    impact: Impact
    text: str
    moved_ratio: float | None = None


# What a strategy keeps on its replica; a strategy that is not here keeps nothing together.
KEPT = {
    "session_affinity": "sessions",
    "prefix_hash": "openings",
    "tiered": "openings",
    "affinity_groups": "openings",
}


def change_of_strategy(before: Route, after: Route, *, knows: bool) -> Consequence:
    """``knows``: whether routers knew already what the pool's replicas hold, because a policy of it asked."""
    old, new = before.settings, after.settings
    if isinstance(new, schema.ResidencySettings):
        return _to_residency(isinstance(old, schema.ResidencySettings) or knows)
    kept, keeps = KEPT.get(old.name), KEPT.get(new.name)
    if keeps is None and kept is None and not isinstance(old, schema.ResidencySettings):
        return Consequence(Impact.STEER, "neither keeps prompts together, so no warm prefix is lost")
    moved = after.by_chance
    if keeps is None:
        text = (
            "nothing keeps prompts on the replicas that are warm for them any more; one that some replica has cached "
            f"meets that replica about once in {several(len(after.replicas), 'time')}"
        )
        return Consequence(Impact.RESET, text, moved)
    if keeps == kept and "affinity_groups" not in {old.name, new.name} and _opening(before) == _opening(after):
        moved = _conversations_moved(before, after)
        return Consequence(
            Impact.MOVE, f"openings keep their first home, and {part(moved)} of the conversations move", moved
        )
    text = f"homes are found anew, from {keeps}: {part(moved)} of what is warm gets another replica and is cold there"
    return Consequence(Impact.RESET, text, moved)


def change_of_setting(field: str, before: Route, after: Route) -> Consequence | None:
    """None for a setting that nobody has put into words yet."""
    say = _SETTINGS.get(field)
    return say(getattr(before.settings, field), getattr(after.settings, field), before, after) if say else None


def by_openings(route: Route) -> bool:
    """Whether a route's homes are found from the tier-1 prefix."""
    return isinstance(route.settings, schema.Tier1Settings)


def _to_residency(known: bool) -> Consequence:
    if known:
        return Consequence(Impact.STEER, "routers know already what the replicas hold, so nothing becomes cold")
    text = "what each replica holds is learnt anew from what routers send; until then every prompt counts as cold"
    return Consequence(Impact.RESET, text)


def _opening(route: Route) -> Any:
    return meaning(route.tier1) if route.tier1 else None


def _conversations_moved(before: Route, after: Route) -> float:
    """One replica an opening, or several among which the conversation picks: the first ones stay the same."""
    most = max(1, len(after.replicas))
    few, many = sorted(min(most, getattr(route.settings, "replicas", 1)) for route in (before, after))
    return 1.0 - few / many


# --- settings ------------------------------------------------------------------------------------------


def _load_factor(old: float, new: float, *_: Route) -> Consequence:
    outcome = (
        "load is more even, and more prefixes are met at a second home"
        if new < old
        else "more requests stay with their home, and load may be less even"
    )
    text = f"a replica may hold {new:g} times its share of the requests before it spills, instead of {old:g}: {outcome}"
    return Consequence(Impact.STEER, text)


def _min_bound(old: int, new: int, *_: Route) -> Consequence:
    text = f"a replica takes up to {several(new, 'request')} however small its share is, instead of {old:,}"
    return Consequence(Impact.STEER, text)


def _replicas(old: int, new: int, before: Route, after: Route) -> Consequence:
    moved = _conversations_moved(before, after)
    how = f"{part(moved)} of the conversations move" if moved else "there are no more, so nothing moves"
    text = f"an opening is shared by {several(new, 'replica')} instead of {old:,}: {how}"
    return Consequence(Impact.MOVE if moved else Impact.QUIET, text, moved)


def _hot_ratio(old: float, new: float, *_: Route) -> Consequence:
    text = (
        f"an opening gets replicas of its own from {new * 100:g} % of the requests on, instead of {old * 100:g} %: "
        f"{'more' if new < old else 'fewer'} openings have their own, and those whose replicas change are cold there"
    )
    return Consequence(Impact.MOVE, text)


def _half_life(old: int, new: int, *_: Route) -> Consequence:
    text = (
        f"a request counts half after {new:,} more instead of {old:,}, so replicas follow the traffic {_pace(old, new)}"
    )
    return Consequence(Impact.STEER, text)


def _min_hit_ratio(old: float, new: float, *_: Route) -> Consequence:
    text = f"a replica is preferred once it holds {new * 100:g} % of a prompt, instead of {old * 100:g} %"
    return Consequence(Impact.STEER, text)


def _alpha(old: float, new: float, *_: Route) -> Consequence:
    outcome = "prompts leave their warm replica sooner" if new < old else "prompts wait longer for their warm replica"
    text = f"a token to prefill counts up to {new:g} times one that waits, instead of {old:g}: {outcome}"
    return Consequence(Impact.STEER, text)


def _pace(old: int, new: int) -> str:
    return "sooner" if new < old else "later"


_SETTINGS: dict[str, Callable[..., Consequence]] = {
    "load_factor": _load_factor,
    "min_bound": _min_bound,
    "replicas": _replicas,
    "hot_ratio": _hot_ratio,
    "half_life": _half_life,
    "min_hit_ratio": _min_hit_ratio,
    "alpha": _alpha,
}


# --- where an opening ends -----------------------------------------------------------------------------

OPENING_FIELDS = frozenset(schema.Tier1.__struct_fields__)


def meaning(tier1: schema.Tier1) -> tuple[Any, ...]:
    """What of a boundary has any say: its length in messages has none where it is said in bytes."""
    match tier1.boundary:
        case schema.Boundary.AUTO:
            return (tier1.boundary, tier1.boundary_bytes)
        case schema.Boundary.BYTES:
            return (tier1.boundary, tier1.boundary_bytes)
        case schema.Boundary.MESSAGES:
            return (tier1.boundary, tier1.boundary_messages)
        case schema.Boundary.MARKER:
            return (tier1.boundary, tier1.boundary_marker, tier1.boundary_bytes)
    return (tier1.boundary,)


def end_of(tier1: schema.Tier1) -> str:
    """Where an opening ends, in words."""
    match tier1.boundary:
        case schema.Boundary.AUTO:
            return f"after tools and system prompt, or after {tier1.boundary_bytes:,} bytes where those are short"
        case schema.Boundary.BYTES:
            return f"after {tier1.boundary_bytes:,} bytes"
        case schema.Boundary.MESSAGES:
            return f"after message {tier1.boundary_messages}"
        case schema.Boundary.MARKER:
            return f"where {tier1.boundary_marker!r} first stands"
    return "after tools and system prompt"


def change_of_opening(before: Route, after: Route) -> Consequence | None:
    """What another end of the openings does; None where it is the same end."""
    old, new = before.tier1, after.tier1
    if old is None or new is None or meaning(old) == meaning(new):
        return None
    text = f"openings end {end_of(new)} instead of {end_of(old)}: "
    if not by_openings(after):
        return Consequence(Impact.QUIET, text + "figures and tier-1 hashes change, and placement does not go by them")
    if old.boundary is new.boundary and old.boundary in {schema.Boundary.AUTO, schema.Boundary.MARKER}:
        rare = "tools and system prompt are short" if old.boundary is schema.Boundary.AUTO else "the marker is missing"
        if old.boundary is schema.Boundary.AUTO or old.boundary_marker == new.boundary_marker:
            return Consequence(Impact.MOVE, text + f"only prompts where {rare} get other homes")
    moved = after.by_chance
    return Consequence(
        Impact.RESET, text + f"keys are hashed anew, and {part(moved)} of the openings get another home", moved
    )
