"""Likely mistakes in a policy's settings, given the fleet. Warnings never prevent publishing.

Each rule is a pure function of one route (a pool's own requests, or those of a task group) in ``RULES``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from controlplane.services.impact.effect import Route, enumerate_names, format_count, percent, routes_of
from routing import schema

BYTES_PER_TOKEN = 4  # of English text, roughly; routers assume the same: 256 bytes are about 64 tokens
ASSUMED_TOKENS = 262_144  # cache size of a replica until its engine reports one


@dataclass(frozen=True, slots=True)
class DraftWarning:
    """One likely mistake, shown before publishing."""

    id: str
    field: str  # the setting concerned; "" for the fleet
    text: str
    unaffected: str
    to_do: str


@dataclass(frozen=True, slots=True)
class Rule:
    """``find`` describes the problem of a route; None if there is none."""

    id: str
    field: str
    unaffected: str
    to_do: str
    find: Callable[[Route], str | None]


RULES: list[Rule] = []


def warnings_of(config: schema.RouterConfig, pool: str, group: str | None = None) -> list[DraftWarning]:
    """Warnings for the policy of a pool, or of one of its task groups.

    A pool's policy is checked for the task groups that it places too; equal warnings of several routes are merged.
    """
    texts: dict[str, dict[str, None]] = defaultdict(dict)
    for (route_pool, route_group), route in routes_of(config).items():
        placed = route.group is None or route.group.policy is None if group is None else route_group == group
        if route_pool != pool or not placed:
            continue
        for rule in RULES:
            if text := rule.find(route):
                texts[rule.id][text] = None
    return [_warning(rule, list(texts[rule.id])) for rule in RULES if rule.id in texts]


def _warning(rule: Rule, texts: list[str]) -> DraftWarning:
    text, other_groups = texts[0], len(texts) - 1
    if other_groups:
        text += f" The same applies to {other_groups} other task group{'' if other_groups == 1 else 's'}."
    return DraftWarning(rule.id, rule.field, text, rule.unaffected, rule.to_do)


def _rule(
    rule_id: str, field: str, unaffected: str, to_do: str
) -> Callable[[Callable[[Route], str | None]], Callable[[Route], str | None]]:
    def register(find: Callable[[Route], str | None]) -> Callable[[Route], str | None]:
        RULES.append(Rule(rule_id, field, unaffected, to_do, find))
        return find

    return register


# --- the fleet ------------------------------------------------------------------------------------------


@_rule(
    "no-replica",
    "",
    "Publishing makes nothing worse: the pool's requests get 503 either way.",
    "Add a replica on the fleet page.",
)
def _no_replica(route: Route) -> str | None:
    return f"Pool {route.pool.name} has no replica." if not route.pool.replicas and route.group is None else None


@_rule(
    "no-active-replica",
    "",
    "Running requests finish; new ones get 503 with any policy.",
    "Activate a replica on the fleet page.",
)
def _no_active_replica(route: Route) -> str | None:
    if route.group is not None or not route.pool.replicas or route.replicas:
        return None
    return f"None of the {format_count(len(route.pool.replicas), 'replica')} of pool {route.pool.name} is active."


@_rule(
    "no-active-group-replica",
    "",
    "All other requests of the pool are served.",
    "Assign the group an active replica, or activate one of its replicas.",
)
def _no_active_group_replica(route: Route) -> str | None:
    names = route.group.replicas if route.group else None
    if not names or route.replicas or not route.pool.replicas:
        return None
    return f"{route.label.capitalize()} may use only {enumerate_names(names)}, and none of these is active."


@_rule(
    "only-one-replica",
    "strategy",
    "Every request goes to that replica, as with any strategy.",
    "Publish anyway, or wait until there are two replicas.",
)
def _only_one_replica(route: Route) -> str | None:
    settings = route.settings
    if len(route.points) != 1 or not isinstance(settings, schema.ResidencySettings):
        return None
    return f"Requests of {route.label} have only one active replica, {route.replicas[0].name}."


@_rule(
    "weights-ignored",
    "strategy",
    "Each replica gets what it is measured to process; preferred replicas of new prompts still follow the weights.",
    "Nothing, if measured speed should decide; otherwise choose lowest_cost, which uses the weights.",
)
def _weights_ignored(route: Route) -> str | None:
    weights = sorted({replica.weight for replica in route.replicas})
    if not isinstance(route.settings, schema.LeastTtftSettings) or len(weights) < 2:
        return None
    values = enumerate_names([f"{weight:g}" for weight in weights])
    return f"The replicas of {route.label} have different weights ({values}); least_ttft uses measured speeds instead."


@_rule(
    "capacity-unknown",
    "strategy",
    "The cached tokens that responses report correct the estimate.",
    "Wait for the first scrape of its metrics, or set block_tokens and capacity_blocks of the replica.",
)
def _capacity_unknown(route: Route) -> str | None:
    if not isinstance(route.settings, schema.ResidencySettings):
        return None
    sizes = {replica.name: (replica.capacity_blocks, replica.block_tokens) for replica in route.replicas}
    unknown = [name for name, size in sizes.items() if None in size]
    if not unknown:
        return None
    return f"The cache size of {enumerate_names(unknown)} is not known yet; {ASSUMED_TOKENS:,} tokens are assumed."


# --- homes ----------------------------------------------------------------------------------------------


@_rule(
    "prefixes-on-all-replicas",
    "replicas",
    "Each conversation still stays on one replica.",
    "Choose fewer replicas per prefix, or session_affinity, which has the same effect.",
)
def _prefixes_on_all_replicas(route: Route) -> str | None:
    settings, active = route.settings, len(route.replicas)
    if not isinstance(settings, schema.TieredSettings) or active < 2 or settings.replicas < active:
        return None
    replicas = format_count(settings.replicas, "replica")
    return f"Each prefix is shared by {replicas}, and {route.label} has {active}: every replica caches every prefix."


@_rule(
    "hot-ratio-too-low",
    "hot_ratio",
    "The most frequent prefixes choose first; the others keep at least one replica.",
    "Choose a hot_ratio of at least one replica's share of the traffic.",
)
def _hot_ratio_too_low(route: Route) -> str | None:
    settings, active = route.settings, len(route.replicas)
    if not isinstance(settings, schema.AffinityGroupsSettings) or active < 2 or settings.hot_ratio * active >= 1:
        return None
    share = f"{percent(settings.hot_ratio)} of the work"
    return f"A prefix gets its own replicas from {share} on, which is less than the share of one of {active} replicas."


# --- the tier-1 boundary --------------------------------------------------------------------------------


@_rule(
    "prefix-shorter-than-block",
    "boundary_bytes",
    "Placement works, but it groups requests that have nothing cacheable in common.",
    "Make the prefix at least one block long.",
)
def _prefix_shorter_than_block(route: Route) -> str | None:
    tier1 = route.tier1
    blocks = [replica.block_tokens for replica in route.replicas if replica.block_tokens is not None]
    if tier1 is None or not blocks or not isinstance(route.settings, schema.Tier1Settings):
        return None
    counts_bytes = tier1.boundary in {schema.Boundary.BYTES, schema.Boundary.AUTO}
    if not counts_bytes or tier1.boundary_bytes >= max(blocks) * BYTES_PER_TOKEN:
        return None
    tokens = f"about {tier1.boundary_bytes // BYTES_PER_TOKEN:,} tokens"
    return (
        f"A prefix of {tier1.boundary_bytes:,} bytes is {tokens}, less than one KV block of {max(blocks):,}: engines "
        "cache whole blocks, so requests with such a prefix share nothing."
    )


@_rule(
    "boundary-marker-missing",
    "boundary_marker",
    "Requests are placed as with boundary auto.",
    "Enter the text before which the prefix ends, or choose auto.",
)
def _boundary_marker_missing(route: Route) -> str | None:
    settings = route.settings
    if not isinstance(settings, schema.Tier1Settings) or settings.boundary is not schema.Boundary.MARKER:
        return None
    return None if settings.boundary_marker else "The boundary is marker, but boundary_marker is empty: auto is used."


@_rule(
    "boundary-overridden",
    "boundary",
    "Prefixes end where they ended before.",
    "Change tier1 there, or leave the policy's boundary at its default.",
)
def _boundary_overridden(route: Route) -> str | None:
    settings, group = route.settings, route.group
    override = (group.tier1 if group else None) or route.pool.tier1
    if override is None or not isinstance(settings, schema.Tier1Settings) or settings.tier1 == schema.Tier1():
        return None
    owner = route.label if group and group.tier1 else f"pool {route.pool.name}"
    return f"The tier1 setting of {owner} overrides the policy's boundary for requests of {route.label}."
