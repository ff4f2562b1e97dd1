"""What is allowed and yet likely a mistake, in a policy's settings in the fleet as it is.

Theory of operation. Routers refuse what they cannot run; these rules look at what they would run and say what somebody
who knows the strategies would say of it. Each rule is a pure function of one route (a pool's own requests,
or a task group's) and one line in ``RULES``. Nothing here keeps anybody from publishing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from controlplane.services.impact.effect import Route, part, routes_of, several, some
from controlplane.services.impact.strategies import KEPT, by_openings
from routing import schema

BYTES_PER_TOKEN = 4  # of English text, about; routers reckon with it too (ALGORITHMS: 256 bytes, about 64 tokens)
ASSUMED_TOKENS = 262_144  # of a replica's cache, until its engine told how large it is
TIGHT = 1.05  # load factors below it spill as soon as load is the least bit uneven


@dataclass(frozen=True, slots=True)
class DraftWarning:
    """One thing that somebody should look at before publishing."""

    id: str
    field: str  # the setting that it is about; "" for the fleet around it
    text: str
    still_safe: str
    to_do: str


@dataclass(frozen=True, slots=True)
class Rule:
    """``look`` answers what is wrong with a route, or None."""

    id: str
    field: str
    look: Callable[[Route], str | None]
    still_safe: str
    to_do: str


def warnings_of(config: schema.RouterConfig, pool: str, group: str | None = None) -> list[DraftWarning]:
    """What to look at in the policy of a pool, or of one of its groups, that a configuration holds.

    A pool's policy is looked at for the task groups that it places too; what is the same for several is said once.
    """
    found: dict[str, list[str]] = {}
    for route in _routes(config, pool, group):
        for rule in RULES:
            if text := rule.look(route):
                found.setdefault(rule.id, []).append(text)
    return [_warning(rule, found[rule.id]) for rule in RULES if rule.id in found]


def _warning(rule: Rule, texts: list[str]) -> DraftWarning:
    """What a rule says, of several routes that are not the same the first, and how many are like it."""
    first, *others = dict.fromkeys(texts)
    text = (
        f"{first} {several(len(others), 'task group')} more {'is' if len(others) == 1 else 'are'} like it."
        if others
        else first
    )
    return DraftWarning(rule.id, rule.field, text, rule.still_safe, rule.to_do)


def _routes(config: schema.RouterConfig, pool: str, group: str | None) -> Iterator[Route]:
    routes = routes_of(config)
    if group is not None:
        yield from (route for key, route in routes.items() if key == (pool, group))
        return
    for (of, _), route in routes.items():
        if of == pool and (route.group is None or route.group.policy is None):
            yield route


# --- the fleet around it -------------------------------------------------------------------------------


def _no_replica(route: Route) -> str | None:
    return f"Pool {route.pool.name} has no replica." if not route.pool.replicas and route.group is None else None


def _none_active(route: Route) -> str | None:
    if route.group is not None or not route.pool.replicas or route.replicas:
        return None
    return f"None of the {several(len(route.pool.replicas), 'replica')} of pool {route.pool.name} is active."


def _group_stranded(route: Route) -> str | None:
    names = route.group.replicas if route.group else None
    if not names or route.replicas or not route.pool.replicas:
        return None
    return f"{route.who.capitalize()} may use {some(names)} alone, and none of these is active."


def _nothing_to_choose(route: Route) -> str | None:
    kind = route.settings
    if len(route.points) != 1 or not (kind.name in KEPT or isinstance(kind, schema.ResidencySettings)):
        return None
    return f"Requests of {route.who} have one active replica, {route.replicas[0].name}: there is nothing to choose."


def _weights_ignored(route: Route) -> str | None:
    weights = sorted({replica.weight for replica in route.replicas})
    if not isinstance(route.settings, schema.LeastTtftSettings) or len(weights) < 2:
        return None
    differ = f"The weights of {route.who} differ ({some([f'{weight:g}' for weight in weights])})"
    return f"{differ}; least_ttft goes by the rate that each replica showed instead."


def _capacity_unknown(route: Route) -> str | None:
    if not isinstance(route.settings, schema.ResidencySettings):
        return None
    unknown = [one.name for one in route.replicas if one.capacity_blocks is None or one.block_tokens is None]
    if not unknown:
        return None
    return f"How much {some(unknown)} can cache is not known yet; {ASSUMED_TOKENS:,} tokens are assumed."


# --- bounded load --------------------------------------------------------------------------------------


def _no_room(route: Route) -> str | None:
    kind = route.settings
    if not isinstance(kind, schema.BoundedLoad) or kind.load_factor >= TIGHT or len(route.points) < 2:
        return None
    return (
        f"Load factor {kind.load_factor:g} leaves a replica hardly more than its share: with more than "
        f"{several(kind.min_bound * len(route.points), 'request')} at once nearly every second one spills."
    )


def _never_full(route: Route) -> str | None:
    kind = route.settings
    if not isinstance(kind, schema.BoundedLoad) or len(route.points) < 2:
        return None
    least = min(route.points.values()) / sum(route.points.values())
    if kind.load_factor * least < 1:
        return None
    return (
        f"Load factor {kind.load_factor:g} among {several(len(route.points), 'replica')} lets any one of them hold "
        "every request: nothing ever spills."
    )


def _never_bound(route: Route) -> str | None:
    kind = route.settings
    most = (route.group.concurrency if route.group else None) or route.pool.concurrency
    if not isinstance(kind, schema.BoundedLoad) or most is None or kind.min_bound < most.max_running:
        return None
    return (
        f"A replica may always hold {several(kind.min_bound, 'request')}, and no more than {most.max_running:,} run at "
        "once: the load factor never counts."
    )


def _all_share(route: Route) -> str | None:
    kind, there = route.settings, len(route.replicas)
    if not isinstance(kind, schema.TieredSettings) or there < 2 or kind.replicas < there:
        return None
    return (
        f"An opening is shared by {several(kind.replicas, 'replica')}, and {route.who} has {there}: every replica "
        "caches every opening."
    )


def _more_hot(route: Route) -> str | None:
    kind, there = route.settings, len(route.replicas)
    if not isinstance(kind, schema.AffinityGroupsSettings) or there < 2 or kind.hot_ratio * there >= 1:
        return None
    return (
        f"From {part(kind.hot_ratio)} of the requests on an opening is hot, which is less than one of {there} replicas."
    )


# --- where openings end --------------------------------------------------------------------------------


def _below_block(route: Route) -> str | None:
    tier1 = route.tier1
    blocks = [one.block_tokens for one in route.replicas if one.block_tokens is not None]
    if tier1 is None or not blocks or not by_openings(route):
        return None
    ends = tier1.boundary in {schema.Boundary.BYTES, schema.Boundary.AUTO}
    if not ends or tier1.boundary_bytes >= max(blocks) * BYTES_PER_TOKEN:
        return None
    return (
        f"An opening of {tier1.boundary_bytes:,} bytes is about {tier1.boundary_bytes // BYTES_PER_TOKEN:,} tokens, "
        f"less than one KV block of {max(blocks):,}: engines cache whole blocks, so such openings share nothing."
    )


def _no_marker(route: Route) -> str | None:
    kind = route.settings
    if not isinstance(kind, schema.Tier1Settings) or kind.boundary is not schema.Boundary.MARKER:
        return None
    return (
        None if kind.boundary_marker else "The boundary is marker, and boundary_marker says none: that comes to auto."
    )


def _not_asked(route: Route) -> str | None:
    kind = route.settings
    said = (route.group.tier1 if route.group else None) or route.pool.tier1
    if said is None or not isinstance(kind, schema.Tier1Settings) or kind.tier1 == schema.Tier1():
        return None
    owner = route.who if route.group and route.group.tier1 else f"pool {route.pool.name}"
    return f"Where openings of {route.who} end is said by tier1 of {owner}, so the policy's own boundary is not asked."


RULES = (
    Rule(
        "no-replica",
        "",
        _no_replica,
        "Publishing makes nothing worse: its requests get 503 either way.",
        "Add a replica on the fleet page.",
    ),
    Rule(
        "none-active",
        "",
        _none_active,
        "Requests that run finish; new ones get 503, whatever the policy.",
        "Activate a replica on the fleet page.",
    ),
    Rule(
        "group-stranded",
        "",
        _group_stranded,
        "All other requests of the pool are served.",
        "Give the group an active replica, or activate one of its own.",
    ),
    Rule(
        "nothing-to-choose",
        "strategy",
        _nothing_to_choose,
        "Every request goes to that replica, as with any strategy.",
        "Publish it all the same, or wait until there are two.",
    ),
    Rule(
        "weights-ignored",
        "strategy",
        _weights_ignored,
        "Each replica gets what it is seen to manage; homes of new prompts still go by weight.",
        "Nothing, if the rates are meant to decide; else take lowest_cost, which goes by weight.",
    ),
    Rule(
        "capacity-unknown",
        "strategy",
        _capacity_unknown,
        "What answers tell of cached tokens corrects the estimate.",
        "Wait for the first reading of its metrics, or say block_tokens and capacity_blocks of the replica.",
    ),
    Rule(
        "no-room",
        "load_factor",
        _no_room,
        "Load stays even; what spills has a stable second home.",
        "Take 1.25 to 2, and look at the share of spills.",
    ),
    Rule(
        "never-full",
        "load_factor",
        _never_full,
        "Replicas that fail are still left out.",
        "Take a load factor well below the number of replicas, such as 2.",
    ),
    Rule(
        "never-bound",
        "min_bound",
        _never_bound,
        "No more run at once than the concurrency limit says.",
        "Lower min_bound to the requests that one replica manages.",
    ),
    Rule(
        "all-share",
        "replicas",
        _all_share,
        "Conversations still keep to one replica.",
        "Take fewer replicas an opening, or session_affinity, which does the same more simply.",
    ),
    Rule(
        "more-hot-than-replicas",
        "hot_ratio",
        _more_hot,
        "The hottest openings choose first; the rest keep at least one replica.",
        "Take a hot_ratio of at least one replica's part of the traffic.",
    ),
    Rule(
        "boundary-below-block",
        "boundary_bytes",
        _below_block,
        "Placement works; it keeps together what has nothing in common to cache.",
        "Make the opening at least one block long.",
    ),
    Rule(
        "no-marker",
        "boundary_marker",
        _no_marker,
        "Requests are placed as with auto.",
        "Say the text that ends the opening, or take auto.",
    ),
    Rule(
        "boundary-not-asked",
        "boundary",
        _not_asked,
        "Openings end where they ended before.",
        "Change tier1 there, or leave the policy's boundary at its default.",
    ),
)
